"""Chunked log-probs against the dense definition; the vocabulary is never laid out over a whole row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels.linear_logprob.api import linear_logprob

B, T, D, V = 2, 12, 8, 50


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (B, T, D), dtype)
    head = jax.random.normal(keys[1], (V, D), dtype)
    return hidden, head, jax.random.randint(keys[2], (B, T), 0, V)


def dense(hidden, head, targets, temperature=1.0, softcap=None):
    logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32).T
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logprobs = jax.nn.log_softmax(logits / temperature)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0], entropy


@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.3, 2.0)])
def test_values_and_gradients_equal_the_dense_ones(chunk, temperature, softcap):
    hidden, head, targets = inputs()
    weights = jnp.linspace(-1, 1, B * T).reshape(B, T)

    def total(fn, **settings):
        def run(hidden, head):
            logprob, entropy = fn(hidden, head, targets, temperature=temperature, softcap=softcap, **settings)
            return jnp.sum(weights * logprob) + 0.3 * jnp.sum(weights**2 * entropy), (logprob, entropy)

        return jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(hidden, head)

    got, wanted = total(linear_logprob, chunk=chunk), total(dense)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [0, 1, 7, 24])
@pytest.mark.parametrize("chunk", [1, 3, 12])
def test_a_mask_leaves_the_wanted_tokens_as_they_are_and_the_others_0(chunk, trained):
    hidden, head, targets = inputs()
    mask = jax.random.permutation(jax.random.key(1), jnp.arange(B * T) < trained).reshape(B, T)

    def total(fn):
        def run(hidden, head):
            logprob, entropy = fn(hidden, head)
            return jnp.sum(logprob) + 0.3 * jnp.sum(entropy**2), (logprob, entropy)

        return jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(hidden, head)

    got = total(lambda h, w: linear_logprob(h, w, targets, mask.astype(jnp.float32), chunk=chunk))
    wanted = total(lambda h, w: [jnp.where(mask, x, 0.0) for x in dense(h, w, targets)])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_the_mask_leaves_out_is_not_computed():
    """NaNs outside reach nothing when they are in chunks of their own."""
    hidden, head, targets = inputs()
    mask = jnp.zeros((B, T)).at[:, 3:6].set(1)
    loss = lambda h, w: linear_logprob(h, w, targets, mask, chunk=3)[0].sum()
    grads = jax.grad(loss, argnums=(0, 1))(jnp.where(mask[..., None] > 0, hidden, jnp.nan), head)
    assert all(jnp.isfinite(grad).all() for grad in grads)
    assert (grads[0][:, 6:] == 0).all() and (grads[0][:, 3:6] != 0).any()


def test_entropy_of_a_nearly_certain_prediction_does_not_cancel():
    """Logits 60 and 40 below 20: H = 20 e^-20 + e^-20 + ..., far under the rounding of 60."""
    hidden, head = jnp.ones((1, 1, 1)), jnp.array([[60.0], [40.0]])
    _, entropy = linear_logprob(hidden, head, jnp.array([[0]]))
    np.testing.assert_allclose(entropy.item(), 21 * np.exp(-20), rtol=0.1)


def test_by_hand():
    """Logits (0, ln 3): probabilities 1/4 and 3/4."""
    hidden, head = jnp.ones((1, 2, 1)), jnp.array([[0.0], [jnp.log(3.0)]])
    logprob, entropy = linear_logprob(hidden, head, jnp.array([[0, 1]]))
    np.testing.assert_allclose(jnp.exp(logprob), [[0.25, 0.75]], rtol=1e-6)
    np.testing.assert_allclose(entropy, 0.25 * np.log(4) + 0.75 * np.log(4 / 3), rtol=1e-6)


def test_bfloat16_inputs_give_float32_log_probs():
    hidden, head, targets = inputs(jnp.bfloat16)
    logprob, entropy = linear_logprob(hidden, head, targets, chunk=4)
    assert (logprob.dtype, entropy.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(logprob, dense(hidden, head, targets)[0], atol=5e-2)


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
