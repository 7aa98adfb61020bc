"""Soft adaptive policy optimization: SAPO (arXiv 2511.20347, eq. 5 and 6).

loss = -A sigmoid(tau (r_t - 1)) 4 / tau, mean over responses of the mean over tokens: a smooth gate in place
of the clip. tau is larger where A is not positive, so that those tokens lose their gradient sooner.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.policy_gradient import PolicyConfig, advantages, finish, returns, select
from jaxrl_llm.algos.policy_losses import log_ratio
from jaxrl_llm.algos.reduce import Aggregation
from jaxrl_llm.structs import LossInputs, Metrics

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(PolicyConfig):
    """SAPO."""

    tau_positive: float = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_negative: float = 1.05
    """Steepness of the gate elsewhere."""
    aggregation: Aggregation = "sequence"


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """-A times the gate; the gate's derivative at r = 1 is 1."""
    ratio = jnp.exp(log_ratio(signals.policy, signals.old))
    tau = jnp.where(signals.advantages > 0, config.tau_positive, config.tau_negative)
    gate = jax.nn.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return finish(-signals.advantages * gate, {}, signals, config)
