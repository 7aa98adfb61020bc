r"""Numbers as people write them, by value: 1,234, 1 234, 2,5, 3 1/2, 10^6, 1.5 million, \frac{1}{2}.

docs/recipes.md says what ambiguous numbers mean. Every step takes time linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MAX_DIGITS = 200  # longer "numbers" are noise, and slow to convert
AROUND = "$\u20ac\u00a3*`\"' \t\n"
INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
EXPONENT = r"(?:[eE][-+]?\d{1,3}(?!\w))?"
NUMBER = re.compile(  # not the 2 of x^2, a_{2} or \sqrt{2}, not the x of 5^x
    r"(?<!\w)(?<!\^)(?<![\^_][-({])(?<!\^[({]-)(?<!sqrt[({])(?<!\u221a)"
    rf"(?>[-+]?(?:{INTEGER}(?:\.\d+)?|(?<!\.)\.\d+)(?:/\d+|{EXPONENT}))(?![)}}]?\^(?!\{{?\\circ))",
    re.ASCII,
)
JUST_NUMBER = re.compile(rf"([-+]?(?:{INTEGER}(?:\.\d*)?|\.\d+){EXPONENT})(?:/(\d+))?", re.ASCII)
DIGITS = str.maketrans(
    {0xFF10 + i: str(i) for i in range(10)}  # full width
    | {"\u2212": "-", "\u2011": "-", "\u2044": "/", "\u2215": "/", "\u2217": "*"}
    | dict.fromkeys("\u00b7\u22c5\u2219\u2a2f\u2715\u2716", "\u00d7")
    | {"\u2010": "-", "\ufe63": "-", "\uff0d": "-", "\uff0b": "+", "\uff0e": ".", "\uff0f": "/"}
)
DASH = re.compile(  # a minus, as in "it is \u20133"; not in 5\u20136
    r"(?<![\w)\]}%])(?<![\d)\]}%] )\u2013(?=[$\\]?[\d.]|\\[dt]?frac|\\?sqrt|[\u221ax\u221e])"
)
RAISED = re.compile("(?<=[0-9])[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
SEPARATOR = re.compile(  # 1{,}234, 1,\!234, 1'234, 1_000, and the narrow spaces of gpt-oss
    r"(?<=\d)(?:\{,\}|,?\\[,!]|\\[;: ]|[~'_\u2019\u00a0\u2007\u2009\u202f])(?=\d{3}(?!\d))", re.ASCII
)
DOTS_AND_COMMAS = re.compile(r"(?<![\w.,([{])\d+(?:[.,]\d+)+", re.ASCII)
DECIMAL_COMMA = re.compile(r"\d{1,3}(?:\.\d{3})+,\d+|0,\d+|[1-9]\d*,(?:\d\d?|\d{4,})")
GROUPED = re.compile(r"\d{1,3}(?:\.\d{3}){2,}|\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?")  # 1.234.567, 1,00,000
SPACED = re.compile(r"(?<![\w.,:/^])(?=(\d+(?: \d+)+))\1(?! ?/)", re.ASCII)
THOUSANDS = re.compile(r"[1-9]\d{0,2}(?: \d{3})+")
_POWER = (
    r"(?: ?\^ ?|\*\*| \*\* )(?:\{\s?([-+]?\d{1,3})\s?\}|\(([-+]?\d{1,3})\)|([-+]?\d{1,3}))"
    r"(?![\w^*]|\.\d| ?\^)"
)
TIMES_TEN = re.compile(rf"(?<=\d)\s*(?:\\times|\\cdot|[\u00d7x*])\s*10{_POWER}", re.ASCII)
POWER = re.compile(rf"(?<![\w.,^*)}}])(\d{{1,18}}(?:\.\d{{1,9}})?){_POWER}", re.ASCII)
FRACTION = re.compile(
    r"(?:(?<!\w)(\d{1,18})\s*)?\\[dt]?frac(?:\{(-?\d{1,18})\}|(\d))(?:\{(\d{1,18})\}|(\d))", re.ASCII
)
MIXED = re.compile(r"(?<![\w./,])(\d{1,18}) (\d{1,9})/(\d{1,9})(?![\w/])", re.ASCII)  # 3 1/2
VULGAR = re.compile(r"(\d ?)?([\u00bc-\u00be\u2150-\u215e])", re.ASCII)
SLASH = re.compile(r"(?<=\d)\s*/\s*(?=\d)")
PARTS = {"half": "1/2", "third": "1/3", "quarter": "1/4"}
AND_A_HALF = re.compile(r"(?<=\d) and (?:a|one)[ -](half|third|quarter)\b", re.IGNORECASE)
SCALES = {
    **{"hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7},
    **{"billion": 10**9, "trillion": 10**12, "k": 10**3, "m": 10**6, "b": 10**9, "bn": 10**9},
}
_WORD = "(hundred|thousand|lakh|million|crore|billion|trillion)s?"
SCALE = re.compile(_WORD, re.IGNORECASE)
SCALED = re.compile(
    rf"({NUMBER.pattern})(?:[ \u00a0~-]?{_WORD}\b|\\?[ ,]?\\(?:text|mathrm)\{{\s?{_WORD}\s?\}})",
    re.ASCII | re.IGNORECASE,
)
PRICE = re.compile(  # $1.5M; $3k$ is a formula
    r"(?<=[$\u20ac\u00a3])(\d[\d,]*(?:\.\d+)?) ?(k|m|bn?)\b(?![^\n$]{0,80}(?<=\S)\$(?!\d))",
    re.ASCII | re.IGNORECASE,
)
OTHER = re.compile(  # times, ratios, dates, versions, 0x1F
    r"(?<![\w.])(?:\d+(?:\.\d+)?(?:(?::| : )\d+)+|\d+([-/.])\d+\1\d+(?:\1\d+)*|0x[\da-f]+)",
    re.ASCII | re.IGNORECASE,
)
OTHER_MARK = "?"  # stands in place of digits that are no number


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
    return _value(plain[:1] + plain[1:].removeprefix("$") if plain[:1] in ("-", "+") else plain)


def _value(plain: str) -> Fraction | None:
    match = JUST_NUMBER.fullmatch(plain) if len(plain) <= MAX_DIGITS else None
    if match is None or (match[2] and int(match[2]) == 0):
        return None
    return Fraction(match[1].replace(",", "")) / int(match[2] or 1)


def plain_numbers(text: str) -> str:
    """Return text with its numbers in plain digits: groups of thousands, decimal commas, fractions, powers,
    millions; a "?" in place of times, ratios and dates."""
    # Characters, separators of thousands and of decimals.
    text = RAISED.sub(_plain_raised, VULGAR.sub(_plain_vulgar, text)).translate(DIGITS)
    text = DASH.sub("-", text)
    text = DOTS_AND_COMMAS.sub(_plain_commas, SEPARATOR.sub(",", text).replace("{,}", ","))
    # Powers and fractions; spaces between thousands come after mixed numbers, 3 1/2.
    text = POWER.sub(_plain_power, TIMES_TEN.sub(_plain_exponent, text))
    text = AND_A_HALF.sub(lambda match: f" {PARTS[match[1].lower()]}", text)
    text = MIXED.sub(_plain_mixed, FRACTION.sub(_plain_fraction, SLASH.sub("/", text)))
    text = SPACED.sub(_plain_spaced, text)
    # Millions; twice, as in "3 hundred million".
    for pattern in (PRICE, SCALED, SCALED) if SCALE.search(text) else (PRICE,):
        text = pattern.sub(_plain_scaled, text)
    return OTHER.sub(OTHER_MARK, text)


def has_decimal_comma(text: str) -> bool:
    """Return whether a number of the text has a comma that may be a decimal one: 2,5."""
    return any(DECIMAL_COMMA.fullmatch(match.group()) for match in DOTS_AND_COMMAS.finditer(text))


def _plain_raised(match: re.Match) -> str:
    return f"^{unicodedata.normalize('NFKC', match.group())}".replace("\u2212", "-")


def _plain_commas(match: re.Match) -> str:
    """Return 2,5 as 2.5, 1.234,5 as 1234.5 and 1,00,000 as 100000; 1,234 and lists are unchanged."""
    number = match.group()
    if DECIMAL_COMMA.fullmatch(number):
        return number.replace(".", "").replace(",", ".")
    if GROUPED.fullmatch(number):
        return number.replace(",", "") if "," in number else number.replace(".", "")
    return number


def _plain_spaced(match: re.Match) -> str:
    return match.group().replace(" ", "") if THOUSANDS.fullmatch(match.group()) else match.group()


def _plain_exponent(match: re.Match) -> str:
    return f"e{match[1] or match[2] or match[3]}"


def _plain_power(match: re.Match) -> str:
    """Return a power as digits or a/b; a very long one is unchanged."""
    base, power = match[1], int(match[2] or match[3] or match[4])
    if len(base) * abs(power) > MAX_DIGITS or not (Fraction(base) or power > 0):
        return match.group()
    return str(Fraction(base) ** power)


def _plain_scaled(match: re.Match) -> str:
    """Return a number and its "million" or "k" in digits."""
    number, word = _value(match[1]), next(filter(None, match.groups()[1:]))
    return match.group() if number is None else str(number * SCALES[word.lower()])


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
