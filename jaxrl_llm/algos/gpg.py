"""Group policy gradient: GPG (arXiv 2504.02546, eq. 4 to 6).

A = alpha (r - mean of the group), alpha = responses / responses of groups whose rewards differ, so that
groups that teach nothing do not shrink the step; loss = -A log pi, mean over tokens. veRL counts responses
whose reward is not 0 instead: `advantage = "gpg_rewards"`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.algos.advantages import Scale
from jaxrl_llm.algos.estimators import Advantage
from jaxrl_llm.algos.policy_gradient import PolicyConfig, advantages, returns, select
from jaxrl_llm.algos.reinforce import loss

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(PolicyConfig):
    """GPG."""

    advantage: Advantage = "gpg"
    scale: Scale = "none"
