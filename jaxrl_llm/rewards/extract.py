r"""Answers, numbers and verdicts in a response, however long it is; the last mark that has a value counts.

A mark is <answer>..</answer>, \boxed{..}, "####" and its line, or "the answer is .." / "Answer: ..".
docs/recipes.md compares marks, headings and remarks with other systems.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections import deque
from collections.abc import Iterator, Mapping
from fractions import Fraction

from jaxrl_llm.rewards.numerals import MAX_DIGITS, NUMBER, last_number, plain_numbers, to_number, unwrapped

WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
FONT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit)\{\s*")
CHOICE = re.compile(
    r"\W*(?:(?i:option|choice|answer)\b)?\W*"
    r"(?:\(([A-Za-z])\)|([A-Z])(?=[*_]*(?:[).:}\]]|\s[(\u2013\u2014-]|\s(?:because|since)\b|"
    r",\s+(?!and|or|but)\w\w|\W*$))|([a-z])\W*$)"
)
ANOTHER = re.compile(  # (B) or (C); not B. E. coli
    r"[).\s*_]*(?:[,;/&\n]|\b(?:and|or)\b)[\s*_]*(?:(?:and|or)\s+)?\(?[A-H](?=\W*$|[).,;/]|\s+(?:or|and|&)\s)|"
    r"[\W_]*\([A-Ha-h]\)"
)
ONE_LETTER = re.compile(r"\(?([A-Za-z])\)?\.?")
BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
HASHES = re.compile(r"#{4,}")
ANNOUNCED = re.compile(
    r"\b(?:answer|(?:correct|right|best) (?:option|choice))[*_`]*(?: is\b|:| =)", re.IGNORECASE
)
SAYING = re.compile(r"^\W*(?:the )?(?:(?:final|correct) )?answer(?: is\b|:)[:\s]*(?!not\b)", re.IGNORECASE)
"""In a mark: <answer>The answer is Paris</answer>."""
DENIED = re.compile(r"(?<=\banswer is )not\b[^\n]{1,200}?\bbut (?:rather )?", re.IGNORECASE)
LABEL = re.compile(r"\W*(?:the )?(?:final )?answer\W*$", re.IGNORECASE)
NAMED = re.compile(
    r"\W*(?:the )?(?:final )?(?:answer|solution|conclusion|result)\W*:(.*)", re.IGNORECASE | re.DOTALL
)
HEADING = re.compile(
    r"\W*(?:the )?(?:final )?(?:steps?|part|case|check(?:ing)?|verif\w+|expla\w+|notes?|reason\w*|solution|"
    r"conclu\w+|summary|approach|analy\w+|given|problem|question|calculat\w+|comput\w+|method|understand\w*|"
    r"remarks?|example|thoughts?)\b",
    re.IGNORECASE,
)
NUMBERED = re.compile(r"\d{1,2}[.):]\s+[^\W\d]")
REMARK = re.compile(
    r"\W*(?:obtained|found|given|calculated|computed|derived|determined|reached|verified|checked|confirmed|based|"
    r"not|as follows|below|above|in)\b",
    re.IGNORECASE,
)
CLAUSE = re.compile(r"(?<=[^\s.]{2})\.\s|\s\(|,?\s(?:because|since)\b|,\snot\b|\s[\u2013\u2014]\s|\n")
SAID = re.compile(r"(yes|no|true|false)[,;:!]\s", re.IGNORECASE)  # "Yes, it is": a verdict and its reason
LEAD = re.compile(  # characters and words allowed between a mark and its number
    r"(?:[\s$*_`\"'(\[{:=~\u2248\u20ac\u00a3]|\\[(\[$,;! ]|"
    r"\\(?:boxed|text|textbf|mathrm|mathbf|approx|quad)\b|"
    r"(?:about|around|roughly|nearly|approximately|exactly|just|only|equal to|equals|actually|really|now|"
    r"thus|therefore|hence|then|so|still|indeed|clearly|simply|a total of|usd|rs\.)\b)*",
    re.IGNORECASE,
)
MINUS = re.compile(r"(?:minus|negative)\s+\$?(?=\d)", re.IGNORECASE)
GOES_ON = re.compile(  # the number is part of a sum, a power or a list
    r"(?:[\s$)*]|\\[,;! )\]])*?"
    r"(?:[-+*/x\u00d7\u00b7\u00f7^,&\u2013]|\\times|\\cdot|\\div|%\s*of|or|and|to|times|plus|minus)"
    r"(?:\s|\\[,;! ])*[$({\\*]*[-+]?\d|:\d|\s*\\(?:sqrt|pi)\b|[ixyz\u221a\u03c0](?!\w)"
)
SUM = re.compile(  # the number is part of a sum with units: 6 boxes x 7 apples = 42 apples
    r"[^=(,;.\n]*?(?:[-+*/\u00d7\u00b7\u00f7]|\b(?:x|times|plus|minus)\b|\\times|\\cdot)\s*[$({\\*]*\d[^=\n]*="
)
EQUALS = re.compile(r"=|\\approx|\u2248")
DIGIT = re.compile("[0-9]")
MAX_MARKS = 16  # of a kind that are read, from the last
MAX_REST = 300  # characters after a number that may make it a part of something else
MAX_LINE = 4000  # characters of a line that are read after a mark
VERDICT = re.compile(r"\b(?:(yes)|(no))\b|\b([AB])\b", re.IGNORECASE)


def find_answer(text: str) -> str | None:
    r"""Return the marked answer of a response, or None: the first of `marked_answers` that is not a remark.

    Only announced text can be a remark: <answer>not guilty</answer> is an answer.
    """
    enclosed = (SAYING.sub("", mark) or mark for mark in _enclosed(text))
    announced = (mark for mark in _announced(text) if mark and not REMARK.match(mark))
    return next(itertools.chain(enclosed, announced), None)


def marked_answers(text: str) -> Iterator[str]:
    r"""Yield the marked answers of a response, most important first.

    In this order: <answer>..</answer>, \boxed{..}, "#### ..", "the answer is .." / "Answer: .."; of each kind
    from the last to the first. Empty marks and headings such as "#### Step 2" are skipped.
    """
    yield from _enclosed(text)
    yield from filter(None, _announced(text))


def _enclosed(text: str) -> Iterator[str]:
    for find in (tagged_answers, boxed_answers, hash_answers):
        yield from itertools.islice(filter(None, find(text)), MAX_MARKS)


def marked_numbers(text: str) -> Iterator[Fraction | None]:
    """Yield the number of each mark that has digits, most important first; None for "5:30" and the like."""
    for mark in marked_answers(text):
        number = stated_number(mark)
        if number is not None:
            yield number
        elif DIGIT.search(mark) and not REMARK.match(mark):
            yield to_number(last_number(mark) or "")


def stated_number(text: str) -> Fraction | None:
    """Return the number that a marked answer begins with, or that follows its last equals sign; else None.

    42 of "42 apples for 7 people" and of "6 x 7 = 42 apples"; None of "7 or 8".
    """
    plain = plain_numbers(text)
    number = to_number(text)
    number = _leading_number(plain) if number is None else number
    if number is None and (parts := EQUALS.split(plain))[1:]:
        number = _leading_number(parts[-1])
    return number


def answer_key(text: str) -> Fraction | str:
    """Return a key that equal answers share: the marked answer, else the last number, else the text."""
    marked = find_answer(text)
    number = to_number(last_number(text) or "") if marked is None else stated_number(marked)
    return normalize_words(text if marked is None else marked) if number is None else number


def _leading_number(text: str) -> Fraction | None:
    start = LEAD.match(text).end()
    minus = MINUS.match(text, start)
    match = NUMBER.match(text, minus.end() if minus else start)
    if match is None:
        return None
    rest = text[match.end() : match.end() + MAX_REST]
    if GOES_ON.match(rest) or SUM.match(rest):
        return None
    return to_number(f"-{match.group()}" if minus else match.group())


def normalize_words(text: str) -> str:
    r"""Return text without case, extra white space, \text{..}, and the marks that `unwrapped` removes."""
    plain = unwrapped(" ".join(unicodedata.normalize("NFC", text).replace(",", ", ").split()))
    words = WORDS.fullmatch(plain)
    return unwrapped(words[1] if words else plain).casefold()


def choice_of(text: str) -> str:
    """Return the letter of a choice, "B" of "(B)", "B." and "B) Paris"; "" if the text names none or two."""
    plain = FONT.sub("", unwrapped(text[:MAX_DIGITS]))
    match = CHOICE.match(plain)
    named = match and not ANOTHER.match(plain, match.end())
    return next(filter(None, match.groups())).upper() if named else ""


def is_answer(given: str, answer: str) -> bool:
    """Return whether a marked answer equals the accepted one: by words, by its first clause, or by letter."""
    wanted = normalize_words(answer)
    said = SAID.match(unwrapped(given))
    first = said[1] if said else CLAUSE.split(given, maxsplit=1)[0]
    letter = ONE_LETTER.fullmatch(unwrapped(answer))
    is_choice = letter is not None and letter[1].isupper()  # its clauses may name several
    if wanted == normalize_words(given) or (not is_choice and wanted == normalize_words(first)):
        return True
    return letter is not None and choice_of(given) == letter[1].upper()


def find_verdict(text: str) -> str | None:
    """Return the verdict "Yes", "No", "A" or "B" of a generative reward model, or None.

    Looks in the marked answers first, then takes the last such word. A lone lowercase a or b does not count.
    """
    for part in (*marked_answers(text), text):
        words = [match.group() for match in VERDICT.finditer(part)]
        words = [word for word in words if word not in ("a", "b")]
        if words:
            return words[-1].capitalize()
    return None


def verdict_probability(logprobs: Mapping[str, float], yes: str = "Yes", no: str = "No") -> float:
    """Return the probability of `yes` against `no` in [0, 1].

    A finer reward than the word alone (arXiv 2408.15240).

    Args:
        logprobs: word -> log-prob of the first generated token, nats. A missing word has probability 0; the
            result is NaN if both are missing.
    """
    first, second = [logprobs.get(word, -math.inf) for word in (yes, no)]
    top = max(first, second)
    if top == -math.inf:
        return math.nan
    first, second = math.exp(first - top), math.exp(second - top)
    return first / (first + second)


def tagged_answers(text: str) -> Iterator[str]:
    """Yield the contents of <answer>..</answer> from the last to the first."""
    end = text.rfind("</answer>")
    while end >= 0 and (start := text.rfind("<answer>", 0, end)) >= 0:
        yield text[start + len("<answer>") : end].strip()
        end = text.rfind("</answer>", 0, start)


def boxed_answers(text: str) -> Iterator[str]:
    r"""Yield the contents of \boxed{..} from the last to the first; an unclosed box is skipped."""
    closed: dict[int, int] = {}
    opened: list[tuple[int, bool]] = []  # of each open brace: start of its content, and whether it is a box
    for match in BRACES.finditer(text) if "box" in text else ():
        if match.group()[-1] == "{" and match.group() != "\\{":
            opened.append((match.end(), len(match.group()) > 1))
        elif match.group() == "}" and opened:
            start, is_box = opened.pop()
            closed |= {start: match.start()} if is_box else {}
    yield from (text[start : closed[start]].strip() for start in sorted(closed, reverse=True))


def hash_answers(text: str) -> Iterator[str]:
    """Yield the text after "####" on its line, from the last to the first, without headings."""
    for start in _last_ends(HASHES, text):
        line, below = _line(text, start), text[start:].lstrip().partition("\n")[2].strip()
        if LABEL.match(line):
            yield _line(below, 0)
        elif named := NAMED.match(line):
            yield named[1].strip(" *_")
        elif not (HEADING.match(line) or (below and NUMBERED.match(line))):
            yield line


def without_denials(text: str) -> str:
    """Replace "the answer is not 42 but 43" by "the answer is 43"."""
    return DENIED.sub("", text)


def _announced(text: str) -> Iterator[str]:
    text = without_denials(text)
    for start in _last_ends(ANNOUNCED, text):
        yield _line(text[start:].lstrip(": \n"), 0)


def _last_ends(mark: re.Pattern[str], text: str) -> list[int]:
    """Return the ends of the last marks, the last one first."""
    return [match.end() for match in deque(mark.finditer(text), MAX_MARKS)][::-1]


def _line(text: str, start: int) -> str:
    return text[start:].lstrip().split("\n", 1)[0].strip()[:MAX_LINE]
