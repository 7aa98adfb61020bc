"""Sums over masked tokens with explicit, global denominators. Nothing here ever averages by shape."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.structs import Signals

Aggregation = Literal["token", "sequence", "sequence_sum", "constant"]


def masked_sum(x: Float[Array, "..."], mask: Float[Array, "..."]) -> Float[Array, ""]:
    """Sum of x where mask is not 0. What is masked may be NaN or Inf: it is selected away, not multiplied."""
    return jnp.sum(jnp.where(mask > 0, x * mask, 0.0))


def token_mean(x: Float[Array, "B T"], signals: Signals) -> Float[Array, ""]:
    """This micro-batch's part of the mean over all trained tokens of the mini-batch."""
    return masked_sum(x, signals.mask) / signals.num_tokens


def aggregate(
    x: Float[Array, "B T"], signals: Signals, how: Aggregation, constant: float = 1.0
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
