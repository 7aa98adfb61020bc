"""What a generative reward model says: Yes or No of one answer, A or B of two (data/judge.py asks)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.exact import answers, judge
from jaxrl_llm.rewards.extract import find_answer
from jaxrl_llm.rewards.sample import Sample

WORD = re.compile(r"\b(?:(yes)|(no))\b|\b([AB])\b", re.IGNORECASE)


def reward(sample: Sample) -> tuple[float, Outcome]:
    """1.0 if the judge's verdict is the row's: for training the judge itself by reinforcement learning."""
    said = verdict(sample.response)
    if said is None:
        return 0.0, Outcome.UNPARSED
    return judge(said in answers(sample.answer))


def verdict(text: str) -> str | None:
    """ "Yes", "No", "A" or "B": of the marked answer, else the last such word; None where there is none.

    A lone small a or b is a word like any other.
    """
    for place in (find_answer(text), text):
        words = [match.group() for match in WORD.finditer(place or "")]
        words = [word for word in words if word not in ("a", "b")]
        if words:
            return words[-1].capitalize()
    return None


def probability(logprobs: Mapping[str, float], yes: str = "Yes", no: str = "No") -> float:
    """Probability of `yes` against `no`, from the log-probs (nats) of a judge's first token.

    A finer reward than the word alone (arXiv 2408.15240). A word that is missing has probability 0; NaN
    where both are.
    """
    first, second = [logprobs.get(word, -math.inf) for word in (yes, no)]
    top = max(first, second)
    if top == -math.inf:
        return math.nan
    first, second = math.exp(first - top), math.exp(second - top)
    return first / (first + second)
