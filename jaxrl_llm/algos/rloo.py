"""REINFORCE leave-one-out: RLOO (arXiv 2402.14740, eq. 8).

A = r - mean reward of the other responses to the prompt, with -kl_coef (old - reference) of all tokens in r;
loss = -A r_t, summed over tokens: with one update a step the gradient of REINFORCE, with several PPO's clip
holds it. veRL averages over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.algos.clipped import ClippedConfig, loss
from jaxrl_llm.algos.estimators import Advantage
from jaxrl_llm.algos.kl import Estimator
from jaxrl_llm.algos.policy_gradient import KLPlace, advantages, returns, select
from jaxrl_llm.algos.reduce import Aggregation

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(ClippedConfig):
    """RLOO."""

    advantage: Advantage = "rloo"
    aggregation: Aggregation = "sequence_sum"
    kl_coef: float = 0.03
    kl: Estimator = "k1"
    kl_in: KLPlace = "reward"
