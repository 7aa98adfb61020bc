r"""The row's answer in the forms that verifiers compare with: text and number.

A worked solution counts by its marked answer (\boxed{..} or "#### .."), never by the last number in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.extract import boxed_answers, marked_numbers
from jaxrl_llm.rewards.numerals import NUMBER, plain_numbers, to_number
from jaxrl_llm.rewards.sample import RewardSample

COMPARING = ("exact", "arithmetic", "gsm8k", "math", "verdict")
"""Rewards that need the row's answer."""
NUMERIC = ("arithmetic", "gsm8k")
KEYS = ("target", "ground_truth", "answer", "answers", "aliases", "value", "text")
"""Keys of accepted answers in an object: of veRL's search rows, TriviaQA, SQuAD."""
MAX_BARE = 200  # maximum characters of an answer that is not a worked solution
SENTENCES = re.compile(r"\n|[.!?]\s+[A-Z]")


def accepted_answers(answer: Any) -> list[str]:
    """Return the accepted answers of a row as text.

    Raises:
        UserError: the row has no answer, or an object without a known key.
    """
    texts = answer_texts(answer)
    if not texts and isinstance(answer, Mapping) and answer:
        raise UserError(
            f"the row's answer is an object of {', '.join(map(str, answer))[:80]}: name the part to compare "
            f"with (--data.train.0.answer_key COLUMN.KEY), as it has none of {', '.join(KEYS)}"
        )
    if not texts:
        raise UserError("the row has no answer to compare with")
    return texts


def answer_texts(answer: Any) -> list[str]:
    """Return the answers of a row as text, without empty ones; lists, JSON lists and objects may hold
    several."""
    if isinstance(answer, Mapping):
        found = (texts for key in KEYS if (texts := answer_texts(answer.get(key))))
        return list(dict.fromkeys(text for texts in found for text in texts))
    if isinstance(answer, str) and (listed := _json_texts(answer)):
        answer = listed
    if isinstance(answer, list | tuple):
        return [text for item in answer for text in answer_texts(item)]
    return [text] if answer is not None and (text := _as_text(answer)).strip() else []


def has_answer(answer: Any) -> bool:
    """Return whether a row has an answer, readable or not."""
    values = answer.values() if isinstance(answer, Mapping) else ()
    return bool(answer_texts(answer)) or any(map(has_answer, values))


def gold_text(text: str) -> str:
    r"""Return an accepted answer without the text around its \boxed{..}, or before its "####"."""
    boxed = next(filter(None, boxed_answers(text)), None)
    return text.rpartition("####")[2].strip() if boxed is None else boxed


def gold_number(text: str) -> Fraction:
    """Return the value of an accepted answer: a number with or without a unit, or a solution that marks it.

    Raises:
        UserError: the answer is not a number, or has several numbers and no mark.
    """
    value = next(marked_numbers(text), None)
    value = to_number(text) if value is None else value
    if value is not None:
        return value
    numbers = [match.group() for match in NUMBER.finditer(plain_numbers(text))]
    if len(numbers) == 1 and not is_worked(text) and (value := to_number(numbers[0])) is not None:
        return value
    several = (
        f': it has {len(numbers)} numbers, and no mark (\\boxed{{..}} or "#### ..") says which one counts'
    )
    raise UserError(f"the row's answer {text[:80]!r} is not a number{several if numbers else ''}")


def is_worked(text: str) -> bool:
    """Return whether an accepted answer is a text of several sentences rather than a bare answer."""
    return len(text) > MAX_BARE or SENTENCES.search(text.strip()) is not None


def answered_by_row(sample: RewardSample, reward: str) -> RewardSample:
    """Return the row with its answer as the response, if it has no response and the answer is text.

    A built-in reward must accept this response, except for countdown, whose answers are not expressions.
    """
    if sample.response:
        return sample
    try:
        texts = [] if reward in ("gym", "countdown") else answer_texts(sample.answer)
        text = texts[0] if texts and reward in COMPARING else str(sample.answer)
        text = str(gold_number(text)) if reward in NUMERIC else text
        text = gold_text(text) if reward in ("exact", "math") else text
    except UserError:  # scoring the row raises it too
        return sample
    if reward in COMPARING or reward == "gym":
        return replace(sample, response=f"<answer>{text}</answer>")
    return replace(sample, response=text) if isinstance(sample.answer, str | int | float) else sample


def accepts_own_answer(sample: RewardSample, reward: str) -> bool:
    """Return whether a built-in reward compares with the row's answer, and so must accept it."""
    return has_answer(sample.answer) if reward in COMPARING else reward == "gym" and sample.answer is not None


def _json_texts(text: str) -> list[str] | None:
    """Return the texts of a JSON list of texts, as veRL's tables hold accepted answers; None for other text.

    A list of numbers is not split: it may be a point, an interval or a matrix.
    """
    if not text.lstrip().startswith("["):
        return None
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return listed if isinstance(listed, list) and all(isinstance(item, str) for item in listed) else None


def _as_text(answer: Any) -> str:
    """Return an answer as text, a number in plain digits: 0.00001 rather than 1e-05."""
    if isinstance(answer, bytes):
        return answer.decode(errors="replace")
    return format(Decimal(repr(float(answer))), "f") if isinstance(answer, float) else str(answer)
