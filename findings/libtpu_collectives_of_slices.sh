#!/bin/sh
# A compiled program of several TPU slices has no collective for its exchanges between slices. For a topology with
# `num_slices=2`, libtpu replaces a psum over both slices by a `send` and a `recv` to the hosts (is_host_transfer) with
# the attribute _xla_megascale_transfer_type, and the module has the partitions of one slice only. A count of
# all-reduces in `compiled.as_text()` is 0, and replica groups have device numbers within a slice; with one slice of
# as many devices the same program has its all-reduce.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax[tpu]==${JAX:-0.10.2}"
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost "$folder/venv/bin/python" - <<'EOF'
import re
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

print("jax", jax.__version__, "libtpu", version("libtpu"))


def compiled(name, **options):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "fsdp"))
    of = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    x = jax.ShapeDtypeStruct((2, 1024, 512), jnp.float32, sharding=of("data", "fsdp"))
    text = jax.jit(lambda x: x.sum(0), out_shardings=of("fsdp")).lower(x).compile().as_text()
    reduces = len(re.findall(r" all-reduce(?:-start)?\(", text))
    sends = len(re.findall(r'_xla_megascale_transfer_type="ALL_REDUCE"', text))
    partitions = re.search(r"num_partitions=(\d+)", text)[1]
    print(name, options, "all-reduces", reduces, "transfers by hosts", sends, "partitions", partitions)
    return reduces, sends, partitions


one, two = compiled("v5e:2x4"), compiled("v5e:2x2", num_slices=2)
sys.exit(one != (1, 0, "8") or two != (0, 2, "4"))
EOF
