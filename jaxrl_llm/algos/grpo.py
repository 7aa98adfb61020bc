"""Group relative policy optimization (DeepSeekMath, arXiv 2402.03300).

Defaults are the paper's; DAPO and Dr. GRPO are settings of `clip_high`, `aggregation` and `scale`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxrl_llm.algos.advantages import Scale, group_advantages
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.kl import Estimator, kl
from jaxrl_llm.algos.policy_losses import ppo_clip
from jaxrl_llm.algos.reduce import Aggregation, aggregate, token_mean
from jaxrl_llm.structs import Metrics, Rollouts, Signals

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(AlgoConfig):
    """GRPO."""

    scale: Scale = "std"
    """Divide the centred reward by: the group's std, its population std, the batch's std, or nothing."""
    clip_low: float = 0.2
    """The ratio may fall to 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio may rise to 1 + clip_high (DAPO: 0.28)."""
    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative (3.0 is usual); None = none."""
    aggregation: Aggregation = "sequence"
    """How token losses become one: sequence (the paper), token (DAPO), sequence_sum, constant (Dr. GRPO)."""
    constant: float = 1024.0
    """Tokens that "constant" aggregation divides by."""
    kl_coef: float = 0.04
    """Weight of KL(policy || reference) in the loss; 0 = no reference model at all."""
    kl: Estimator = "k3"
    """Estimator of the KL."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0


def advantages(rollouts: Rollouts, config: Config) -> Float[Array, "N R"]:
    """Every token of a response gets the response's group-relative advantage."""
    per_response = group_advantages(rollouts.rewards, rollouts.group, rollouts.valid, config.scale)
    return per_response[:, None] * rollouts.mask


def loss(signals: Signals, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """Clipped surrogate plus KL penalty minus entropy bonus (eq. 3)."""
    surrogate, clipped = ppo_clip(
        signals.policy, signals.old, signals.advantages, config.clip_low, config.clip_high, config.dual_clip
    )
    total = surrogate
    metrics = {
        "clip_fraction": token_mean(clipped.astype(surrogate.dtype), signals),
        "policy_kl": token_mean(signals.old - signals.policy, signals),
    }
    if config.kl_coef:
        penalty = kl(signals.policy, signals.reference, config.kl)
        total = total + config.kl_coef * penalty
        metrics["kl"] = token_mean(penalty, signals)
    if config.entropy_coef:
        total = total - config.entropy_coef * signals.entropy
    return aggregate(total, signals, config.aggregation, config.constant), metrics
