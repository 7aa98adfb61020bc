r"""Answers and verdicts in a response. All of it is searched, however long; the last match counts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
NUMBER = re.compile(rf"(?<!\w)[-+]?(?:{INTEGER}(?:\.\d+)?|(?<!\.)\.\d+)(?:/\d+)?", re.ASCII)
JUST_NUMBER = re.compile(rf"([-+]?(?:{INTEGER}(?:\.\d*)?|\.\d+))(?:/(\d+))?", re.ASCII)
MAX_DIGITS = 200  # longer "numbers" are noise, and slow to convert
VERDICT = re.compile(r"\b(?:(yes)|(no))\b|\b([AB])\b", re.IGNORECASE)


def find_answer(text: str) -> str | None:
    r"""Return the marked answer of a response, or None.

    In this order: <answer>..</answer>, \boxed{..}, "#### ..", "the answer is .." / "Answer: ..".
    """
    for find in (_tagged, _boxed, _hashes, _announced):
        answer = find(text)
        if answer is not None:
            return answer
    return None


def last_number(text: str) -> str | None:
    """Return the last number of the text, as written; None where there is none."""
    last = None
    for match in NUMBER.finditer(text):
        last = match.group()
    return last


def to_number(text: str) -> Fraction | None:
    """Return the value of "1,234", "-0.5", "3/4", "$12.00", "50%" (as 50), "7."; None of any other text."""
    plain = text.strip().strip("$*").strip().rstrip(".%").removesuffix("\\")
    match = JUST_NUMBER.fullmatch(plain) if len(plain) <= MAX_DIGITS else None
    if match is None or (match[2] and int(match[2]) == 0):
        return None
    return Fraction(match[1].replace(",", "")) / int(match[2] or 1)


def normalize_words(text: str) -> str:
    """Return text without case, extra white space, a final period and surrounding quotes."""
    return " ".join(text.casefold().split()).rstrip(".").strip("\"'` ")


def find_verdict(text: str) -> str | None:
    """Return the verdict "Yes", "No", "A" or "B" of a generative reward model, or None.

    That of the marked answer, else the last such word. A lone small a or b is a word like any other.
    """
    for part in (find_answer(text), text):
        words = [match.group() for match in VERDICT.finditer(part or "")]
        words = [word for word in words if word not in ("a", "b")]
        if words:
            return words[-1].capitalize()
    return None


def verdict_probability(logprobs: Mapping[str, float], yes: str = "Yes", no: str = "No") -> float:
    """Return the probability of `yes` against `no` in [0, 1].

    A finer reward than the word alone (arXiv 2408.15240).

    Args:
        logprobs: nats, of the first token that a generative reward model writes, by word. A word that is
            missing has probability 0; the result is NaN where both are.
    """
    first, second = [logprobs.get(word, -math.inf) for word in (yes, no)]
    top = max(first, second)
    if top == -math.inf:
        return math.nan
    first, second = math.exp(first - top), math.exp(second - top)
    return first / (first + second)


def _tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def _boxed(text: str) -> str | None:
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return None


def _hashes(text: str) -> str | None:
    start = text.rfind("####")
    return _line(text, start + 4) if start >= 0 else None


def _announced(text: str) -> str | None:
    last = None
    for match in re.finditer(r"\banswer(?: is|:| =)", text, re.IGNORECASE):
        last = match
    return _line(text, last.end()).lstrip(": ") if last else None


def _line(text: str, start: int) -> str:
    return text[start:].lstrip().split("\n", 1)[0].strip()
