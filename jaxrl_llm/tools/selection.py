"""Rows of training data made of rewarded responses: best of n, pairs, filtered and conditional SFT."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.data.chat import prompt_row
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.preference import score_text, with_suffix
from jaxrl_llm.data.rows import PROMPT_KEYS, RESPONSE_KEYS, Example
from jaxrl_llm.thoughts import as_message, has_channels, visible_response
from jaxrl_llm.tools.config import SelectConfig

OWN_KEYS = {
    *(*PROMPT_KEYS, *RESPONSE_KEYS, "responses", "chosen", "rejected", "margin", "completions", "labels"),
    *("reward", "rewards", "outcome", "failure", "finish", "steps", "response_tokens", "turns"),
}
"""Columns of an input row that output rows drop, since they have other prompts and responses."""


@dataclass(frozen=True)
class RewardedResponse:
    """One response and its rewards."""

    text: str
    reward: float | None = None  # None: a verifier failed, or nothing rewards
    columns: dict[str, Any] = field(default_factory=dict)  # for the output: rewards by name, outcome, ...
    opens_thought: bool = False  # the prompt opens the thought that the text begins in


def selected_rows(
    example: Example, responses: Sequence[RewardedResponse], config: SelectConfig, chat: ChatConfig
) -> Iterator[dict[str, Any]]:
    """Yield the training rows of one prompt and its responses, without empty responses and responses without
    a reward, which training cannot learn from.

    They are rows of `data.rows` and `data.preference`: the prompt as `chat` renders it, "response" or
    "chosen" and "rejected" (text), and the columns of the input. Equal rewards keep the responses' order.
    """
    scored = [r for r in responses if r.reward is not None and visible_response(r.text)]
    ranked = sorted(scored, key=lambda r: -r.reward)
    enough = lambda r: config.threshold is None or r.reward >= config.threshold
    base = base_row(example, chat)
    if config.select == "pairs":
        if ranked and enough(ranked[0]) and ranked[0].reward - ranked[-1].reward >= config.margin:
            yield base | _pair(ranked[0], ranked[-1], base) | thought_column(ranked[0])
        return
    for response in ranked[: config.keep] if config.select == "best" else scored:
        if not enough(response):
            continue
        if config.select == "conditional":
            base = base_row(with_suffix(example, score_text(response.reward)), chat)
        written = {"response": _completion(response, base), "reward": response.reward}
        yield base | written | thought_column(response) | response.columns


def reward_columns(response: RewardedResponse) -> dict[str, Any]:
    """Return the reward of a response as columns; {} without a reward."""
    return {"reward": response.reward, **response.columns} if response.columns else {}


class RewardSummary:
    """Mean rewards of all responses so far: of each, and of the best of each prompt."""

    def __init__(self):
        self.total = self.count = self.best = self.prompts = 0

    def add(self, groups: Sequence[Sequence[RewardedResponse]]) -> str:
        """Return a note on all groups so far, for the progress."""
        for group in groups:
            rewards = [r.reward for r in group if r.reward is not None]
            self.total, self.count = self.total + sum(rewards), self.count + len(rewards)
            if rewards:
                self.best, self.prompts = self.best + max(rewards), self.prompts + 1
        if not self.count:
            return ", no response has a reward"
        best = f", best {self.best / self.prompts:.3f}" if self.count > self.prompts else ""
        return f", reward {self.total / self.count:.3f}{best}"


def base_row(example: Example, chat: ChatConfig) -> dict[str, Any]:
    """Return prompt and other columns of an output row."""
    columns = example.columns.items()
    carried = {name: plain_json(value) for name, value in columns if name not in OWN_KEYS}
    return carried | prompt_row(example, chat)


def plain_json(value: Any) -> Any:
    """Return a value as JSON holds it: numbers that are not finite are null, dates and the like text."""
    if isinstance(value, Mapping):
        return {str(name): plain_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | bool | int) else str(value)


def _pair(chosen: RewardedResponse, rejected: RewardedResponse, base: Mapping[str, Any]) -> dict[str, Any]:
    rewards = {"chosen_reward": chosen.reward, "rejected_reward": rejected.reward}
    sides = {"chosen": _completion(chosen, base), "rejected": _completion(rejected, base)}
    if any(isinstance(side, list) for side in sides.values()):  # both as messages
        sides = {"chosen": [as_message(chosen.text)], "rejected": [as_message(rejected.text)]}
    return {**sides, **rewards}


def _completion(response: RewardedResponse, base: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """Return a response in the form for training: the text, or a message if a template writes its
    channels."""
    return (
        [as_message(response.text)] if has_channels(response.text) and "messages" in base else response.text
    )


def thought_column(response: RewardedResponse) -> dict[str, bool]:
    """Return the column that marks a response that begins inside a thought; {} for others."""
    return {"opens_thought": True} if response.opens_thought else {}
