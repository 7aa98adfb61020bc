"""GRPO for pass@k (arXiv 2503.19595, eq. 9): a group is worth its best response.

A = (best - second best) / std of the group for the best response, 0 for all others. Where one response is
enough, only what it adds over the rest is learned.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.algos.clipped import ClippedConfig, loss
from jaxrl_llm.algos.estimators import Advantage
from jaxrl_llm.algos.policy_gradient import advantages, returns, select
from jaxrl_llm.algos.reduce import Aggregation

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(ClippedConfig):
    """Pass@k GRPO."""

    advantage: Advantage = "passk"
    aggregation: Aggregation = "sequence"
