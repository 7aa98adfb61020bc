"""KL-Cov (arXiv 2505.22617, eq. 12 and 13): the tokens of highest covariance are held to the old policy.

loss = -A r_t, plus penalty |policy - old| for the `fraction` of tokens whose covariance of advantage and
log-prob is largest: those would cost most entropy. The largest are taken in each micro-batch, at least one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algos.covariance import covariance
from jaxrl_llm.algos.policy_gradient import PolicyConfig, advantages, finish, returns, select
from jaxrl_llm.algos.policy_losses import log_ratio
from jaxrl_llm.structs import LossInputs, Metrics

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(PolicyConfig):
    """KL-Cov."""

    fraction: float = 2e-4
    """Tokens penalised, of all."""
    penalty: float = 1.0
    """Weight of |policy - old| there (veRL: 0.1)."""


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """-A r, with the penalty on the chosen tokens."""
    change = log_ratio(signals.policy, signals.old)
    chosen = largest(covariance(signals), signals.mask, config.fraction)
    surrogate = -signals.advantages * jnp.exp(change)
    surrogate = surrogate + jnp.where(chosen, config.penalty * jnp.abs(change), 0.0)
    return finish(surrogate, {"penalised_fraction": chosen}, signals, config)


def largest(x: Float[Array, "B T"], mask: Float[Array, "B T"], fraction: float) -> Bool[Array, "B T"]:
    """The `fraction` of masked places where x is largest, rounded down, at least one."""
    ordered = jnp.sort(jnp.where(mask > 0, x, -jnp.inf), axis=None, descending=True)
    count = jnp.maximum(jnp.floor(fraction * mask.sum()), 1.0).astype(jnp.int32)
    return (mask > 0) & (x >= ordered[count - 1])
