"""Group reward-decoupled normalization: GDPO (arXiv 2601.05242, eq. 4 to 6).

Each reward is normalised in its group by itself, then they are added with `component_weights` and whitened
over the step: a reward of small spread is not drowned by one of large spread.
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
    """GDPO."""

    advantage: Advantage = "gdpo"
    aggregation: Aggregation = "sequence"
