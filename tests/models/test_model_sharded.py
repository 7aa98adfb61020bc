"""Eight devices give the logits of one."""

import functools

import jax
import numpy as np
import pytest
from tiny_models import random_params

from jaxrl_llm import models
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN, put_rows

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
    "data=2 fsdp=2 tensor=2": MeshConfig(data=2, fsdp=2, tensor=2),
    "sequence=2 fsdp=4": MeshConfig(sequence=2),
    "sequence=2 tensor=4, 10 tokens of a row between blocks": MeshConfig(fsdp=1, sequence=2, tensor=4),
    "tensor=4 data=2, more than kv heads": MeshConfig(data=2, fsdp=1, tensor=4),
}


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def logits(params, *row):
    return params(*row) @ params.head.T


@functools.cache
def on_one_device():
    return np.asarray(logits(random_params(CONFIG), *rows()))


def rows():
    """8 rows of 80 tokens: a trajectory of 50, one of 20, padding."""
    tokens = np.random.default_rng(0).integers(0, 64, (8, 80), np.int32)
    positions = np.concatenate([np.arange(50), np.arange(20), np.zeros(10)]).astype(np.int32)
    segments = np.repeat([1, 2, 0], [50, 20, 10]).astype(np.int32)
    return tokens, np.tile(positions, (8, 1)), np.tile(segments, (8, 1))


@pytest.mark.parametrize("mesh_config", MESHES.values(), ids=MESHES)
def test_eight_devices_give_the_logits_of_one(mesh_config):
    mesh = make_mesh(mesh_config)
    params = jax.device_put(random_params(CONFIG), models.shardings(CONFIG, mesh, TRAIN))
    with jax.set_mesh(mesh):
        got = logits(params, *put_rows(mesh, rows()))
    assert len(got.sharding.device_set) == 8
    np.testing.assert_allclose(got, on_one_device(), atol=1e-5 * np.abs(on_one_device()).max(), rtol=0)
