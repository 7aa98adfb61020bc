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

INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
EXPONENT = r"(?:[eE][-+]?\d{1,3}(?!\w))?"
NUMBER = re.compile(rf"(?<!\w)[-+]?(?:{INTEGER}(?:\.\d+)?|(?<!\.)\.\d+)(?:/\d+|{EXPONENT})", re.ASCII)
JUST_NUMBER = re.compile(rf"([-+]?(?:{INTEGER}(?:\.\d*)?|\.\d+){EXPONENT})(?:/(\d+))?", re.ASCII)
SEPARATOR = re.compile(  # 1{,}234, 1,\!234, and the narrow spaces of gpt-oss
    r"(?<=\d)(?:\{,\}|,?\\[,!]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", re.ASCII
)
POWER = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|\u00d7)\s*10\^(?:\{(-?\d{1,3})\}|(\d)(?!\d))", re.ASCII)
FRACTION = re.compile(
    r"(?:(?<!\w)(\d{1,18})\s*)?\\[dt]?frac(?:\{(-?\d{1,18})\}|(\d))(?:\{(\d{1,18})\}|(\d))", re.ASCII
)
MIXED = re.compile(r"(?<![\w./,])(\d{1,18}) (\d{1,9})/(\d{1,9})(?![\w/])", re.ASCII)  # 3 1/2
VULGAR = re.compile(r"(\d ?)?([\u00bc-\u00be\u2150-\u215e])", re.ASCII)
SLASH = re.compile(r"(?<=\d)\s*[/\u2044]\s*(?=\d)")
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
FONT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit)\{\s*")
CHOICE = re.compile(
    r"\W*(?:(?i:option|choice|answer)\b)?\W*"
    r"(?:\(([A-Za-z])\)|([A-Z])(?=[).:}\]]|\s[(\u2013\u2014-]|\s(?:because|since)\b|,\s+(?!and|or|but)\w\w|\W*$)|"
    r"([a-z])\W*$)"
)
ONE_LETTER = re.compile(r"\(?([A-Za-z])\)?\.?")
BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
HASHES = re.compile(r"#{4,}")
ANNOUNCED = re.compile(
    r"\b(?:answer|(?:correct|right|best) (?:option|choice))[*_`]*(?: is\b|:| =)", re.IGNORECASE
)
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
    r"(?:about|approximately|exactly|just|only|equal to|equals|actually|really|now|thus|therefore|hence|then|"
    r"so|still|indeed|clearly|simply|a total of|usd|rs\.)\b)*",
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
AROUND = "$*`\"' \t\n"
MAX_DIGITS = 200  # longer "numbers" are noise, and slow to convert
MAX_MARKS = 16  # of a kind that are read, from the last
MAX_REST = 300  # characters after a number that may make it a part of something else
MAX_LINE = 4000  # characters of a line that are read after a mark
VERDICT = re.compile(r"\b(?:(yes)|(no))\b|\b([AB])\b", re.IGNORECASE)


def find_answer(text: str) -> str | None:
    r"""Return the marked answer of a response, or None: the first of `marked_answers` that is not a remark.

    Only announced text can be a remark: <answer>not guilty</answer> is an answer.
    """
    announced = (mark for mark in _announced(text) if mark and not REMARK.match(mark))
    return next(itertools.chain(_enclosed(text), announced), None)


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


def find_number(text: str) -> Fraction | None:
    """Return the number of the first mark that has one, or None."""
    numbers = (_number_in(mark) for mark in marked_answers(text))
    return next((number for number in numbers if number is not None), None)


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


def _number_in(mark: str) -> Fraction | None:
    """Return the number of a marked answer: the stated number, else (except in a remark) the last."""
    number = stated_number(mark)
    return number if number is not None or REMARK.match(mark) else to_number(last_number(mark) or "")


def last_number(text: str) -> str | None:
    """Return the last number of the text, as written or in plain digits, or None."""
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
    the minus sign and hyphen of Unicode."""
    text = SEPARATOR.sub(",", text.replace("\u2212", "-").replace("\u2011", "-"))
    text = SLASH.sub("/", VULGAR.sub(_plain_vulgar, text))
    text = POWER.sub(lambda match: f"e{match[1] or match[2]}", text)
    return MIXED.sub(_plain_mixed, FRACTION.sub(_plain_fraction, text))


def _plain_vulgar(match: re.Match) -> str:
    """Return a digit and a fraction of one character with a space between them."""
    return (f"{match[1].strip()} " if match[1] else "") + unicodedata.normalize("NFKC", match[2])


def _plain_mixed(match: re.Match) -> str:
    """Return a mixed number as a/b; other pairs of numbers are unchanged."""
    whole, above, below = map(int, match.groups())
    return f"{whole * below + above}/{below}" if 0 < above < below else match.group()


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
    r"""Return text without case, extra white space, \text{..}, and the marks that `unwrapped` removes."""
    plain = unwrapped(" ".join(unicodedata.normalize("NFC", text).replace(",", ", ").split()))
    words = WORDS.fullmatch(plain)
    return unwrapped(words[1] if words else plain).casefold()


def choice_of(text: str) -> str:
    """Return the letter of a choice, "B" of "(B)", "B." and "B) Paris"; "" if the text names none."""
    match = CHOICE.match(FONT.sub("", unwrapped(text[:MAX_DIGITS])))
    return next(filter(None, match.groups())).upper() if match else ""


def is_answer(given: str, answer: str) -> bool:
    """Return whether a marked answer equals the accepted one: by words, by its first clause, or by letter."""
    wanted = normalize_words(answer)
    said = SAID.match(unwrapped(given))
    first = said[1] if said else CLAUSE.split(given, maxsplit=1)[0]
    if wanted in (normalize_words(given), normalize_words(first)):
        return True
    letter = ONE_LETTER.fullmatch(unwrapped(answer))
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
