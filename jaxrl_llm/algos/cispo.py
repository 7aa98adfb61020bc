"""Clipped importance weights: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4).

loss = -sg[clip(r_t, 1 - low, 1 + high)] A log pi: the weight is clipped, and every token keeps a gradient.
As in the paper there is no lower bound by default; the upper one is ScaleRL's (arXiv 2510.13786).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.policy_gradient import PolicyConfig, advantages, finish, returns, select
from jaxrl_llm.algos.policy_losses import log_ratio
from jaxrl_llm.structs import LossInputs, Metrics

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(PolicyConfig):
    """CISPO."""

    clip_low: float = 1.0
    """The weight is at least 1 - clip_low."""
    clip_high: float = 4.0
    """The weight is at most 1 + clip_high."""


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """-sg[clip(r)] A log pi."""
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(signals.policy, signals.old)))
    weight = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    surrogate = -weight * signals.advantages * signals.policy
    return finish(surrogate, {"clip_fraction": weight != ratio}, signals, config)
