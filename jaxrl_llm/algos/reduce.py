"""Sums over masked tokens with explicit, global denominators, and over the metrics of micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.algos.config import PolicyAggregation
from jaxrl_llm.structs import LossInputs, Metrics


def masked_sum(x: Float[Array, "..."], mask: Float[Array, "..."]) -> Float[Array, ""]:
    """Return the sum of x over the mask. Values outside the mask may be NaN or Inf: they are not read."""
    return jnp.sum(jnp.where(mask > 0, x * mask, 0.0))


def token_mean(x: Float[Array, "B T"], inputs: LossInputs) -> Float[Array, ""]:
    """Return this micro-batch's part of the mean over all trained tokens of the mini-batch."""
    return masked_sum(x, inputs.mask) / inputs.num_tokens


def aggregate(
    x: Float[Array, "B T"], inputs: LossInputs, how: PolicyAggregation, constant: float = 1.0
) -> Float[Array, ""]:
    """Return this micro-batch's part of the loss of the mini-batch.

    token         sum over all tokens / number of tokens              (DAPO, arXiv 2503.14476, eq. 8)
    sequence      mean over sequences of the mean over their tokens   (GRPO, arXiv 2402.03300, eq. 3)
    sequence_sum  mean over sequences of the sum over their tokens    (REINFORCE)
    constant      sequence_sum / constant, e.g. the longest response  (Dr. GRPO, arXiv 2503.20783)
    token_sum     sum over all tokens: the gradient grows with the mini-batch

    Args:
        x: per-token loss.
        inputs: mask, lengths and the global denominators.
        constant: tokens, for "constant" only.
    """
    if how == "token":
        return token_mean(x, inputs)
    if how == "token_sum":
        return masked_sum(x, inputs.mask)
    if how == "sequence":
        x = x / inputs.lengths
    total = masked_sum(x, inputs.mask) / inputs.num_sequences
    return total / constant if how == "constant" else total


def segment_sums(
    x: Float[Array, "B T"], segments: Int[Array, "B T"], mask: Float[Array, "B T"]
) -> Float[Array, "B S"]:
    """Return the sum of x over the masked tokens of each sequence; column s - 1 is segment s, S = T."""
    kept = jnp.where(mask > 0, x * mask, 0.0)
    sums = jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, x.shape[1] + 1))(kept, segments)
    return sums[:, 1:]


def sequence_sum(
    x: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return, at each token, the sum of x over the masked tokens of its sequence."""
    sums = segment_sums(x, segments, mask)
    return jnp.take_along_axis(sums, jnp.maximum(segments - 1, 0), axis=1)


def sequence_mean(x: Float[Array, "B T"], inputs: LossInputs) -> Float[Array, "B T"]:
    """Return, at each token, the mean of x over the trained tokens of its sequence."""
    return sequence_sum(x, inputs.mask, inputs.segments) / inputs.lengths


def is_max(name: str) -> bool:
    """Return whether metrics of this name are combined by max; all others are summed."""
    return name.endswith(("/max", "/max_abs"))


def combine(parts: Sequence[Metrics]) -> Metrics:
    """Combine the metrics of micro-batches into the metrics of their mini-batch."""
    return functools.reduce(_combine_two, parts)


@jax.jit
def _combine_two(one: Metrics, other: Metrics) -> Metrics:
    take = lambda name: functools.partial(jax.tree.map, jnp.maximum if is_max(name) else jnp.add)
    return {name: take(name)(one[name], other[name]) for name in one}


def average(parts: Sequence[Metrics]) -> Metrics:
    """Average the metrics of mini-batches into the metrics of the step."""
    return {name: value if is_max(name) else value / len(parts) for name, value in combine(parts).items()}
