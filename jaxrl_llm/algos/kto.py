"""Kahneman-Tversky optimization (arXiv 2402.01306): single responses, each desirable or not.

    r = log p(y | x) - log ref(y | x)
    z = max(0, mean over mismatched (x, y') of log p(y' | x) - log ref(y' | x))                      (eq. 7)
    desirable     desirable_weight   * (1 - sigmoid(beta (r - z)))
    undesirable   undesirable_weight * (1 - sigmoid(beta (z - r)))                                   (eq. 8)

Segments 1, 3, ... of a row are the responses and 2, 4, ... the mismatched ones, a prompt with the response
to another, which serve z alone. z carries no gradient and is measured over the whole mini-batch by the
policy before the update. Pairs are two responses each; for them OpenRLHF's VanillaKTO takes as z the mean
log ratio of the mini-batch's responses of the other label (`baseline` "other_label").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.preference import over_pairs, pair_means
from jaxrl_llm.algos.reduce import pair_sums
from jaxrl_llm.structs import LossInputs, Metrics

INPUT = "labels"
UNIT = 2


@dataclass(frozen=True)
class Config(AlgoConfig):
    """KTO."""

    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    desirable_weight: float = 1.0
    """Weight of desirable responses; the paper keeps weight times count of the two within 1 to 4/3."""
    undesirable_weight: float = 1.0
    """Weight of undesirable responses."""
    baseline: Literal["mismatched", "other_label"] = "mismatched"
    """Whose log ratios z is the mean of: of mismatched sequences, or of the responses of the other label."""

    @property
    def needs_old(self) -> bool:
        return True

    @property
    def needs_reference(self) -> bool:
        return True


def baseline(signals: LossInputs, config: Config) -> Float[Array, "*shape"]:
    """This micro-batch's part of z before max; of "other_label" sums and counts of either label, [4]."""
    ratio, mismatched = pair_sums(signals.old - signals.reference, signals)
    if config.baseline == "mismatched":
        return over_pairs(mismatched, signals)
    desirable = pair_means(signals.labels, signals)[0] > 0.5
    of_label = lambda x: (jnp.where(desirable, x, 0.0), jnp.where(desirable, 0.0, x))
    return jnp.stack([over_pairs(x, signals) for x in (*of_label(ratio), *of_label(jnp.ones_like(ratio)))])


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """Mean over responses of their weighted distance from full value; `signals.baseline` is z before max."""
    ratio = pair_sums(signals.policy - signals.reference, signals)[0]
    desirable = pair_means(signals.labels, signals)[0] > 0.5
    z = signals.baseline
    if config.baseline == "other_label":
        of_desirable, of_undesirable = z[:2] / jnp.maximum(z[2:], 1e-12)
        z = jnp.where(desirable, of_undesirable, of_desirable)
    z = jax.lax.stop_gradient(jnp.maximum(z, 0.0))
    gain = jnp.where(desirable, ratio - z, z - ratio)
    weight = jnp.where(desirable, config.desirable_weight, config.undesirable_weight)
    each = weight * jax.nn.sigmoid(-config.beta * gain)
    signed = jnp.where(desirable, 2.0, -2.0) * config.beta * ratio
    metrics = {
        "reward_mean": over_pairs(config.beta * ratio, signals),
        "margin": over_pairs(signed, signals),  # of desirable over undesirable, as much of each
        "accuracy": over_pairs((gain > 0).astype(gain.dtype), signals),
        "desirable_fraction": over_pairs(desirable.astype(gain.dtype), signals),
        "mismatched_kl": over_pairs(pair_sums(signals.old - signals.reference, signals)[1], signals),
    }
    return over_pairs(each, signals), metrics
