"""Experts divided over the devices of two processes: loss and gradient of one device."""

from pathlib import Path

import jax
import numpy as np
import pytest
from distributed import run_processes
from test_router import assert_close, on_one_device, params, params_forward, rows

SCRIPT = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
sys.path.insert(0, sys.argv[1])
from test_router import CONFIG, loss_and_gradient, rows
from jaxrl_llm import models
from jaxrl_llm.models.decode import decode_ring, decode_shardings, decode_weights, init_ring_cache
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, TRAIN, put_rows

for fsdp, expert in ((1, 4), (2, 2)):
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
        replicated = NamedSharding(mesh, PartitionSpec())
        got = jax.jit(lambda x: x, out_shardings=replicated)(got)
    if jax.process_index() == 0:
        np.savez(f"{sys.argv[2]}/{expert}.npz", *map(np.asarray, jax.tree.leaves(got)))

copy = jax.jit(
    lambda params: decode_weights(params, np.float32), out_shardings=decode_shardings(CONFIG, mesh, ROLLOUT)
)
def first_hidden(weights, token):
    return decode_ring(CONFIG, weights, init_ring_cache(CONFIG, 8, 1, np.float32), token, 0 * token)[0]
with jax.set_mesh(mesh):
    weights = copy(sharded)
    experts = weights.layers[0].expert_gate[...]
    assert not experts.is_fully_addressable
    assert experts.sharding.shard_shape(experts.shape) == (2, 32, 16)
    hidden = jax.jit(first_hidden, out_shardings=replicated)(weights, rows()[0][:, 0])
if jax.process_index() == 0:
    np.save(f"{sys.argv[2]}/hidden.npy", hidden)
"""


@pytest.mark.slow
def test_two_processes_give_the_gradient_of_one_device(tmp_path):
    """All 4 devices of both divide the experts, then groups of 2 in a process, whose rollout's copy divides
    them over all 4 and decodes the first token."""
    run_processes(SCRIPT, 2, [str(Path(__file__).parent), str(tmp_path)], devices=2)
    expected = jax.tree.leaves(on_one_device())
    for expert in (2, 4):
        with np.load(tmp_path / f"{expert}.npz") as got:
            assert_close([got[f"arr_{i}"] for i in range(len(expected))], expected)
    assert_close(np.load(tmp_path / "hidden.npy"), params_forward(params(), *rows())[:, 0])
