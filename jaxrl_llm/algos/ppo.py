"""Proximal policy optimization with a critic: PPO (arXiv 1707.06347, eq. 7; for language arXiv 2203.02155).

Reward of a token: -kl_coef (old - reference), plus the response's reward on its last token;
A = GAE over the policy's own tokens (arXiv 1506.02438), whitened; loss = max(-A r_t, -A clip(r_t)).
The critic (`algos/value.py`) learns A + V; `critic = "shared"` makes it a second head on the policy.
kl_coef and lambda are InstructGPT's.
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
    """PPO."""

    advantage: Advantage = "gae"
    lam: float = 0.95
    kl_coef: float = 0.02
    kl: Estimator = "k1"
    kl_in: KLPlace = "reward"
