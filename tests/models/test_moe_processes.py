"""Experts divided over the devices of two processes: loss and gradient of one device."""

from pathlib import Path

import jax
import numpy as np
import pytest
from distributed import run_processes
from test_moe import assert_close, on_one_device

SCRIPT = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
sys.path.insert(0, sys.argv[1])
from test_moe import CONFIG, loss_and_gradient, rows
from jaxrl_llm import models
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN, put_rows

for fsdp, expert in ((2, 2), (1, 4)):
    mesh = make_mesh(MeshConfig(fsdp=fsdp, expert=expert))
    layout = models.shardings(CONFIG, mesh, TRAIN)
    whole = models.init(CONFIG, jax.random.key(0))
    put = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: np.asarray(x)[i])
    sharded = jax.tree.map(put, whole, layout)
    experts = dict(models.named_leaves(sharded))["layers.expert_gate"]
    assert not experts.is_fully_addressable
    assert experts.sharding.shard_shape(experts.shape) == (1, 8 // expert, 32 // fsdp, 16)
    with jax.set_mesh(mesh):
        got = loss_and_gradient(sharded, *put_rows(mesh, rows()))
        got = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(got)
    if jax.process_index() == 0:
        np.savez(f"{sys.argv[2]}/{expert}.npz", *map(np.asarray, jax.tree.leaves(got)))
"""


@pytest.mark.slow
def test_two_processes_give_the_gradient_of_one_device(tmp_path):
    """Groups of 2 devices share the experts inside a process, then all 4 across both."""
    run_processes(SCRIPT, 2, [str(Path(__file__).parent), str(tmp_path)], devices=2)
    expected = jax.tree.leaves(on_one_device())
    for expert in (2, 4):
        with np.load(tmp_path / f"{expert}.npz") as got:
            assert_close([got[f"arr_{i}"] for i in range(len(expected))], expected)
