"""Token sampling: temperature, top-k, top-p, min-p and log-probs; pure functions, float32.

A token takes one uniform number, not V Gumbel ones: the inverse CDF is looked up in two levels, first the
block of the vocabulary, then the token in it. (Gumbel noise for 32 x 2048 logits takes a third as long as
the whole forward of a small model on a CPU.) The thresholds of top-k and top-p are found by bisection over
the bits of a float32, exact in 31 passes and without sorting the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxrl_kernels import batch_invariant
from jaxrl_llm.rollout.config import SamplingConfig

BLOCK = 64  # vocabulary entries of the lower level


class SamplingParams(NamedTuple):
    """The numbers of a SamplingConfig as arrays, so that another temperature is not another program."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]


def make_params(sampling: SamplingConfig) -> SamplingParams:
    """Return the arrays of a SamplingConfig."""
    return SamplingParams(
        np.float32(sampling.temperature),
        np.int32(sampling.top_k),
        np.float32(sampling.top_p),
        np.float32(sampling.min_p),
    )


class Filters(NamedTuple):
    """Filters as far as they are part of a program."""

    acts: bool
    """Top-k, top-p or min-p may drop a token (False saves the passes)."""
    num_kept: int
    """Most tokens of a kept set; 0 = they are not returned, and log-probs are of the full softmax."""


def filters_of(sampling: SamplingConfig) -> Filters:
    """Return the filters of a SamplingConfig."""
    acts = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return Filters(acts, sampling.num_kept)


class Sampled(NamedTuple):
    """A token of each row."""

    token: Int[Array, "S"]
    logprob: Float[Array, "S"]  # nats
    kept: Int[Array, "S K"] | None = None  # tokens that the filters keep, then -1; None = not asked for


def sample_tokens(
    logits: Float[Array, "S V"],
    uniform: Float[Array, "S"],
    params: SamplingParams,
    filters: Filters,
    *,
    strict: bool = False,
) -> Sampled:
    """Sample one token per row.

    Args:
        logits: float32.
        uniform: in [0, 1), one per row.
        strict: log-probs are bit-equal to training (`batch_invariant`).

    Returns: tokens with their log-probs in nats under the softmax at `temperature`, before any filter; with
        kept sets, over the kept set alone. At temperature 0 the token is the argmax, with its log-prob at
        temperature 1.
    """
    if strict:
        return _sample_strict(logits, uniform, params, filters)
    greedy = params.temperature == 0
    logits = logits / jnp.where(greedy, 1.0, params.temperature)
    if filters.num_kept:
        return _sample_from_sets(logits, uniform, params, filters.num_kept)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    sampled = inverse_cdf(apply_filters(weights, params) if filters.acts else weights, uniform)
    token = jnp.where(greedy, _first_equal(logits, top), sampled).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return Sampled(token, chosen - top[:, 0] - jnp.log(jnp.sum(weights, axis=-1)))


def _sample_from_sets(
    logits: Float[Array, "S V"], uniform: Float[Array, "S"], params: SamplingParams, num_kept: int
) -> Sampled:
    """Sample from the tokens that the filters keep. Of tokens as likely as the last one kept, which would be
    more than `num_kept`, the first are kept."""
    logits, ids = jax.lax.top_k(logits, min(num_kept, logits.shape[-1]))
    ids = ids.astype(jnp.int32)
    weights = apply_filters(jnp.exp(logits - logits[:, :1]), params)
    index = inverse_cdf(weights, uniform)[:, None]
    pick = lambda x: jnp.take_along_axis(x, index, axis=1)[:, 0]
    logprob = pick(logits) - logits[:, 0] - jnp.log(jnp.sum(weights, axis=-1))
    kept = jnp.where(weights > 0, ids, -1)
    return Sampled(
        pick(ids), logprob, jnp.pad(kept, ((0, 0), (0, num_kept - ids.shape[1])), constant_values=-1)
    )


def _sample_strict(
    logits: Float[Array, "S V"], uniform: Float[Array, "S"], params: SamplingParams, filters: Filters
) -> Sampled:
    def draw(params, logits, uniform):
        drawn = sample_tokens(logits[0], uniform[0], params, filters)
        return drawn.token[None], None if drawn.kept is None else drawn.kept[None]

    rows = logits[:, None]
    token, kept = batch_invariant.map_tokens(draw, params, rows, uniform[:, None])
    temperature = jnp.where(params.temperature == 0, 1.0, params.temperature)
    if kept is None:
        logprob, _ = batch_invariant.map_tokens(batch_invariant.logprob, temperature, rows, token)
        return Sampled(token[:, 0], logprob[:, 0])
    logprob = batch_invariant.map_tokens(batch_invariant.kept_logprob, temperature, rows, token, kept)
    return Sampled(token[:, 0], logprob[:, 0], kept[:, 0])


def apply_filters(weights: Float[Array, "S V"], params: SamplingParams) -> Float[Array, "S V"]:
    """Set unnormalised probabilities (largest = 1) that the filters drop to 0.

    In the order of Hugging Face: top-k, then top-p of the rest, then min-p. Tokens exactly as likely as the
    last one kept are kept too.
    """
    vocab_size = weights.shape[-1]
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocab_size), vocab_size)
    weights = jnp.where(weights >= _threshold(weights, jnp.ones_like(weights), k), weights, 0)
    mass = params.top_p * jnp.sum(weights, axis=-1, keepdims=True)
    nucleus = jnp.where(params.top_p < 1, _threshold(weights, weights, mass), 0)
    return jnp.where(weights >= jnp.maximum(nucleus, params.min_p), weights, 0)


def inverse_cdf(weights: Float[Array, "S V"], uniform: Float[Array, "S"]) -> Int[Array, "S"]:
    """Return the first index whose cumulative weight exceeds uniform * total; never one of weight 0.

    Rounded sums cannot say whether a weight is 0: cumulative ones may decrease, and a program may compute
    uniform * total - start with or without a rounding between. So only nonzero blocks and weights are chosen.
    The uniform has 23 bits: a token rarer than 1e-7 is sampled with about, not exactly, its probability.
    """
    rows, size = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform * ends[:, -1]
    block = _first_above(sums, ends, target)
    starts = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
    target = target - jnp.take_along_axis(starts, block[:, None], axis=1)[:, 0]
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _first_above(inside, jnp.cumsum(inside, axis=-1), target)


def uniforms(keys: Key[Array, "S"], index: Int[Array, "S"]) -> Float[Array, "S"]:
    """Return the uniform number of token `index` of each sample (the tree of keys: `rollout/keys.py`)."""
    return jax.vmap(lambda key, i: jax.random.uniform(jax.random.fold_in(key, i)))(keys, index)


def _first_above(
    weights: Float[Array, "S N"], ends: Float[Array, "S N"], target: Float[Array, "S"]
) -> Int[Array, "S"]:
    """Return the first index of nonzero weight with end > target, else the last one of nonzero weight."""
    index, nonzero = jnp.arange(weights.shape[-1]), weights > 0
    first = jnp.min(jnp.where(nonzero & (ends > target[:, None]), index, len(index)), axis=-1)
    return jnp.minimum(first, jnp.max(jnp.where(nonzero, index, 0), axis=-1))


def _first_equal(values: Float[Array, "S V"], top: Float[Array, "S 1"]) -> Int[Array, "S"]:
    """Return the first index of each row's largest value, on a CPU 7 times as fast as `jnp.argmax`."""
    last = values.shape[-1] - 1
    return jnp.min(jnp.where(values == top, jnp.arange(last + 1), last), axis=-1)


def _threshold(values: Float[Array, "S V"], amounts: Float[Array, "S V"], target) -> Float[Array, "S 1"]:
    """Return the largest t with sum(amounts where values >= t) >= target. Floats >= 0 sort as their bits."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    target = jnp.broadcast_to(target, (values.shape[0], 1))

    def set_bit(i, threshold):
        trial = threshold | (1 << (30 - i))
        enough = jnp.sum(jnp.where(bits >= trial, amounts, 0), axis=-1, keepdims=True) >= target
        return jnp.where(enough, trial, threshold)

    threshold = jax.lax.fori_loop(0, 31, set_bit, jnp.zeros((values.shape[0], 1), jnp.int32))
    return jax.lax.bitcast_convert_type(threshold, jnp.float32)
