"""PPO on responses drawn again by their reward: policy-filtered PPO, PF-PPO (arXiv 2409.06957, section 3).

As many responses as there are, drawn with replacement: with weight |r|^power, or only the best and worst of
the step ("max_min"), or the best four times as likely as the rest ("max_random"). Rewards in the middle,
where a reward model is least sure, then count for less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxrl_llm.algos import policy_gradient, ppo
from jaxrl_llm.algos.clipped import loss
from jaxrl_llm.algos.policy_gradient import advantages, returns
from jaxrl_llm.structs import Rollouts

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(ppo.Config):
    """PF-PPO."""

    filter: Literal["pow", "max_min", "max_random"] = "pow"
    """How likely a response is drawn: |r|^power; best and worst only; best 4 times as likely as others."""
    power: float = 2.0
    """Of the reward, for "pow"."""


def select(rollouts: Rollouts, config: Config, rng: np.random.Generator) -> np.ndarray:
    """Trajectories learned from, some of them several times."""
    kept = policy_gradient.select(rollouts, config, rng)
    if not len(kept):
        return kept
    rewards = np.asarray(rollouts.rewards, np.float64)[kept]
    best = rewards == rewards.max()
    if config.filter == "pow":
        weights = np.abs(rewards) ** config.power
    elif config.filter == "max_min":
        weights = (best | (rewards == rewards.min())).astype(np.float64)
    else:
        weights = np.where(best, 0.4, 0.1)
    weights = weights + 1e-8
    return np.sort(rng.choice(kept, size=len(kept), p=weights / weights.sum()))
