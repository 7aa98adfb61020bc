"""What losses over pairs share: segments 1, 2 | 3, 4 | ... of a row are chosen, rejected of one prompt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.reduce import pair_sums, segment_sums
from jaxrl_llm.structs import LossInputs, Metrics


def pair_lengths(signals: LossInputs) -> tuple[Float[Array, "B H"], Float[Array, "B H"]]:
    """Trained tokens of each chosen and each rejected sequence; 0 where a column holds no pair."""
    return pair_sums(jnp.ones_like(signals.mask), signals)


def pair_means(
    x: Float[Array, "B T"], signals: LossInputs
) -> tuple[Float[Array, "B H"], Float[Array, "B H"]]:
    """Means of x over the trained tokens of each chosen and each rejected sequence; 0 without a pair."""
    sums, lengths = pair_sums(x, signals), pair_lengths(signals)
    chosen, rejected = [total / jnp.maximum(n, 1.0) for total, n in zip(sums, lengths, strict=True)]
    return chosen, rejected


def last_values(signals: LossInputs) -> tuple[Float[Array, "B H"], Float[Array, "B H"]]:
    """The value at the last position of each chosen and each rejected sequence: it has read every token."""
    following = jnp.pad(signals.segments[:, 1:], ((0, 0), (0, 1)))
    is_last = ((signals.segments > 0) & (signals.segments != following)).astype(signals.mask.dtype)
    sums = segment_sums(signals.values, signals.segments, is_last)
    half = signals.segments.shape[1] // 2
    return sums[:, 0 : 2 * half : 2], sums[:, 1 : 2 * half : 2]


def over_pairs(x: Float[Array, "B H"], signals: LossInputs) -> Float[Array, ""]:
    """This micro-batch's part of the mean of x over all pairs of the mini-batch."""
    chosen, rejected = pair_lengths(signals)
    there = (chosen > 0) & (rejected > 0)
    return jnp.sum(jnp.where(there, x, 0.0)) / (signals.num_sequences / 2)


def sigmoid_loss(logits: Float[Array, "B H"], label_smoothing: float = 0.0) -> Float[Array, "B H"]:
    """-log sigmoid(logits), where a share `label_smoothing` of the pairs is taken to be labelled the wrong
    way round (cDPO, https://ericmitchell.ai/cdpo.pdf)."""
    right, wrong = -jax.nn.log_sigmoid(logits), -jax.nn.log_sigmoid(-logits)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def chosen_nll(signals: LossInputs) -> Float[Array, ""]:
    """This micro-batch's part of the mean over chosen sequences of their mean -log p(token)."""
    return over_pairs(-pair_means(signals.policy, signals)[0], signals)


def pair_metrics(chosen: Float[Array, "B H"], rejected: Float[Array, "B H"], signals: LossInputs) -> Metrics:
    """Rewards of both sides, their margin, and how often the chosen one has more."""
    return {
        "chosen_reward": over_pairs(chosen, signals),
        "rejected_reward": over_pairs(rejected, signals),
        "margin": over_pairs(chosen - rejected, signals),
        "accuracy": over_pairs((chosen > rejected).astype(chosen.dtype), signals),
    }
