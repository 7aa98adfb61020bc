r"""Answers and verdicts in a response. All of it is searched, however long; the last match counts."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from fractions import Fraction

INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
EXPONENT = r"(?:[eE][-+]?\d{1,3}(?!\w))?"
NUMBER = re.compile(rf"(?<!\w)[-+]?(?:{INTEGER}(?:\.\d+)?|(?<!\.)\.\d+)(?:/\d+|{EXPONENT})", re.ASCII)
JUST_NUMBER = re.compile(rf"([-+]?(?:{INTEGER}(?:\.\d*)?|\.\d+){EXPONENT})(?:/(\d+))?", re.ASCII)
SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3}(?!\d))", re.ASCII)  # 1{,}234 and 1,\!234
POWER = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|\u00d7)\s*10\^(?:\{(-?\d{1,3})\}|(\d)(?!\d))", re.ASCII)
FRACTION = re.compile(
    r"(?:(?<!\w)(\d{1,18})\s*)?\\[dt]?frac(?:\{(-?\d{1,18})\}|(\d))(?:\{(\d{1,18})\}|(\d))", re.ASCII
)
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
AROUND = "$*`\"' \t\n"
MAX_DIGITS = 200  # longer "numbers" are noise, and slow to convert
VERDICT = re.compile(r"\b(?:(yes)|(no))\b|\b([AB])\b", re.IGNORECASE)


def find_answer(text: str) -> str | None:
    r"""Return the marked answer of a response, or None.

    In this order: <answer>..</answer>, \boxed{..}, "#### ..", "the answer is .." / "Answer: ..".
    """
    for find in (find_tagged, _boxed, _hashes, _announced):
        answer = find(text)
        if answer is not None:
            return answer
    return None


def last_number(text: str) -> str | None:
    """Return the last number of the text, as written or in plain digits; None where there is none."""
    last = None
    for match in NUMBER.finditer(plain_numbers(text)):
        last = match.group()
    return last


def to_number(text: str) -> Fraction | None:
    r"""Return the value of "1,234", "3/4", "1.5e3", "$12.00", "50%" (as 50), "7.", "\frac34"; else None."""
    if len(text) > 10 * MAX_DIGITS:
        return None
    plain = unwrapped(plain_numbers(text).replace("\\$", "$")).rstrip("%").removesuffix("\\")
    plain = plain[:1] + plain[1:].removeprefix("$") if plain[:1] in ("-", "+") else plain
    match = JUST_NUMBER.fullmatch(plain) if len(plain) <= MAX_DIGITS else None
    if match is None or (match[2] and int(match[2]) == 0):
        return None
    return Fraction(match[1].replace(",", "")) / int(match[2] or 1)


def plain_numbers(text: str) -> str:
    """Return text with its numbers in plain characters: LaTeX's fractions, powers of ten and separators, and
    the minus sign of Unicode."""
    text = SEPARATOR.sub(",", text.replace("\u2212", "-"))
    text = POWER.sub(lambda match: f"e{match[1] or match[2]}", text)
    return FRACTION.sub(_plain_fraction, text)


def _plain_fraction(match: re.Match) -> str:
    """Return a fraction, or a mixed number, as a/b."""
    above, below = int(match[2] or match[3]), int(match[4] or match[5])
    return f"{int(match[1] or 0) * below + above}/{below}"


def unwrapped(text: str) -> str:
    r"""Return an answer without quotes, asterisks, $..$, \(..\) and white space around it, and its period."""
    for _ in range(3):  # **"Paris."**.
        text = text.strip().strip(AROUND).rstrip(".").removeprefix("\\(").removesuffix("\\)")
    return text.strip(AROUND)


def normalize_words(text: str) -> str:
    r"""Return text without case, extra white space, \text{..}, and what `unwrapped` takes off."""
    plain = unwrapped(" ".join(unicodedata.normalize("NFC", text).split()))
    words = WORDS.fullmatch(plain)
    return unwrapped(words[1] if words else plain).casefold()


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


def find_tagged(text: str) -> str | None:
    """Return the last <answer>..</answer> of a response, or None."""
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
