"""REINFORCE with the batch's mean reward as baseline (Williams 1992; arXiv 2402.14740, section 2.2).

A = r - mean of the batch, divided by its std where `scale` is not "none" (RL2's global norm; its group norm
is `advantage = "grpo"`); loss = -A log pi, summed over tokens. No ratio: for several updates a step add
importance weights, `correction.weight = "token"` with `correction.of = "policy"`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxrl_llm.algos.advantages import Scale
from jaxrl_llm.algos.estimators import Advantage
from jaxrl_llm.algos.policy_gradient import PolicyConfig, advantages, finish, returns, select
from jaxrl_llm.algos.reduce import Aggregation
from jaxrl_llm.structs import LossInputs, Metrics

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(PolicyConfig):
    """REINFORCE."""

    advantage: Advantage = "reinforce"
    scale: Scale = "none"
    aggregation: Aggregation = "sequence_sum"


def loss(signals: LossInputs, config: PolicyConfig) -> tuple[Float[Array, ""], Metrics]:
    """-A log pi."""
    return finish(-signals.advantages * signals.policy, {}, signals, config)
