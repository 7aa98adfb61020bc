"""Group relative policy optimization: GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3).

A = (r - mean of the group) / (std of the group + 1e-6), the same for all tokens of a response;
loss = mean over responses of the mean over tokens of max(-A r_t, -A clip(r_t)) + kl_coef k3.
ChatLearn divides by the population std; veRL averages over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.algos.clipped import ClippedConfig, loss
from jaxrl_llm.algos.policy_gradient import advantages, returns, select
from jaxrl_llm.algos.reduce import Aggregation

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(ClippedConfig):
    """GRPO."""

    aggregation: Aggregation = "sequence"
    kl_coef: float = 0.04
    """Weight of KL(policy || reference) in the loss; 0 = no reference model at all."""
