#!/bin/sh
# Devices of a compile-only CUDA topology do not tell the slices that its name asks for. The name is slices x hosts x
# devices (GpuTopologyProto: devices of a slice have NVLink in common), and yet every device of "2x1x8" has slice_index
# 0, as those of "1x2x8" have; they differ by process_index alone. Code that groups devices by `slice_index`, which on a
# TPU topology with num_slices=2 is 0 and 1, takes two hosts of GPUs for one fast domain.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
jax=${JAX:-0.10.2}
"$folder/venv/bin/pip" install --quiet "jax[tpu]==$jax" "jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax"
TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost "$folder/venv/bin/python" - <<'EOF'
import sys
from importlib.metadata import version

import jax
from jax.experimental import topologies

jax.config.update("jax_platforms", "cpu")
print("jax", jax.__version__, "jax-cuda13-pjrt", version("jax-cuda13-pjrt"), "libtpu", version("libtpu"))
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
"""


def numbers(devices):
    found = sorted({(device.slice_index, device.process_index) for device in devices})
    print("(slice_index, process_index):", found)
    return found


gpus = [topologies.get_topology_desc(platform="cuda", target_config=H100, topology=name).devices for name in ("1x2x8", "2x1x8")]
tpus = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4", num_slices=2).devices
found = [numbers(devices) for devices in (*gpus, tpus)]
sys.exit(found[:2] != [[(0, 0), (0, 1)]] * 2 or {index for index, _ in found[2]} != {0, 1})
EOF
