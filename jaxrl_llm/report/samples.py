"""Rows of samples.jsonl: the text that the policy read and wrote, turn by turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.forks import contexts
from jaxrl_llm.report.log import json_value
from jaxrl_llm.structs import Trajectory


def sample_rows(
    trajectories: Sequence[Trajectory], prompts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return rows of samples.jsonl, which `python -m jaxrl_llm generate --prompts` reads.

    Args:
        prompts: `data.chat.prompt_row` of each trajectory: "prompt" and, of a chat, "messages".

    Returns: the prompt's row with "response" (text), "turns" (messages of a conversation), "tree"
        (`turn_rows`), "reward", "outcome", "finish" and "response_tokens"; "failure" of a conversation that
        failed; "opens_thought" if the prompt opens the thought that the response begins in.
    """
    return [
        {
            **prompt,
            "response": t.text,
            **({"turns": t.messages} if t.episode else {}),
            **({"failure": t.episode.failure} if t.episode and t.episode.failure else {}),
            **({"opens_thought": True} if t.opens_thought else {}),
            "tree": turn_rows(t),
            "reward": json_value(t.reward),
            "outcome": t.outcome.name.lower(),
            "finish": t.finish,
            "response_tokens": int(t.once.sum()),
        }
        for t, prompt in zip(trajectories, prompts, strict=True)
    ]


def turn_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the turns of the policy, in the order in which they were sampled.

    Tokens have numbers, from 0 for the first one of the prompt; a span [a, b] is of the tokens a to b - 1.

    Returns: of each turn "after", the number of the turn that its conversation continues (-1 = it begins
        one), "tokens" (a span), "read" (spans of all tokens that the policy read before it) and, where known,
        "message" (its number in "turns"), "reward" of its step, "calls" (of tools) and "opening" (messages
        and tools of a conversation that a program begins); "rewritten" (true) if the policy read the turn
        "after" in other tokens than it wrote.
    """
    t, prompt = trajectory, len(trajectory.prompt_ids)
    records = {record.end: record for record in t.episode.records} if t.episode else {}
    reads = [context.read for context in contexts(t.num_tokens, t.forks)]
    last = len(t.messages) - 1 if t.episode else None
    ids = np.concatenate([t.prompt_ids, t.response_ids])
    rows, seen = [], []  # seen: ids that each turn ends with
    spans = list(_policy_spans(t.mask, sorted(records)))
    for number, (start, end) in enumerate(spans):
        first, record = prompt + start, records.get(end)
        read = reads[sum(fork.first <= first for fork in t.forks)]
        row = {"after": number - 1, "tokens": [first, prompt + end], "read": _runs(read[read < first])}
        if record:
            more = {"reward": record.reward, "calls": list(record.calls), "opening": record.opening}
            row |= {"after": record.after, "message": record.message}
            row |= {key: value for key, value in more.items() if value not in (None, [], {})}
        elif last is not None and number == len(spans) - 1:
            row["message"] = last
        before = seen[row["after"]] if row["after"] >= 0 else ids[:0]
        context = ids[read[read < first]]
        if len(before) > len(context) or not np.array_equal(before, context[: len(before)]):
            row["rewritten"] = True
        seen.append(np.concatenate([context, ids[first : prompt + end]]))
        rows.append(row)
    return rows


def _policy_spans(mask: np.ndarray, ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each turn in the response; some of the ends may be inside a run of the mask."""
    edges = np.flatnonzero(np.diff(mask > 0, prepend=False, append=False)).tolist()
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        yield from itertools.pairwise([start, *(end for end in ends if start < end < stop), stop])


def _runs(numbers: np.ndarray) -> list[list[int]]:
    """Return the spans of consecutive numbers."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(numbers, cuts) if len(run)]
