"""Decoupled clip and dynamic sampling: DAPO (arXiv 2503.14476, eq. 8 to 13).

GRPO without KL, and four changes, each an option of its own: the ratio may rise further than it may fall
(`clip_high`); prompts whose responses are all right or all wrong are replaced (`dynamic_sampling`); every
token counts the same (`aggregation`); cut-off responses are not learned from (`drop_truncated`), and long
ones are punished before that (reward "overlong").
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.algos.clipped import ClippedConfig, loss
from jaxrl_llm.algos.policy_gradient import advantages, returns, select

__all__ = ["INPUT", "Config", "advantages", "loss", "returns", "select"]

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(ClippedConfig):
    """DAPO."""

    clip_high: float = 0.28
    dynamic_sampling: bool = True
    drop_truncated: bool = True
