"""On-policy RL with optimal reward baseline: OPO (arXiv 2505.23585, eq. 7).

A = r - sum(length r) / sum(length) over the group; loss = -A r_t, summed over tokens; no KL, no entropy, and
meant for one update a step.
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
    """OPO."""

    advantage: Advantage = "opo"
    aggregation: Aggregation = "sequence_sum"
