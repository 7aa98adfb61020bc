"""Direct reward optimization: DRO (arXiv 2405.19107, eq. 8), with an advantage in place of r - V.

loss = -(A log pi - beta / 2 (policy - old)^2): no ratio, so it stands data that is far off policy; the square
pulls the policy back to the old one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.policy_gradient import PolicyConfig, advantages, finish, returns, select
from jaxrl_llm.algos.policy_losses import log_ratio
from jaxrl_llm.structs import LossInputs, Metrics

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(PolicyConfig):
    """DRO."""

    beta: float = 1.0
    """Weight of the squared log-ratio."""


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """-A log pi + beta / 2 (policy - old)^2."""
    square = jnp.square(log_ratio(signals.policy, signals.old))
    surrogate = -signals.advantages * signals.policy + 0.5 * config.beta * square
    return finish(surrogate, {}, signals, config)
