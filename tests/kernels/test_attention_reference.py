"""The dense definition of attention by hand numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels.flash_attention import reference

FAST = {"xla_backend_optimization_level": 0}  # of compilation
quick = functools.partial(jax.jit, static_argnames=("scale", "softcap"))
attention = quick(reference.attention)


def inputs(length=70, heads=4, kv_heads=2, dim=8, batch=2):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(batch, length, n, dim) for n in (heads, kv_heads, kv_heads)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def triangle(length, batch=2):
    return jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))


def test_by_hand():
    """Scores scale * q k = ln 1, ln 3, and a hidden key: weights 1/4, 3/4, 0."""
    q = jnp.full((1, 1, 1, 1), 2.0)
    k = jnp.array([0.0, np.log(3.0), 50.0]).reshape(1, 3, 1, 1)
    v = jnp.array([8.0, 4.0, 1000.0]).reshape(1, 3, 1, 1)
    visible = jnp.array([[[True, True, False]]])
    out = attention(q, k, v, visible, scale=0.5)
    np.testing.assert_allclose(out, np.full((1, 1, 1, 1), 0.25 * 8 + 0.75 * 4), rtol=1e-6)


def test_softcap_by_hand():
    """Scores 0 and 100 with cap 1 become 0 and tanh(100) = 1: weights 1 / (1 + e), e / (1 + e)."""
    q = jnp.ones((1, 1, 1, 1))
    k = jnp.array([0.0, 100.0]).reshape(1, 2, 1, 1)
    v = jnp.array([0.0, 1.0]).reshape(1, 2, 1, 1)
    out = attention(q, k, v, jnp.ones((1, 1, 2), bool), scale=1.0, softcap=1.0)
    np.testing.assert_allclose(out.item(), np.e / (1 + np.e), rtol=1e-6)


def test_blind_rows_are_zero_and_gradients_finite():
    """Padding sees nothing; neither it nor enormous scores may make a NaN."""
    q, k, v = inputs(length=6)
    visible = triangle(6).at[0, 2:4].set(False)
    loss = lambda q, k, v: (attention(q, k, v, visible, scale=300.0) ** 2).sum()
    out = attention(q, k, v, visible, scale=300.0)
    np.testing.assert_array_equal(out[0, 2:4], 0)
    assert (jnp.abs(out[1]).max(axis=(-1, -2)) > 0).all()
    grads = jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=FAST)(q, k, v)
    assert all(jnp.isfinite(grad).all() for grad in grads)
    assert (grads[0][0, 2:4] == 0).all()


def test_what_is_hidden_has_no_influence():
    q, k, v = inputs(length=6)
    out = attention(q, k, v, triangle(6), scale=0.3)
    changed = attention(q, k.at[:, 4:].set(1e4), v.at[:, 4:].set(-1e4), triangle(6), scale=0.3)
    np.testing.assert_array_equal(out[:, :4], changed[:, :4])
    assert jnp.abs(out[:, 4:] - changed[:, 4:]).max() > 1


def test_shared_key_heads_equal_repeated_ones():
    q, k, v = inputs()
    out = attention(q, k, v, triangle(70), scale=0.3)
    repeated = attention(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2), triangle(70), scale=0.3)
    np.testing.assert_allclose(out, repeated, atol=1e-6)


def test_is_softmax_attention_written_plainly():
    q, k, v = (np.asarray(x, np.float64) for x in inputs(length=9))
    scores = np.einsum("bthe,bche->bhtc", q, k.repeat(2, axis=2)) * 0.3
    scores[:, :, ~np.tril(np.ones((9, 9), bool))] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = np.einsum("bhtc,bche->bthe", weights, v.repeat(2, axis=2))
    out = attention(*inputs(length=9), triangle(9), scale=0.3)
    np.testing.assert_allclose(out, wanted, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_keeps_its_type_and_float32_statistics(dtype):
    q, k, v = inputs()
    exact = attention(q, k, v, triangle(70), scale=0.3)
    half = attention(*(x.astype(dtype) for x in (q, k, v)), triangle(70), scale=0.3)
    assert half.dtype == dtype
    np.testing.assert_allclose(half.astype(jnp.float32), exact, atol=0.03)
