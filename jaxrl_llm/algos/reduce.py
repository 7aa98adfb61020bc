"""Sums over masked tokens with explicit, global denominators. Nothing here ever averages by shape."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.structs import LossInputs

Aggregation = Literal["token", "sequence", "sequence_sum", "constant"]


def masked_sum(x: Float[Array, "..."], mask: Float[Array, "..."]) -> Float[Array, ""]:
    """Sum of x where mask is not 0. What is masked may be NaN or Inf: it is selected away, not multiplied."""
    return jnp.sum(jnp.where(mask > 0, x * mask, 0.0))


def token_mean(x: Float[Array, "B T"], signals: LossInputs) -> Float[Array, ""]:
    """This micro-batch's part of the mean over all trained tokens of the mini-batch."""
    return masked_sum(x, signals.mask) / signals.num_tokens


def aggregate(
    x: Float[Array, "B T"], signals: LossInputs, how: Aggregation, constant: float = 1.0
) -> Float[Array, ""]:
    """This micro-batch's part of the loss of the mini-batch.

    token         sum over all tokens / number of tokens              (DAPO, arXiv 2503.14476, eq. 8)
    sequence      mean over sequences of the mean over their tokens   (GRPO, arXiv 2402.03300, eq. 3)
    sequence_sum  mean over sequences of the sum over their tokens    (REINFORCE)
    constant      sequence_sum / constant, e.g. the longest response  (Dr. GRPO, arXiv 2503.20783)

    Args:
        x: per-token loss.
        signals: mask, lengths and the global denominators.
        constant: tokens, for "constant" only.
    """
    if how == "token":
        return token_mean(x, signals)
    if how == "sequence":
        x = x / signals.lengths
    total = masked_sum(x, signals.mask) / signals.num_sequences
    return total / constant if how == "constant" else total


def segment_sums(
    x: Float[Array, "B T"], segments: Int[Array, "B T"], mask: Float[Array, "B T"]
) -> Float[Array, "B S"]:
    """Sum of x over the masked tokens of each sequence of a row; column s - 1 is segment s, S = T."""
    kept = jnp.where(mask > 0, x * mask, 0.0)
    sums = jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, x.shape[1] + 1))(kept, segments)
    return sums[:, 1:]


def sequence_mean(x: Float[Array, "B T"], signals: LossInputs) -> Float[Array, "B T"]:
    """At each token, the mean of x over the trained tokens of its sequence."""
    sums = segment_sums(x, signals.segments, signals.mask)
    return jnp.take_along_axis(sums, jnp.maximum(signals.segments - 1, 0), axis=1) / signals.lengths


def pair_sums(x: Float[Array, "B T"], signals: LossInputs) -> tuple[Float[Array, "B H"], Float[Array, "B H"]]:
    """Sums of x over the chosen (segments 1, 3, ...) and the rejected (2, 4, ...) sequences; H = T // 2.

    Columns without a pair read 0; `pair_sums(ones, signals)` are the lengths.
    """
    sums = segment_sums(x, signals.segments, signals.mask)
    half = x.shape[1] // 2
    return sums[:, 0 : 2 * half : 2], sums[:, 1 : 2 * half : 2]
