"""Variational sequence-level soft policy optimization: VESPO (arXiv 2602.10693).

W = exp(sum over the response's tokens of policy - old); loss = -sg[phi(W)] A log pi with
phi(W) = W^k exp(lambda (1 - W)): phi(1) = 1, and responses that the policy has left, or rushed to, fade out
without a clip and without dividing by the length. k and lambda differ by the sign of A.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.correction import over_sequence
from jaxrl_llm.algos.policy_gradient import PolicyConfig, advantages, finish, returns, select
from jaxrl_llm.algos.policy_losses import BOUND
from jaxrl_llm.structs import LossInputs, Metrics

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(PolicyConfig):
    """VESPO."""

    k_positive: float = 2.0
    """Power of W where the advantage is not negative."""
    lambda_positive: float = 3.0
    """Decay in W where the advantage is not negative."""
    k_negative: float = 3.0
    """Power of W where the advantage is negative."""
    lambda_negative: float = 2.0
    """Decay in W where the advantage is negative."""


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """-sg[phi(W)] A log pi."""
    weight = phi(jax.lax.stop_gradient(signals.policy), signals, config)
    return finish(-weight * signals.advantages * signals.policy, {"phi": weight}, signals, config)


def phi(policy: Float[Array, "B T"], signals: LossInputs, config: Config) -> Float[Array, "B T"]:
    """The weight of each token's response."""
    total = over_sequence(policy - signals.old, signals.mask, signals.segments)
    log_w = jnp.clip(total, -BOUND, BOUND)
    good = signals.advantages >= 0
    k = jnp.where(good, config.k_positive, config.k_negative)
    decay = jnp.where(good, config.lambda_positive, config.lambda_negative)
    return jnp.exp(k * log_w - decay * jnp.expm1(log_w))
