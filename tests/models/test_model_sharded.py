"""Eight devices give the logits of one."""

import functools

import jax
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN, sharding_for

CONFIG = models.TransformerConfig(
    vocab_size=64,
    hidden_size=32,
    mlp_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    initializer_range=0.3,
    sliding_window=24,
    window_layers=(True, False),
)
MESHES = {
    "fsdp=8": MeshConfig(),
    "tensor=2 fsdp=4": MeshConfig(tensor=2),
    "data=2 fsdp=2 tensor=2": MeshConfig(data=2, fsdp=2, tensor=2),
    "sequence=2 fsdp=4": MeshConfig(sequence=2),
    "tensor=4 data=2, more than kv heads": MeshConfig(data=2, fsdp=1, tensor=4),
}


quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def weights():
    return quick(models.init, static_argnums=0)(CONFIG, jax.random.key(0))


@quick
def logits(params, *row):
    return params(*row) @ params.head.T


@functools.cache
def on_one_device():
    return np.asarray(logits(weights(), *rows()))


def rows():
    """8 rows of 80 tokens: a trajectory of 50, one of 20, padding."""
    tokens = np.random.default_rng(0).integers(0, 64, (8, 80), np.int32)
    positions = np.concatenate([np.arange(50), np.arange(20), np.zeros(10)]).astype(np.int32)
    segments = np.repeat([1, 2, 0], [50, 20, 10]).astype(np.int32)
    return tokens, np.tile(positions, (8, 1)), np.tile(segments, (8, 1))


@pytest.mark.parametrize("mesh_config", MESHES.values(), ids=MESHES)
def test_eight_devices_give_the_logits_of_one(mesh_config):
    mesh = make_mesh(mesh_config)
    layout = models.shardings(CONFIG, mesh, TRAIN)
    params = jax.device_put(weights(), layout)
    batch = [jax.device_put(x, sharding_for(mesh, ("batch", "sequence"), x.shape, TRAIN)) for x in rows()]
    with jax.set_mesh(mesh):
        found = logits(params, *batch)
    assert len(found.sharding.device_set) == 8
    np.testing.assert_allclose(found, on_one_device(), atol=1e-5 * np.abs(on_one_device()).max(), rtol=0)
