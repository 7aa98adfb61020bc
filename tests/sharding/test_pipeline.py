"""A pipeline over stages computes what the layers compute one after the other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.mixer_config import DeltaConfig
from jaxrl_llm.models.stacks import layers_outside, stages_problem
from jaxrl_llm.sharding.pipeline import pipelined
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

LAYERS, WIDTH = 4, 6


def layers(x, weights, of_both, of_rows):
    """x w + b of the layer and row, twice or half for each row; sums over rows, and rows of each layer."""

    def step(x, inputs):
        w, b = inputs
        x = jnp.tanh(x @ w) * of_rows[:, None, None] + b[:, None, None]
        return x, (jnp.sum(x, axis=(0, 1)), x[..., 0] * 2)

    x, (sums, each) = jax.lax.scan(step, x, (weights, of_both))
    return x, sums, each


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        (MeshConfig(stage=2, fsdp=1), 2),
        pytest.param(MeshConfig(stage=4, fsdp=1), 12, marks=pytest.mark.slow),
        (MeshConfig(data=2, stage=2), 8),
    ],
    ids=str,
)
def test_stages_compute_what_the_layers_compute(mesh, rows):
    """Value, sums, outputs of each layer and row, and all gradients."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    x, weights, of_both = draw(rows, 3, WIDTH), draw(LAYERS, WIDTH, WIDTH), draw(LAYERS, rows)
    of_rows = jnp.arange(rows) % 2 + 0.5
    cotangents = draw(rows, 3, WIDTH), draw(LAYERS, WIDTH), draw(LAYERS, rows, 3)

    def all_of(function):
        outputs, backward = jax.vjp(lambda *args: function(*args, of_rows), x, weights, of_both)
        return outputs, backward(cotangents)

    expected = all_of(layers)
    with jax.set_mesh(make_mesh(mesh, jax.devices()[: max(mesh.stage * mesh.data * abs(mesh.fsdp), 1)])):
        got = jax.jit(lambda: all_of(pipelined(layers, mesh.stage)))()
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


MODEL = TransformerConfig(num_layers=30)
HYBRID = dataclasses.replace(
    MODEL, num_layers=12, layer_kinds=("delta", "delta", "attention") * 4, delta=DeltaConfig(2, 4, 8, 8)
)
DENSE_FIRST = dataclasses.replace(MODEL, num_layers=61, moe=MoEConfig(4, 2, 16, dense_layers=3))


SHARED = dataclasses.replace(MODEL, shared_kv_layers=10)


@pytest.mark.parametrize(
    ("model", "stages", "outside"),
    [(MODEL, 1, 30), (MODEL, 5, 0), (MODEL, 4, 2), (HYBRID, 4, 0), (HYBRID, 3, 3), (DENSE_FIRST, 16, 13)],
)
def test_layers_that_stages_leave_are_computed_before(model, stages, outside):
    """30 = 2 + 4 x 7; 12 in patterns of 3 = 3 + 3 x 3; 61 = 13 + 16 x 3, of which 3 are dense."""
    assert layers_outside(model, stages) == outside
    assert stages_problem(model, stages) is None


@pytest.mark.parametrize(
    ("model", "stages", "problem"),
    [
        (MODEL, 31, "the 30 layers have no such division. Set --mesh.stage 30."),
        (HYBRID, 6, "the 12 layers have no such division. Set --mesh.stage 4."),
        (SHARED, 2, "the 30 layers read keys and values of earlier ones. Set --mesh.stage 1."),
    ],
)
def test_a_pipeline_without_equal_stages_is_refused_with_the_nearest_number(model, stages, problem):
    start = f"--mesh.stage is {stages}: stages have equal layers in the same order, and "
    assert stages_problem(model, stages) == start + problem
