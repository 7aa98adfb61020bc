"""The answer is a number: generated arithmetic, and GSM8K, whose answer column ends in "#### 42"."""

from __future__ import annotations

from fractions import Fraction

from jaxrl_llm.errors import UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.exact import answers, judge
from jaxrl_llm.rewards.extract import find_answer, last_number, to_number
from jaxrl_llm.rewards.sample import Sample


def reward(sample: Sample) -> tuple[float, Outcome]:
    """1.0 if the marked answer, or else the last number of the response, has the answer's value.

    Raises ValueError if the row's answer holds no number.
    """
    accepted = [_value(text.rpartition("####")[2]) for text in answers(sample.answer)]
    if None in accepted:
        raise UserError(f"the row's answer {str(sample.answer)[:80]!r} is not a number")
    given = find_answer(sample.response)
    value = _value(sample.response if given is None else given)
    if value is None:
        return 0.0, Outcome.UNPARSED
    return judge(value in accepted)


def _value(text: str) -> Fraction | None:
    """The text as a number, or the last number in it."""
    whole = to_number(text)
    return whole if whole is not None else to_number(last_number(text) or "")
