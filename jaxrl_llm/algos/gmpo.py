"""Geometric-mean policy optimization: GMPO (arXiv 2507.20673, eq. 4).

loss = -A exp(mean over the response's tokens of l_t), l_t = policy - old, cut at -low and high on the side to
which the advantage pushes it; mean over responses. One advantage a response: that of its tokens' mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.policy_gradient import PolicyConfig, advantages, finish, returns, select
from jaxrl_llm.algos.policy_losses import log_ratio
from jaxrl_llm.algos.reduce import Aggregation, sequence_mean
from jaxrl_llm.structs import LossInputs, Metrics

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(PolicyConfig):
    """GMPO."""

    clip_low: float = 0.4
    """A token's log-ratio may fall to -clip_low, nats."""
    clip_high: float = 0.4
    """A token's log-ratio may rise to clip_high, nats."""
    aggregation: Aggregation = "sequence"


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """-A times the geometric mean of the clipped ratios, the same at each token of a response."""
    change = log_ratio(signals.policy, signals.old)
    bounded = jnp.clip(change, -config.clip_low, config.clip_high)
    positive = signals.advantages > 0
    kept = jnp.where(positive, jnp.minimum(change, bounded), jnp.maximum(change, bounded))
    surrogate = -sequence_mean(signals.advantages, signals) * jnp.exp(sequence_mean(kept, signals))
    return finish(surrogate, {"clip_fraction": kept != change}, signals, config)
