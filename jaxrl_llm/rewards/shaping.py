"""Rewards that shape: added with a weight to the one that says correct or wrong."""

from __future__ import annotations

import re

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.sample import RewardConfig, Sample

FORMAT = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


def format_reward(sample: Sample) -> float:
    """1.0 if the response is <think>..</think> then <answer>..</answer>, each once, and nothing else.

    DeepSeek-R1, arXiv:2501.12948, section 2.2.2.
    """
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    once = all(sample.response.count(tag) == 1 for tag in tags)
    return float(once and FORMAT.fullmatch(sample.response) is not None)


def overlong_reward(sample: Sample, config: RewardConfig) -> float:
    """0 up to `overlong_from` response tokens, then linearly down to -1 at `overlong_to`, and -1 beyond.

    DAPO's soft overlong punishment, arXiv:2503.14476, eq. 13.
    """
    if not 0 < config.overlong_from < config.overlong_to:
        raise UserError("overlong needs 0 < reward.overlong_from < reward.overlong_to")
    exceeded = len(sample.response_ids) - config.overlong_from
    return -min(max(exceeded, 0) / (config.overlong_to - config.overlong_from), 1.0)
