"""Sums over the pairs of a row, losses of a pair as functions of two log-ratios, f-divergences of the reward.

Segments 1, 2 | 3, 4 | ... of a row are chosen and rejected of one prompt. The losses are `PAIR_LOSSES`:
c and r are log p - log ref of the chosen and the rejected response, after `transform_ratio`, and h = c - r.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.reduce import segment_sums
from jaxrl_llm.structs import LossInputs

PairLoss = Literal[
    *("sigmoid", "ipo", "hinge", "exo", "nca", "robust", "bco", "sppo", "apo_zero", "apo_down", "discopop")
]
FDivergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
MAX_EXPONENT = 80.0  # exp of it is a float32


Pair = tuple[Float[Array, "B H"], Float[Array, "B H"]]


class PairSettings(NamedTuple):
    """Numbers of the losses of a pair."""

    beta: float
    smoothing: float  # assumed share of pairs with swapped labels
    tau: float  # temperature of discopop's blend


def pair_sums(x: Float[Array, "B T"], inputs: LossInputs) -> Pair:
    """Return the sums of x over each chosen (segments 1, 3, ...) and rejected (2, 4, ...) sequence.

    H = T // 2; columns without a pair read 0. `pair_sums(ones, inputs)` are the lengths.
    """
    sums = segment_sums(x, inputs.segments, inputs.mask)
    half = x.shape[1] // 2
    return sums[:, 0 : 2 * half : 2], sums[:, 1 : 2 * half : 2]


def pair_means(x: Float[Array, "B T"], inputs: LossInputs) -> Pair:
    """Return the means of x over the trained tokens of chosen and rejected sequences; 0 without a pair."""
    sums, lengths = pair_sums(x, inputs), pair_sums(jnp.ones_like(inputs.mask), inputs)
    chosen, rejected = [total / jnp.maximum(n, 1.0) for total, n in zip(sums, lengths, strict=True)]
    return chosen, rejected


def over_pairs(x: Float[Array, "B H"], inputs: LossInputs) -> Float[Array, ""]:
    """Return this micro-batch's part of the mean of x over all pairs of the mini-batch."""
    chosen, rejected = pair_sums(jnp.ones_like(inputs.mask), inputs)
    there = (chosen > 0) & (rejected > 0)
    return jnp.sum(jnp.where(there, x, 0.0)) / (inputs.num_sequences / 2)


def sigmoid_loss(logits: Float[Array, "B H"], label_smoothing: float = 0.0) -> Float[Array, "B H"]:
    """Return -log sigmoid(logits), assuming that a share `label_smoothing` of the pairs has swapped labels
    (cDPO, https://ericmitchell.ai/cdpo.pdf)."""
    right, wrong = -jax.nn.log_sigmoid(logits), -jax.nn.log_sigmoid(-logits)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def _exo(c: Array, r: Array, s: PairSettings) -> Array:
    logits = s.beta * (c - r)
    right, wrong = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return jnp.exp(right) * (right - math.log1p(-s.smoothing)) + jnp.exp(wrong) * (
        wrong - math.log(s.smoothing)
    )


def _robust(c: Array, r: Array, s: PairSettings) -> Array:
    logits = s.beta * (c - r)
    right, wrong = -jax.nn.log_sigmoid(logits), -jax.nn.log_sigmoid(-logits)
    return ((1 - s.smoothing) * right - s.smoothing * wrong) / (1 - 2 * s.smoothing)


def _discopop(c: Array, r: Array, s: PairSettings) -> Array:
    logits = s.beta * (c - r)
    share = jax.nn.sigmoid(logits / s.tau)
    exponential = jnp.exp(jnp.minimum(-logits, MAX_EXPONENT))
    return (1 - share) * -jax.nn.log_sigmoid(logits) + share * exponential


_log_sigmoid, _sigmoid = jax.nn.log_sigmoid, jax.nn.sigmoid

PAIR_LOSSES: dict[str, Callable[[Array, Array, PairSettings], Array]] = {
    "sigmoid": lambda c, r, s: sigmoid_loss(s.beta * (c - r), s.smoothing),
    "ipo": lambda c, r, s: (c - r - 1 / (2 * s.beta)) ** 2,
    "hinge": lambda c, r, s: jax.nn.relu(1 - s.beta * (c - r)),
    "exo": _exo,
    "nca": lambda c, r, s: (
        -_log_sigmoid(s.beta * c) - 0.5 * _log_sigmoid(-s.beta * c) - 0.5 * _log_sigmoid(-s.beta * r)
    ),
    "robust": _robust,
    "bco": lambda c, r, s: -_log_sigmoid(s.beta * c) - _log_sigmoid(-s.beta * r),
    "sppo": lambda c, r, s: (c - 0.5 / s.beta) ** 2 + (r + 0.5 / s.beta) ** 2,
    "apo_zero": lambda c, r, s: _sigmoid(-s.beta * c) + _sigmoid(s.beta * r),
    "apo_down": lambda c, r, s: _sigmoid(s.beta * c) + _sigmoid(-s.beta * (c - r)),
    "discopop": _discopop,
}
"""Loss -> function of (c, r, settings)."""
OF_DIFFERENCE = ("sigmoid", "ipo", "hinge", "exo", "robust", "discopop")
"""Losses of h alone: an f-divergence needs such a loss, in which its normaliser cancels."""
SMOOTHED = ("sigmoid", "exo", "robust")
"""Losses that read the share of wrong labels."""


def transform_ratio(
    ratio: Float[Array, "B H"], divergence: FDivergence, alpha: float = 0.5
) -> Float[Array, "B H"]:
    """Return f'(p / ref) of a log-ratio, the reward of DPO under an f-divergence (arXiv 2309.16240, table 1).

    Args:
        alpha: order of the alpha divergence: 0 is forward_kl, and 1 the limit reverse_kl.
    """
    if divergence == "forward_kl":
        return 1 - jnp.exp(jnp.minimum(-ratio, MAX_EXPONENT))
    if divergence == "js":
        return math.log(2) + _log_sigmoid(ratio)
    if divergence == "alpha" and alpha != 1.0:
        return jnp.expm1(jnp.minimum((alpha - 1) * ratio, MAX_EXPONENT)) / (alpha - 1)
    return ratio


def sequence_alignment(inputs: LossInputs) -> Float[Array, "B H"]:
    """Return the weight of each pair, smaller for pairs further off policy (WPO, arXiv 2406.11827).

    w(y) = exp(mean over the tokens of log p - log sum over the vocabulary of p^2); the weight is
    min(w(chosen) w(rejected), 1), without gradient.
    """
    aligned = jax.lax.stop_gradient(inputs.logprobs) - jnp.log(jnp.maximum(inputs.sum_pi_squared, 1e-30))
    chosen, rejected = pair_means(aligned, inputs)
    return jnp.exp(jnp.minimum(chosen + rejected, 0.0))


def tail_weights(inputs: LossInputs, coef: float) -> Float[Array, "B T"]:
    """Return 1 at the first n trained tokens of each response, `coef` after them (LD-DPO, arXiv 2409.06411).

    n is the length of the pair's shorter response; segments 2 k + 1 and 2 k + 2 of a row are a pair.
    """
    lengths = segment_sums(jnp.ones_like(inputs.mask), inputs.segments, inputs.mask)  # [B, T]
    here = jnp.maximum(inputs.segments - 1, 0)
    before = jnp.take_along_axis(jnp.cumsum(lengths, axis=1) - lengths, here, axis=1)
    place = jnp.cumsum(inputs.mask, axis=1) - before  # 1, 2, ... over the response's trained tokens
    partner = jnp.minimum(jnp.bitwise_xor(here, 1), lengths.shape[1] - 1)
    own, other = (jnp.take_along_axis(lengths, i, axis=1) for i in (here, partner))
    return jnp.where(place <= jnp.minimum(own, other), 1.0, coef)
