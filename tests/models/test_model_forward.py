"""One forward: packed or apart, deep or shallow, kept or recomputed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels import target
from jaxrl_llm import models
from jaxrl_llm.models.kernels import describe
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh

CONFIG = models.TransformerConfig(
    vocab_size=64,
    hidden_size=32,
    mlp_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=16,
    initializer_range=0.3,
)
WINDOWED = dataclasses.replace(CONFIG, sliding_window=5, window_layers=(False, True))
DYNAMIC = dataclasses.replace(CONFIG, rope=models.RopeConfig(scaling="dynamic", factor=2.0, theta=100.0))
CONFIGS = pytest.mark.parametrize(
    "config", [CONFIG, WINDOWED, DYNAMIC], ids=["full", "window in one layer", "dynamic rope"]
)
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def init(config):
    return quick(models.init, static_argnums=0)(config, jax.random.key(0))


@quick
def hidden_of(params, tokens, positions, segments):
    return params(tokens, positions, segments)


def trajectories():
    """Three, of 9, 21 and 5 tokens; the second is longer than max_position."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, n) for n in (9, 21, 5)]


def packed(length=40):
    """All three in one row, then padding."""
    tokens, positions, segments = row = np.zeros((3, 1, length), np.int32)
    start = 0
    for number, ids in enumerate(trajectories(), 1):
        end = start + len(ids)
        tokens[0, start:end] = ids
        positions[0, start:end] = np.arange(len(ids))
        segments[0, start:end] = number
        start = end
    return jnp.asarray(row)


@CONFIGS
def test_packed_row_equals_separate_rows(config):
    params = init(config)
    together = hidden_of(params, *packed())[0]
    assert jnp.isfinite(together).all()
    start = 0
    for ids in trajectories():
        alone = hidden_of(params, ids[None], np.arange(len(ids))[None], np.ones((1, len(ids)), np.int32))
        np.testing.assert_allclose(together[start : start + len(ids)], alone[0], atol=2e-5)
        start += len(ids)


def test_padding_and_later_tokens_have_no_influence():
    params = init(CONFIG)
    tokens, positions, segments = packed()
    before = hidden_of(params, tokens, positions, segments)
    padded = tokens.at[:, 35:].set(7)
    np.testing.assert_array_equal(before[:, :35], hidden_of(params, padded, positions, segments)[:, :35])
    later = tokens.at[:, 20:30].set(7)
    after = hidden_of(params, later, positions, segments)
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    np.testing.assert_array_equal(before[:, 30:35], after[:, 30:35])  # another trajectory
    assert jnp.abs(before[:, 20:30] - after[:, 20:30]).max() > 0.1


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_no_gradient(remat):
    params = init(WINDOWED)

    @functools.partial(quick, static_argnums=1)
    def grads(params, remat):
        return jax.grad(lambda p: (p(*packed(), remat=remat) ** 2).sum())(params)

    for one, other in zip(
        jax.tree.leaves(grads(params, "none")), jax.tree.leaves(grads(params, remat)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * float(jnp.abs(one).max()))


@pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=["full", "windows"])
def test_the_gradient_program_does_not_grow_with_depth(config):
    """As many equations for 32 layers as for 16."""

    def size(num_layers):
        windows = None if config.window_layers is None else (False, True) * (num_layers // 2)
        deep = dataclasses.replace(config, num_layers=num_layers, window_layers=windows)
        loss = lambda p: p(*packed(), remat="dots").sum()
        jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(models.abstract(deep))
        return sum(1 for _ in equations(jaxpr.jaxpr))

    assert size(16) == size(32)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize(
    ("kind", "dtype", "said"),
    [
        (
            "cpu",
            "float32",
            "attention blockwise, log-probs chunked (cpu: plain JAX, there are no kernels for it)",
        ),
        (
            "NVIDIA H100 80GB HBM3",
            "bfloat16",
            "attention pallas_gpu, log-probs pallas_gpu (NVIDIA H100 80GB HBM3: Pallas kernels for Hopper)",
        ),
        (
            "NVIDIA H100 80GB HBM3",
            "float32",
            "attention blockwise (wgmma multiplies bfloat16 and float16, not float32), "
            "log-probs chunked (pallas_gpu multiplies bfloat16 and float16, not float32)",
        ),
    ],
)
def test_a_run_says_which_kernels_it_has_and_why(kind, dtype, said, monkeypatch):
    platform = "cpu" if kind == "cpu" else "gpu"
    monkeypatch.setattr(target, "device", lambda: (platform, kind))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert describe(models.TransformerConfig(), dtype, mesh) == said
    assert "--strict" in describe(models.TransformerConfig(), dtype, mesh, strict=True)
