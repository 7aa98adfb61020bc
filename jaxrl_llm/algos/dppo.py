"""Divergence proximal policy optimization: DPPO (arXiv 2602.04879, eq. 11 to 14).

loss = -M_t sg[min(r_t, cap)] A log pi. M_t drops a token that the advantage pushes further away from the
policy of the rollout once their divergence, of {this token, any other}, exceeds delta: total variation
|p - p_old|, or KL(p_old || p). Ratios of rare tokens may then be large, those of frequent ones may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algos.policy_gradient import Old, PolicyConfig, advantages, finish, returns, select
from jaxrl_llm.algos.policy_losses import log_ratio
from jaxrl_llm.structs import LossInputs, Metrics

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(PolicyConfig):
    """DPPO."""

    divergence_of: Literal["tv", "kl"] = "tv"
    """Total variation, or KL(old || policy)."""
    delta_low: float = 0.2
    """Largest divergence downwards: a probability for tv, nats for kl (0.05 is usual)."""
    delta_high: float = 0.2
    """Largest divergence upwards."""
    ratio_cap: float = 20.0
    """Largest importance weight."""
    old: Old = "rollout"


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """-M sg[min(r, cap)] A log pi."""
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(signals.policy, signals.old)))
    keep = trusted(jax.lax.stop_gradient(signals.policy), signals, config)
    surrogate = -jnp.minimum(ratio, config.ratio_cap) * signals.advantages * signals.policy
    return finish(jnp.where(keep, surrogate, 0.0), {"clip_fraction": ~keep}, signals, config)


def trusted(policy: Float[Array, "B T"], signals: LossInputs, config: Config) -> Bool[Array, "B T"]:
    """True where the divergence is small enough, or the advantage reduces it."""
    now, before = jnp.exp(policy), jnp.exp(signals.old)
    if config.divergence_of == "tv":
        far = jnp.abs(now - before)
    else:
        rest = jnp.log((1 - before + 1e-8) / (1 - now + 1e-8))
        far = before * (signals.old - policy) + (1 - before) * rest
    up = (far <= config.delta_high) | (now <= before)
    down = (far <= config.delta_low) | (now >= before)
    return jnp.where(signals.advantages > 0, up, down)
