"""One forward: packed or apart, cached or whole, deep or shallow, kept or recomputed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import models

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
    return params(tokens, positions, segments)[0]


@quick
def cached_step(params, tokens, positions, cache):
    return params(tokens, positions, cache=cache)


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


@CONFIGS
def test_cache_equals_whole_rows(config):
    """Prefill 8 tokens of two slots, then one at a time; float32 and the same hidden states."""
    params = init(config)
    length = 14  # below max_position: "dynamic" keys keep the frequencies of the length they were read at
    tokens = np.random.default_rng(1).integers(0, 64, (2, length))
    positions = np.broadcast_to(np.arange(length), (2, length))
    whole = hidden_of(params, tokens, positions, np.ones_like(tokens))
    first, cache = cached_step(params, tokens[:, :8], positions[:, :8], models.empty_cache(config, 2, 20))
    hiddens = [first]
    for t in range(8, length):
        hidden, cache = cached_step(params, tokens[:, t : t + 1], positions[:, t : t + 1], cache)
        hiddens.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(hiddens, axis=1), whole, atol=2e-5)


def test_positions_beyond_the_cache_are_not_written():
    params = init(CONFIG)
    empty = models.empty_cache(CONFIG, 1, 6)
    _, cache = cached_step(params, jnp.array([[3, 4, 5]]), jnp.array([[0, 1, 6]]), empty)
    assert (jnp.abs(cache.k[:, 0, :2]).max(axis=(-1, -2)) > 0).all()
    assert not cache.k[:, 0, 2:].any() and not cache.v[:, 0, 2:].any()


def test_keep_kv_is_what_a_cache_holds():
    params = init(CONFIG)
    tokens, positions = jnp.arange(12).reshape(2, 6), jnp.tile(jnp.arange(6), (2, 1))
    _, (k, v) = quick(lambda params: params(tokens, positions, keep_kv=True))(params)
    _, cache = cached_step(params, tokens, positions, models.empty_cache(CONFIG, 2, 6))
    np.testing.assert_allclose(k, cache.k, atol=1e-5)
    np.testing.assert_allclose(v, cache.v, atol=1e-5)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_no_gradient(remat):
    params = init(WINDOWED)

    @functools.partial(quick, static_argnums=1)
    def grads(params, remat):
        return jax.grad(lambda p: (p(*packed(), remat=remat)[0] ** 2).sum())(params)

    for one, other in zip(
        jax.tree.leaves(grads(params, "none")), jax.tree.leaves(grads(params, remat)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * float(jnp.abs(one).max()))


@pytest.mark.parametrize("cached", [False, True], ids=["gradient", "decode"])
@pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=["full", "windows"])
def test_the_program_does_not_grow_with_depth(config, cached):
    """As many equations for 12 layers as for 2."""

    def size(num_layers):
        windows = None if config.window_layers is None else (False, True) * (num_layers // 2)
        deep = dataclasses.replace(config, num_layers=num_layers, window_layers=windows)
        if cached:
            cache = models.empty_cache(deep, 1, 40)
            jaxpr = jax.make_jaxpr(lambda p: p(*packed(), cache))(models.abstract(deep))
        else:
            loss = lambda p: p(*packed(), remat="dots")[0].sum()
            jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(models.abstract(deep))
        return sum(1 for _ in equations(jaxpr.jaxpr))

    assert size(2) == size(12)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from equations(inner)
