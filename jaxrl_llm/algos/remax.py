"""ReMax (arXiv 2310.10505, algorithm 2): REINFORCE with the greedy response as baseline.

A_t = rewards from t on - reward of the greedy response to the same prompt; loss = -A r_t, summed over tokens.
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
    """ReMax."""

    advantage: Advantage = "remax"
    aggregation: Aggregation = "sequence_sum"
