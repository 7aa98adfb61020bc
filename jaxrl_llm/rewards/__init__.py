"""Rewards: REWARDS names the built-in ones, RewardPool runs them in killable worker processes.

Nothing here imports jax: a worker starts in a fraction of a second.
"""

from jaxrl_llm.rewards import countdown, exact, gym, maths, number, shaping, verdict
from jaxrl_llm.rewards.sample import Result, RewardConfig, RewardFailureError, RewardLoadError, Sample

REWARDS = {
    "exact": exact.reward,
    "arithmetic": number.reward,
    "gsm8k": number.reward,
    "math": maths.reward,
    "countdown": countdown.reward,
    "gym": gym.reward,
    "verdict": verdict.reward,
    "format": shaping.format_reward,
    "overlong": shaping.overlong_reward,
}

__all__ = ["REWARDS", "Result", "RewardConfig", "RewardFailureError", "RewardLoadError", "Sample"]
