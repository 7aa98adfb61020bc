"""reasoning-gym tasks: each is judged by its own scorer, for many have several right answers."""

from __future__ import annotations

import functools
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.extract import find_answer
from jaxrl_llm.rewards.sample import Sample


def reward(sample: Sample) -> tuple[float, Outcome]:
    """The task's own score in [0, 1] of the marked answer, else of the whole response; 1 is correct.

    The row's columns must be the task's entry: question, answer, metadata with source_dataset.
    A scorer that raises on the policy's text (some do on non-numeric answers) scores 0, unparsed.
    """
    metadata = sample.columns.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise UserError('gym needs the column metadata with "source_dataset", as reasoning-gym makes it')
    scorer = _scorer(metadata["source_dataset"])
    marked = find_answer(sample.response)
    given = sample.response.strip() if marked is None else marked
    question = sample.messages[-1]["content"] if sample.messages else sample.prompt
    entry: dict[str, Any] = {"question": question, "answer": sample.answer, **sample.columns}
    try:
        score = float(scorer(answer=given, entry=entry))
    except Exception:  # third-party scorers fed arbitrary text; ours is to keep the run alive
        return 0.0, Outcome.UNPARSED
    if score >= 1.0:
        return score, Outcome.CORRECT
    return score, Outcome.UNPARSED if marked is None else Outcome.WRONG


@functools.lru_cache(maxsize=256)
def _scorer(task: str):
    import reasoning_gym  # heavy: only in the workers that need it

    return reasoning_gym.get_score_answer_fn(task)
