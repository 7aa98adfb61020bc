"""Optimal token baseline: each token has the baseline of least variance (veRL's optimal_token_baseline).

A_t = G_t - sum(G_t W_t) / sum(W_t) over the group at the t-th own token, W_t = running sum of
1 - 2 p + sum(p^2). `advantage = "otb_tail"` (veRL's multi-turn form) gives the last response left in a group
no baseline; both count own tokens only, so that what a tool writes shifts nothing.
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
    """Optimal token baseline."""

    advantage: Advantage = "otb"
    aggregation: Aggregation = "sequence_sum"
