"""REINFORCE++ (arXiv 2501.03262, eq. 4 to 6).

A = discounted return of the token's rewards, the KL among them, whitened over all tokens of the step;
loss = max(-A r_t, -A clip(r_t)). The baseline form is `advantage = "reinforce_pp_baseline"`: r - mean of the
group, then whitened (OpenRLHF's reinforce_baseline; there with the KL in the loss, k2).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.algos.clipped import ClippedConfig, loss
from jaxrl_llm.algos.estimators import Advantage
from jaxrl_llm.algos.kl import Estimator
from jaxrl_llm.algos.policy_gradient import KLPlace, advantages, returns, select

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(ClippedConfig):
    """REINFORCE++."""

    advantage: Advantage = "reinforce_pp"
    kl_coef: float = 0.01
    kl: Estimator = "k1"
    kl_in: KLPlace = "reward"
