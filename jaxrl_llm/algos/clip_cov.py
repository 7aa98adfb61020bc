"""Clip-Cov (arXiv 2505.22617, eq. 10 and 11): PPO's clip, and a few tokens of high covariance learn nothing.

Among the tokens whose covariance of advantage and log-prob lies within (low, high) a random share is dropped,
`fraction` of all tokens: those would cost most entropy. The draw is a function of the token's log-prob, so
that a run can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.clipped import ClippedConfig, surrogate
from jaxrl_llm.algos.covariance import covariance, lottery
from jaxrl_llm.algos.policy_gradient import advantages, finish, returns, select
from jaxrl_llm.structs import LossInputs, Metrics

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(ClippedConfig):
    """Clip-Cov."""

    fraction: float = 2e-4
    """Tokens dropped, of all."""
    covariance_low: float = 1.0
    """Only tokens of a larger covariance are dropped."""
    covariance_high: float = 5.0
    """Only tokens of a smaller covariance are dropped."""


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """The clipped surrogate, 0 where the token is dropped."""
    per_token, clipped = surrogate(signals, config)
    cov = covariance(signals)
    within = (cov > config.covariance_low) & (cov < config.covariance_high)
    candidates = within & ~clipped & (signals.mask > 0)
    wanted = config.fraction * signals.mask.sum() / jnp.maximum(candidates.sum(), 1)
    dropped = candidates & (lottery(signals.old) < wanted)
    per_token = jnp.where(dropped, 0.0, per_token)
    return finish(per_token, {"clip_fraction": clipped, "dropped_fraction": dropped}, signals, config)
