"""Exact match with the row's answer (or any of a list of answers); numbers are compared by value."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.extract import find_answer, last_number, normalize, to_number
from jaxrl_llm.rewards.sample import Sample


def reward(sample: Sample) -> tuple[float, Outcome]:
    """1.0 if the marked answer is an accepted one. Without a mark, the last number counts where the answer
    is a number, else the whole response must be the answer."""
    accepted = answers(sample.answer)
    given = find_answer(sample.response)
    if given is not None:
        return judge(any(same(given, answer) for answer in accepted))
    if any(same(sample.response, answer) for answer in accepted):
        return judge(True)
    number = last_number(sample.response)
    if number is None or all(to_number(answer) is None for answer in accepted):
        return 0.0, Outcome.UNPARSED
    return judge(any(same(number, answer) for answer in accepted))


def answers(answer: Any) -> list[str]:
    """The accepted answers as text. Raises ValueError where the row has none."""
    listed = list(answer) if isinstance(answer, list | tuple) else [answer]
    texts = [str(item) for item in listed if item is not None and str(item).strip()]
    if not texts:
        raise UserError("the row has no answer to compare with")
    return texts


def same(given: str, answer: str) -> bool:
    left, right = to_number(given), to_number(answer)
    if left is not None and right is not None:
        return left == right
    return normalize(given) == normalize(answer)


def judge(correct: bool) -> tuple[float, Outcome]:
    return (1.0, Outcome.CORRECT) if correct else (0.0, Outcome.WRONG)
