"""The dense definition of attention, by hand and against the NumPy oracle."""

import functools

import jax
import jax.numpy as jnp
import kernel_oracles as oracles
import numpy as np
import pytest
from kernel_oracles import assert_close

from jaxrl_kernels.flash_attention import reference
from jaxrl_kernels.flash_attention.sinks import add_sinks
from jaxrl_kernels.flash_attention.spec import AttentionSpec

FAST = {"xla_backend_optimization_level": 0}  # of compilation
T = 9


@functools.partial(jax.jit, static_argnames=("scale", "softcap"), compiler_options=FAST)
def attention(q, k, v, visible, *, scale, softcap=None):
    return reference.dense_attention(AttentionSpec(scale, softcap=softcap), q, k, v, visible)[0]


def inputs():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, T, n, 8)).astype(np.float32) for n in (4, 2, 2)]


TRIANGLE = np.broadcast_to(np.tril(np.ones((T, T), bool)), (2, T, T))


def test_by_hand():
    """Scores scale * q k = ln 1, ln 3, and a hidden key: weights 1/4, 3/4, 0."""
    q = np.full((1, 1, 1, 1), 2.0, np.float32)
    k = np.array([0.0, np.log(3.0), 50.0], np.float32).reshape(1, 3, 1, 1)
    v = np.array([8.0, 4.0, 1000.0], np.float32).reshape(1, 3, 1, 1)
    out = attention(q, k, v, np.array([[[True, True, False]]]), scale=0.5)
    np.testing.assert_allclose(out, np.full((1, 1, 1, 1), 0.25 * 8 + 0.75 * 4), rtol=1e-6)


def test_softcap_by_hand():
    """Scores 0 and 100 with cap 1 become 0 and tanh(100) = 1: weights 1 / (1 + e), e / (1 + e)."""
    q = np.ones((1, 1, 1, 1), np.float32)
    k = np.array([0.0, 100.0], np.float32).reshape(1, 2, 1, 1)
    v = np.array([0.0, 1.0], np.float32).reshape(1, 2, 1, 1)
    out = attention(q, k, v, np.ones((1, 1, 2), bool), scale=1.0, softcap=1.0)
    np.testing.assert_allclose(out.item(), np.e / (1 + np.e), rtol=1e-6)


def test_a_sink_by_hand():
    """Scores ln 1, ln 3 and a sink of ln 4: weights 1/8, 3/8 and 4/8, of value 0; log-sum-exp ln 8."""
    out, lse = jnp.full((1, 1, 1, 1), 5.0), jnp.log(jnp.full((1, 1, 1), 4.0))
    out, lse = add_sinks(out, lse, jnp.log(jnp.array([4.0])))
    np.testing.assert_allclose([out.item(), lse.item()], [2.5, np.log(8)], rtol=1e-6)


def test_masked_rows_are_zero_and_gradients_finite():
    """Padding attends to nothing; neither it nor enormous scores may make a NaN."""
    q, k, v = inputs()
    visible = TRIANGLE.copy()
    visible[0, 2:4] = False

    def loss(q, k, v):
        out, _ = reference.dense_attention(AttentionSpec(300.0), q, k, v, jnp.asarray(visible))
        return (out**2).sum(), out

    run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), compiler_options=FAST)
    gradients, out = run(q, k, v)
    np.testing.assert_array_equal(out[0, 2:4], 0)
    assert (np.abs(out[1]).max(axis=(-1, -2)) > 0).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][0, 2:4] == 0).all()


def test_hidden_keys_have_no_influence():
    q, k, v = inputs()
    out = np.asarray(attention(q, k, v, TRIANGLE, scale=0.3))  # computed before its inputs change
    k[:, 4:], v[:, 4:] = 1e4, -1e4
    changed = attention(q, k, v, TRIANGLE, scale=0.3)
    np.testing.assert_array_equal(out[:, :4], changed[:, :4])
    assert np.abs(out[:, 4:] - changed[:, 4:]).max() > 1


def test_is_softmax_attention_with_repeated_key_heads():
    out = attention(*inputs(), TRIANGLE, scale=0.3)
    assert_close(out, oracles.attention(*inputs(), TRIANGLE, scale=0.3)[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_keeps_its_type_and_float32_statistics(dtype):
    half = attention(*(x.astype(dtype) for x in inputs()), TRIANGLE, scale=0.3)
    assert half.dtype == dtype
    assert_close(half, oracles.attention(*inputs(), TRIANGLE, scale=0.3)[0], dtype)
