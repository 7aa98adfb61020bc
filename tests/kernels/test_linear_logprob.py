"""Chunked log-probs against the NumPy oracle; [B, T, V] is never in memory."""

import functools

import jax
import jax.numpy as jnp
import kernel_oracles as oracles
import numpy as np
import pytest
from kernel_oracles import assert_close

from jaxrl_kernels.linear_logprob.api import linear_logprob
from jaxrl_kernels.linear_logprob.square import linear_square

FAST = {"xla_backend_optimization_level": 0}  # of compilation
B, T, D, V = 2, 12, 8, 50


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    hidden, head = (rng.normal(size=(*shape, D)).astype(dtype) for shape in ((B, T), (V,)))
    return hidden, head, rng.integers(0, V, (B, T)).astype(np.int32)


@functools.cache
def compiled(chunk, temperature=1.0, softcap=None, masked=False):
    """(hidden, head, targets, mask) -> (log-prob, entropy), (d_hidden, d_head) of a weighted sum of both."""

    def loss(hidden, head, targets, mask, *weights):
        d_logprob, d_entropy = weights
        settings = {"temperature": temperature, "softcap": softcap, "chunk": chunk}
        found = linear_logprob(hidden, head, targets, mask if masked else None, **settings)
        return jnp.sum(d_logprob * found[0] + d_entropy * found[1]), found

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True), compiler_options=FAST)


def check(run, mask, **settings):
    """Values and gradients against the oracle; those outside the mask are 0."""
    weights = np.linspace(-1, 1, B * T).reshape(B, T).astype(np.float32), np.float32(0.3)
    gradients, found = run(*inputs(), mask, *weights)
    wanted = oracles.logprob(*inputs(), **settings, d_logprob=weights[0] * mask, d_entropy=weights[1] * mask)
    wanted = *(x * mask for x in wanted[:2]), *wanted[2:]
    for got, expected in zip((*found, *gradients), wanted, strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize(
    ("chunk", "temperature", "softcap"), [(1, 1.0, None), (5, 1.3, 2.0), (12, 0.7, None), (100, 1.3, 2.0)]
)
def test_values_and_gradients_equal_the_oracle(chunk, temperature, softcap):
    run = compiled(chunk, temperature, softcap)
    check(run, np.ones((B, T), np.float32), temperature=temperature, softcap=softcap)


@pytest.mark.parametrize("chunk", [1, 3, 12])
def test_a_mask_keeps_its_tokens_and_zeroes_the_others(chunk):
    rng = np.random.default_rng(1)
    for trained in (0, 1, 7, 24):
        mask = rng.permutation(np.arange(B * T) < trained).reshape(B, T).astype(np.float32)
        check(compiled(chunk, masked=True), mask)


def test_masked_tokens_are_not_computed():
    """NaNs outside the mask reach nothing when they are in chunks of their own."""
    hidden, head, targets = inputs()
    mask = np.zeros((B, T), np.float32)
    mask[:, 3:6] = 1
    hidden = np.where(mask[..., None] > 0, hidden, np.nan)
    gradients, _ = compiled(3, masked=True)(hidden, head, targets, mask, mask, np.float32(0))
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][:, 6:] == 0).all() and (gradients[0][:, 3:6] != 0).any()


def test_entropy_of_a_nearly_certain_prediction_does_not_cancel():
    """Logits 60 and 40 below 20: H = 20 e^-20 + e^-20 + ..., far under the rounding of 60."""
    hidden, head = np.ones((1, 1, 1), np.float32), np.array([[60.0], [40.0]], np.float32)
    _, entropy = linear_logprob(hidden, head, np.array([[0]]))
    np.testing.assert_allclose(entropy.item(), 21 * np.exp(-20), rtol=0.1)


def test_by_hand():
    """Logits (0, ln 3): probabilities 1/4 and 3/4, of which the squares sum to 10/16."""
    hidden, head = np.ones((1, 2, 1), np.float32), np.array([[0.0], [np.log(3.0)]], np.float32)
    logprob, entropy = linear_logprob(hidden, head, np.array([[0, 1]]))
    np.testing.assert_allclose(np.exp(logprob), [[0.25, 0.75]], rtol=1e-6)
    np.testing.assert_allclose(entropy, 0.25 * np.log(4) + 0.75 * np.log(4 / 3), rtol=1e-6)
    np.testing.assert_allclose(linear_square(hidden, head), [[0.625, 0.625]], rtol=1e-6)


def test_bfloat16_inputs_give_float32_log_probs():
    hidden, head, targets = inputs(jnp.bfloat16)
    logprob, entropy = linear_logprob(hidden, head, targets, chunk=4)
    assert (logprob.dtype, entropy.dtype) == (jnp.float32, jnp.float32)
    assert_close(logprob, oracles.logprob(hidden, head, targets)[0], jnp.bfloat16)


@pytest.mark.parametrize("chunk", [3, 100])
def test_the_sum_of_squares_is_that_of_the_whole_softmax(chunk):
    hidden, head, _ = inputs()
    logits = 2.0 * np.tanh(hidden.astype(np.float64) @ head.T / 2.0) / 0.7
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    got = linear_square(hidden, head, temperature=0.7, softcap=2.0, chunk=chunk)
    assert_close(got, (p**2).sum(axis=-1))


def test_memory_is_one_chunk_of_logits_forward_and_backward():
    """No array of the compiled step, nor all its temporaries, is as large as [B, T, V]."""
    rows, length, vocab, chunk = 2, 512, 4096, 32
    shapes = (
        jax.ShapeDtypeStruct((rows, length, 16), jnp.float32),
        jax.ShapeDtypeStruct((vocab, 16), jnp.float32),
    )
    targets = jnp.zeros((rows, length), jnp.int32)
    step = jax.grad(lambda h, w: linear_logprob(h, w, targets, chunk=chunk)[0].sum(), argnums=(0, 1))
    memory = jax.jit(step).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * length * vocab * 4 / 3
