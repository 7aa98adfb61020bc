"""PF-PPO: responses are resampled by their reward before the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from jaxrl_llm.algos.clipped import clipped_loss
from jaxrl_llm.algos.config import ClippedConfig
from jaxrl_llm.algos.policy_gradient import policy_algorithm, select
from jaxrl_llm.ranges import Range
from jaxrl_llm.structs import Rollouts


@dataclass(frozen=True)
class FilteredConfig(ClippedConfig):
    """Options of PF-PPO."""

    filter: Literal["pow", "max_min", "max_random"] = "pow"
    """Probability of a response: by |r|^power; best and worst only; the best 4 times as likely as others."""
    power: Annotated[float, Range(0.0, 100.0)] = 2.0
    """Exponent of the reward, for "pow"."""


def resample(rollouts: Rollouts, config: FilteredConfig, rng: np.random.Generator) -> np.ndarray:
    """Draw as many trajectories as were given, with replacement, by their reward."""
    kept = select(rollouts, config, rng)
    if not len(kept):
        return kept
    rewards = np.asarray(rollouts.total_rewards, np.float64)[kept]
    best = rewards == rewards.max()
    if config.filter == "pow":
        weights = np.abs(rewards) ** config.power
    elif config.filter == "max_min":
        weights = (best | (rewards == rewards.min())).astype(np.float64)
    else:
        weights = np.where(best, 0.4, 0.1)
    weights = weights + 1e-8
    return np.sort(rng.choice(kept, size=len(kept), p=weights / weights.sum()))


pf_ppo = policy_algorithm(
    "pf_ppo",
    """Policy-filtered PPO: PF-PPO (arXiv 2409.06957, section 3), responses drawn again by their reward.

    As many responses as there are, drawn with replacement: with weight |r|^power, or only the best and worst
    of the step ("max_min"), or the best four times as likely as the rest ("max_random"). Rewards in the
    middle, where a reward model is least sure, then count for less.""",
    FilteredConfig(advantage="gae", lam=0.95, kl_coef=0.02, kl="k1", kl_in="reward"),
    clipped_loss,
    select=resample,
)
