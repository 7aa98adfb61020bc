r"""Finds the answer in a response. The whole response is searched, however long; the last match counts."""

from __future__ import annotations

import re
from fractions import Fraction

WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
NUMBER = re.compile(rf"(?<!\w)[-+]?(?:{WHOLE}(?:\.\d+)?|(?<!\.)\.\d+)(?:/\d+)?", re.ASCII)
JUST_NUMBER = re.compile(rf"([-+]?(?:{WHOLE}(?:\.\d*)?|\.\d+))(?:/(\d+))?", re.ASCII)
MAX_DIGITS = 200  # longer "numbers" are noise, and slow to convert


def find_answer(text: str) -> str | None:
    r"""What the response marks as its answer, or None.

    In this order: <answer>..</answer>, \boxed{..}, "#### ..", "the answer is .." / "Answer: ..".
    """
    for find in (_tagged, _boxed, _hashes, _announced):
        found = find(text)
        if found is not None:
            return found
    return None


def last_number(text: str) -> str | None:
    """The last number of the text, as written."""
    last = None
    for match in NUMBER.finditer(text):
        last = match.group()
    return last


def to_number(text: str) -> Fraction | None:
    """Value of "1,234", "-0.5", "3/4", "$12.00", "50%" (as 50), "7."; None if it is not just a number."""
    plain = text.strip().strip("$*").strip().rstrip(".%").removesuffix("\\")
    match = JUST_NUMBER.fullmatch(plain) if len(plain) <= MAX_DIGITS else None
    if match is None or (match[2] and int(match[2]) == 0):
        return None
    return Fraction(match[1].replace(",", "")) / int(match[2] or 1)


def normalize(text: str) -> str:
    """For comparing words: case, white space, a final period and surrounding quotes do not matter."""
    return " ".join(text.casefold().split()).rstrip(".").strip("\"'` ")


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
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place].strip()
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
