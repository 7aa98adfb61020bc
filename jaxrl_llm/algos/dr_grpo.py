"""GRPO done right: Dr. GRPO (arXiv 2503.20783, section 3.2).

A = r - mean of the group, without the std; loss = sum over tokens / a constant, mean over responses: neither
hard prompts nor short wrong answers weigh more than others. `constant` is the longest response allowed
(veRL without `loss_scale_factor` divides by the padded length instead).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.algos.advantages import Scale
from jaxrl_llm.algos.clipped import ClippedConfig, loss
from jaxrl_llm.algos.policy_gradient import advantages, returns, select
from jaxrl_llm.algos.reduce import Aggregation

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(ClippedConfig):
    """Dr. GRPO."""

    scale: Scale = "none"
    aggregation: Aggregation = "constant"
