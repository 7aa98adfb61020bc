"""Group sequence policy optimization: GSPO (arXiv 2507.18071, eq. 5 and 14).

s = exp(mean over the response's tokens of policy - old), one ratio a response, in its token form
sg[s] pi / sg[pi]; loss = max(-A s, -A clip(s)), mean over responses. The clip range is a thousandth of PPO's.
`aggregation = "token"` is veRL 0.9's and ChatLearn's.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.clipped import ClippedConfig
from jaxrl_llm.algos.policy_gradient import advantages, finish, returns, select
from jaxrl_llm.algos.policy_losses import BOUND, clip
from jaxrl_llm.algos.reduce import Aggregation, sequence_mean
from jaxrl_llm.structs import LossInputs, Metrics

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(ClippedConfig):
    """GSPO."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: Aggregation = "sequence"


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """The clipped surrogate of the sequence's ratio."""
    mean = sequence_mean(signals.policy - signals.old, signals)
    fixed = jax.lax.stop_gradient(jnp.clip(mean, -BOUND, BOUND) - signals.policy)
    ratio = jnp.exp(fixed + signals.policy)
    surrogate, clipped = clip(
        ratio, signals.advantages, config.clip_low, config.clip_high, config.dual_clip, config.loss_cap
    )
    return finish(surrogate, {"clip_fraction": clipped}, signals, config)
