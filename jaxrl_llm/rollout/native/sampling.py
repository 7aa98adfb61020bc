"""How a token is drawn: pure functions, float32.

A token costs one uniform number, not V: the inverse of the cumulative distribution is looked up in two
levels, first the block of the vocabulary, then the token in it. (Gumbel noise for 32 x 2048 logits takes
a third as long as the whole forward of a small model on a CPU.) top-k and top-p are thresholds found by
bisection over the bits of a float32, exact in 31 passes and without sorting the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxrl_kernels import batch_invariant

BLOCK = 64  # vocabulary entries of the lower level


class Draw(NamedTuple):
    """The numbers of a SamplingConfig, as arrays: another temperature is not another program."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]


def sample(
    logits: Float[Array, "S V"], uniform: Float[Array, "S"], draw: Draw, filtered: bool
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """One token a row.

    Args:
        logits: float32.
        uniform: in [0, 1), one a row.
        filtered: whether top-k, top-p or min-p may drop anything (False saves the passes).

    Returns: (token, its log-prob in nats under the full softmax at `temperature`, before any filter). At
    temperature 0 the token is the likeliest and the log-prob that of temperature 1.
    """
    greedy = draw.temperature == 0
    logits = logits / jnp.where(greedy, 1.0, draw.temperature)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    drawn = inverse_cdf(keep(weights, draw) if filtered else weights, uniform)
    token = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - top[:, 0] - jnp.log(jnp.sum(weights, axis=-1))


def sample_strictly(
    logits: Float[Array, "S V"], uniform: Float[Array, "S"], draw: Draw, filtered: bool
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """`sample` with log-probs whose every bit is that of training (`batch_invariant.linear_logprob`)."""
    token_of = lambda draw, logits, uniform: sample(logits[0], uniform[0], draw, filtered)[0][None]
    token = batch_invariant.map_tokens(token_of, draw, logits[:, None], uniform[:, None])
    temperature = jnp.where(draw.temperature == 0, 1.0, draw.temperature)
    logprob, _ = batch_invariant.map_tokens(batch_invariant.logprob, temperature, logits[:, None], token)
    return token[:, 0], logprob[:, 0]


def keep(weights: Float[Array, "S V"], draw: Draw) -> Float[Array, "S V"]:
    """Unnormalised probabilities (largest = 1) with those that the filters drop set to 0.

    In the order of Hugging Face: top-k, then top-p of what is left, then min-p. Tokens exactly as likely
    as the last one kept are kept too.
    """
    everything = weights.shape[-1]
    k = jnp.where(draw.top_k > 0, jnp.minimum(draw.top_k, everything), everything)
    weights = jnp.where(weights >= _threshold(weights, jnp.ones_like(weights), k), weights, 0)
    mass = draw.top_p * jnp.sum(weights, axis=-1, keepdims=True)
    nucleus = jnp.where(draw.top_p < 1, _threshold(weights, weights, mass), 0)
    return jnp.where(weights >= jnp.maximum(nucleus, draw.min_p), weights, 0)


def inverse_cdf(weights: Float[Array, "S V"], uniform: Float[Array, "S"]) -> Int[Array, "S"]:
    """First index whose cumulative weight exceeds uniform * total. Never one of weight 0.

    The uniform has 23 bits: a token rarer than 1e-7 is drawn with about, not exactly, its probability.
    """
    rows, size = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    ends = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    target = uniform * ends[:, -1]
    block = _first_above(ends, target)
    starts = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
    target = target - jnp.take_along_axis(starts, block[:, None], axis=1)[:, 0]
    inside = jnp.cumsum(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=-1)
    return block * BLOCK + _first_above(inside, target)


def uniforms(keys: Key[Array, "S"], index: Int[Array, "S"]) -> Float[Array, "S"]:
    """The number that draws token `index` of each sample: a function of the sample's key and it alone."""
    return jax.vmap(lambda key, i: jax.random.uniform(jax.random.fold_in(key, i)))(keys, index)


def _first_above(ends: Float[Array, "S N"], target: Float[Array, "S"]) -> Int[Array, "S"]:
    """First index with end > target; rounding cannot push it past the last entry that has weight."""
    first = jnp.sum(ends <= target[:, None], axis=-1)
    return jnp.minimum(first, jnp.sum(ends < ends[:, -1:], axis=-1))


def _threshold(values: Float[Array, "S V"], amounts: Float[Array, "S V"], target) -> Float[Array, "S 1"]:
    """Largest t with sum(amounts where values >= t) >= target. Floats >= 0 sort as their bits do."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    target = jnp.broadcast_to(target, (values.shape[0], 1))

    def halve(i, found):
        trial = found | (1 << (30 - i))
        enough = jnp.sum(jnp.where(bits >= trial, amounts, 0), axis=-1, keepdims=True) >= target
        return jnp.where(enough, trial, found)

    found = jax.lax.fori_loop(0, 31, halve, jnp.zeros((values.shape[0], 1), jnp.int32))
    return jax.lax.bitcast_convert_type(found, jnp.float32)
