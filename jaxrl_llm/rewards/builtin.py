"""The built-in rewards: REWARDS, from name to function.

Each takes a RewardSample (two the RewardConfig as well) and returns a score, or score and outcome. They
raise UserError where the row, not the response, is to blame; no response raises.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.countdown import countdown_task, evaluate_countdown, find_expression
from jaxrl_llm.rewards.extract import (
    find_answer,
    find_tagged,
    find_verdict,
    last_number,
    normalize_words,
    to_number,
)
from jaxrl_llm.rewards.sample import RewardSample

if TYPE_CHECKING:  # config.py reads the names of REWARDS
    from jaxrl_llm.rewards.config import RewardConfig

FORMAT = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


def exact_reward(sample: RewardSample) -> tuple[float, Outcome]:
    """Return 1.0 if the marked answer is an accepted one; numbers are compared by value.

    Without a mark, the last number counts where the answer is a number, else the whole response must be the
    answer.
    """
    accepted = accepted_answers(sample.answer)
    marked = find_answer(sample.response)
    if marked is not None:
        return binary(any(same_answer(marked, answer) for answer in accepted))
    if any(same_answer(sample.response, answer) for answer in accepted):
        return binary(True)
    number = last_number(sample.response)
    if number is None or all(to_number(answer) is None for answer in accepted):
        return 0.0, Outcome.UNPARSED
    return binary(any(same_answer(number, answer) for answer in accepted))


def number_reward(sample: RewardSample) -> tuple[float, Outcome]:
    """Return 1.0 if the marked answer, or else the last number of the response, has the answer's value.

    For generated arithmetic, and GSM8K, whose answer column ends in "#### 42".
    """
    accepted = [_value(text.rpartition("####")[2]) for text in accepted_answers(sample.answer)]
    if None in accepted:
        raise UserError(f"the row's answer {str(sample.answer)[:80]!r} is not a number")
    marked = find_answer(sample.response)
    value = _value(sample.response if marked is None else marked)
    if value is None:
        return 0.0, Outcome.UNPARSED
    return binary(value in accepted)


def math_reward(sample: RewardSample, config: RewardConfig) -> tuple[float, Outcome]:
    """Return 1.0 if the response's answer equals an accepted one as mathematics, by math-verify.

    It reads LaTeX, fractions, sets, intervals and equations. It stops itself by signal.alarm, well before
    `config.timeout`, so it must run in the main thread of its process; what takes longer is not equal.
    """
    from math_verify import parse, verify  # heavy: only in the workers that need it

    accepted = [gold for text in accepted_answers(sample.answer) if (gold := _gold(text))]
    if not accepted:
        raise UserError(f"math-verify cannot read the row's answer {str(sample.answer)[:80]!r}")
    seconds = max(int(config.timeout / (len(accepted) + 2)), 1)
    marked = find_tagged(sample.response)
    given = parse(sample.response if marked is None else _latex(marked), parsing_timeout=seconds)
    if not given:
        return 0.0, Outcome.UNPARSED
    return binary(any(verify(list(gold), given, timeout_seconds=seconds) for gold in accepted))


def countdown_reward(sample: RewardSample) -> tuple[float, Outcome]:
    """Return 1.0 if the expression uses exactly the given numbers and makes the target.

    Numbers and target are the row's columns `numbers` (or `nums`) and `target`, or those of a dict answer.
    """
    numbers, target = countdown_task(sample)
    expression = find_expression(sample.response)
    if expression is None:
        return 0.0, Outcome.UNPARSED
    try:
        value, used = evaluate_countdown(expression)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return 0.0, Outcome.UNPARSED
    except ZeroDivisionError:
        return 0.0, Outcome.WRONG
    return binary(value == target and sorted(used) == sorted(numbers))


def gym_reward(sample: RewardSample) -> tuple[float, Outcome]:
    """Return reasoning-gym's own score in [0, 1] of the marked answer, else of the whole response.

    The row's columns must be the task's entry: question, answer, metadata with source_dataset. A scorer that
    raises on the policy's text (some do on non-numeric answers) scores 0, unparsed.
    """
    metadata = sample.columns.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise UserError('gym needs the column metadata with "source_dataset", as reasoning-gym makes it')
    scorer = _gym_scorer(metadata["source_dataset"])
    marked = find_answer(sample.response)
    given = sample.response.strip() if marked is None else marked
    question = sample.messages[-1]["content"] if sample.messages else sample.prompt
    entry: dict[str, Any] = {"question": question, "answer": sample.answer, **sample.columns}
    try:
        score = float(scorer(answer=given, entry=entry))
    except Exception:  # third-party scorers, called with arbitrary text
        return 0.0, Outcome.UNPARSED
    if score >= 1.0:
        return score, Outcome.CORRECT
    return score, Outcome.UNPARSED if marked is None else Outcome.WRONG


def verdict_reward(sample: RewardSample) -> tuple[float, Outcome]:
    """Return 1.0 if the verdict is the row's, to train a generative reward model.

    data/preference.py makes its prompts.
    """
    verdict = find_verdict(sample.response)
    if verdict is None:
        return 0.0, Outcome.UNPARSED
    return binary(verdict in accepted_answers(sample.answer))


def format_reward(sample: RewardSample) -> float:
    """Return 1.0 if the response is <think>..</think> then <answer>..</answer>, each once, nothing else.

    DeepSeek-R1, arXiv:2501.12948, section 2.2.2.
    """
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    once = all(sample.response.count(tag) == 1 for tag in tags)
    return float(once and FORMAT.fullmatch(sample.response) is not None)


def overlong_reward(sample: RewardSample, config: RewardConfig) -> float:
    """Return 0 up to `overlong_from` response tokens, then linearly down to -1 at `overlong_to` and beyond.

    DAPO's soft overlong punishment, arXiv:2503.14476, eq. 13.
    """
    exceeded = len(sample.response_ids) - config.overlong_from
    return -min(max(exceeded, 0) / (config.overlong_to - config.overlong_from), 1.0)


REWARDS: dict[str, Callable[..., Any]] = {
    "exact": exact_reward,
    "arithmetic": number_reward,
    "gsm8k": number_reward,
    "math": math_reward,
    "countdown": countdown_reward,
    "gym": gym_reward,
    "verdict": verdict_reward,
    "format": format_reward,
    "overlong": overlong_reward,
}

COMPARING = ("exact", "arithmetic", "gsm8k", "math", "verdict")
"""Rewards that need the row's answer."""


def accepted_answers(answer: Any) -> list[str]:
    """Return the accepted answers of a row as text.

    Raises:
        UserError: the row has none.
    """
    texts = answer_texts(answer)
    if not texts:
        raise UserError("the row has no answer to compare with")
    return texts


def answer_texts(answer: Any) -> list[str]:
    """Return the answers of a row as text, without empty ones."""
    listed = list(answer) if isinstance(answer, list | tuple) else [answer]
    return [_as_text(item) for item in listed if item is not None and str(item).strip()]


def _as_text(answer: Any) -> str:
    """Return an answer as text, a number in plain digits: 0.00001 rather than 1e-05."""
    return format(Decimal(repr(float(answer))), "f") if isinstance(answer, float) else str(answer)


def same_answer(given: str, answer: str) -> bool:
    """Return whether two answers are equal: as numbers where both are, else as words."""
    left, right = to_number(given), to_number(answer)
    if left is not None and right is not None:
        return left == right
    return normalize_words(given) == normalize_words(answer)


def binary(correct: bool) -> tuple[float, Outcome]:
    """Return score and outcome of a response that is right or wrong."""
    return (1.0, Outcome.CORRECT) if correct else (0.0, Outcome.WRONG)


def _value(text: str) -> Fraction | None:
    """Return the text as a number, or the last number in it."""
    value = to_number(text)
    return value if value is not None else to_number(last_number(text) or "")


@functools.lru_cache(maxsize=256)
def _gold(text: str) -> tuple[Any, ...]:
    """Parse an accepted answer, once for its group; it is read as LaTeX unless it marks itself."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return tuple(parse(_latex(text)))


def _latex(text: str) -> str:
    """Return an answer for `math_verify.parse`, which reads LaTeX between marks."""
    marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    return text if marked else f"${text.rpartition('####')[2].strip()}$"


@functools.lru_cache(maxsize=256)
def _gym_scorer(task: str) -> Callable[..., Any]:
    import reasoning_gym  # heavy: only in the workers that need it

    return reasoning_gym.get_score_answer_fn(task)
