"""Rows of samples.jsonl: what the policy read and wrote, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.report.log import json_value
from jaxrl_llm.structs import Trajectory


def sample_rows(
    trajectories: Sequence[Trajectory], prompts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return rows of samples.jsonl, which `python -m jaxrl_llm generate --prompts` reads.

    Args:
        prompts: `data.chat.prompt_row` of each trajectory: "prompt" and, of a chat, "messages".

    Returns: the prompt's row with "response" (text), "turns" (messages of a conversation), "reward",
        "outcome", "finish" and "response_tokens"; "opens_thought" if the prompt opens the thought that the
        response begins in.
    """
    return [
        {
            **prompt,
            "response": t.text,
            **({"turns": t.messages} if t.episode else {}),
            **({"opens_thought": True} if t.opens_thought else {}),
            "reward": json_value(t.reward),
            "outcome": t.outcome.name.lower(),
            "finish": t.finish,
            "response_tokens": len(t.response_ids),
        }
        for t, prompt in zip(trajectories, prompts, strict=True)
    ]
