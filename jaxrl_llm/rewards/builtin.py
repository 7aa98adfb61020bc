"""The built-in rewards: REWARDS, from name to function.

Each takes a RewardSample (two of them also the RewardConfig) and returns a score, or score and outcome. They
raise UserError for a bad row, never for a response.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.countdown import countdown_task, evaluate_countdown, find_expression
from jaxrl_llm.rewards.extract import (
    boxed_answers,
    find_answer,
    find_verdict,
    hash_answers,
    is_answer,
    marked_answers,
    marked_numbers,
    stated_number,
    tagged_answers,
    without_denials,
)
from jaxrl_llm.rewards.gold import accepted_answers, gold_number, gold_text, is_worked
from jaxrl_llm.rewards.numerals import (
    DASH,
    NUMBER,
    has_decimal_comma,
    last_number,
    plain_numbers,
    to_number,
    unwrapped,
)
from jaxrl_llm.rewards.sample import RewardSample

FORMAT = re.compile(r"\s*(<think>)?.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
PLACES = 6  # decimals to which math-verify compares numbers
MAX_PLACES = 20_000
DIGITS = 4  # significant ones after the first, to which smaller numbers are compared
IN_WORDS = re.compile(  # after a number: words, and nothing of a formula or of a larger unit
    r"(?![^\n]*[\\^_={}])[\s.,;:?)*\"'$]*"
    r"(?:$|\((?=[^()]*[A-Za-z]{3})|(?!(?:pi|sqrt|(?:arc)?(?:sin|cos|tan)h?|log|exp|alpha|beta|theta|times|over|out|to|"
    r"and|or|hundred|thousand|million|billion)\b)[A-Za-z]{3,}|(?:[ckm]m|kg|ml|ft|hr)\b)"
)
PERCENT = re.compile(
    r"(.*\d)\s*(?:\\?%|\\text\{\s*\\?%\s*\}|(?:\\text\{\s*)?percent\}?)", re.IGNORECASE | re.DOTALL
)
FORMULA = re.compile(  # no words; "5 m" and "5 m/s^2" have units
    r"(?=[^\n]*\d)(?!\(?[A-E][).:]\s)"
    r"(?![-+\d.,]+[\s(\[]*[cdfghjklmostuvwA-Z](?=((?:[\s/*()\[\]]|\\cdot|\^\{?-?\d\}?|[a-zA-Z]{1,2}(?![a-zA-Z]))*))\1\W*$)"
    r"(?=((?:(?:and|or|pi|sqrt|log|ln|sin|cos|tan|exp)(?![A-Za-z])|\\[A-Za-z]++|[A-Za-z](?![A-Za-z])|"
    r"[-\d\s+*/^_=<>()\[\]{}.,|:!\u2264\u2265\u00d7\u03c0])+))\2",
    re.ASCII,
)
PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])|\u03c0")
SYMBOLS = str.maketrans(
    {"\u221e": r"\infty ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u00b7": r"\cdot "}
    | {"\u22c5": r"\cdot ", "\u2219": r"\cdot ", "\u2212": "-", "\u2217": "*", "\u2215": "/"}
)
RAISED_SIGNS = re.compile("(?<=[\\w)\\]}])[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207f]+")
ROOT = re.compile(r"\u221a\s?(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")


def exact_reward(sample: RewardSample) -> tuple[float, Outcome]:
    """Return 1.0 if the marked answer is an accepted one; numbers are compared by value, choices by letter.

    Without a mark, the last number counts if the answer is a number; otherwise the whole response must equal
    the answer.
    """
    accepted, response = [gold_text(text) for text in accepted_answers(sample.answer)], sample.final
    numbers = {to_number(answer) for answer in accepted} - {None}
    marked = find_answer(response)
    if marked is not None:
        stated = map(stated_number, marked_answers(response) if numbers else ())
        given = next((number for number in stated if number is not None), None)
        return binary(given in numbers or any(is_answer(marked, answer) for answer in accepted))
    texts = [*itertools.islice(marked_answers(response), 1), response.strip()]  # "the answer is not guilty"
    if any(text and same_answer(text, answer) for text in texts for answer in accepted):
        return binary(True)
    number = last_number(response)
    return binary(to_number(number) in numbers) if number and numbers else (0.0, Outcome.UNPARSED)


def number_reward(sample: RewardSample) -> tuple[float, Outcome]:
    """Return 1.0 if the marked answer, or else the last number of the response, has the answer's value.

    For generated arithmetic, and GSM8K, whose answer column ends in "#### 42".
    """
    accepted, response = [gold_number(text) for text in accepted_answers(sample.answer)], sample.final
    numbers = list(itertools.islice(marked_numbers(response), 1))
    if not numbers and not any(itertools.chain(tagged_answers(response), boxed_answers(response))):
        numbers = [to_number(last_number(response) or "")]  # a tag or a box says that no other is the answer
    value = next(iter(numbers), None)
    return (0.0, Outcome.UNPARSED) if value is None else binary(value in accepted)


def math_reward(sample: RewardSample, config: RewardConfig) -> tuple[float, Outcome]:
    """Return 1.0 if the response's answer equals an accepted one as mathematics, by math-verify.

    It reads LaTeX, fractions, sets, intervals and equations. It stops itself by signal.alarm, well before
    `config.timeout`, so it must run in the main thread of its process; a comparison that takes longer counts
    as not equal.
    """
    from math_verify import parse  # heavy: only in the workers that need it

    accepted = [gold for text in accepted_answers(sample.answer) if (gold := _gold(text))]
    if not accepted:
        raise UserError(
            f"math-verify cannot read the row's answer {str(sample.answer)[:80]!r}: it must be a bare answer "
            'or a solution that marks it (\\boxed{..} or "#### ..")'
        )
    given, golds = find_answer(sample.final) or sample.final, map(gold_text, accepted_answers(sample.answer))
    if given and any(_same_text(given, gold) for gold in golds):
        return 1.0, Outcome.CORRECT  # 3 hours 20 minutes
    most, end = config.timeout / (len(accepted) + 2), time.monotonic() + config.timeout
    seconds = lambda: max(int(min(most, end - time.monotonic() - 1)), 1)  # of one step
    parsed = False
    for text in _math_readings(without_denials(sample.final)):
        given = parse(_symbols(text), parsing_timeout=seconds())
        parsed |= bool(given)
        if given and any(_same_math(gold, given, seconds) for gold in accepted):
            return 1.0, Outcome.CORRECT
    return 0.0, Outcome.WRONG if parsed else Outcome.UNPARSED


def _same_text(given: str, gold: str) -> bool:
    """Return whether two answers are the same text, or the same number and one is in percent."""
    if _plain_text(given) == _plain_text(gold):
        return True
    percents = [PERCENT.fullmatch(unwrapped(text)) for text in (given, gold)]
    texts = [match[1] if match else text for text, match in zip((given, gold), percents, strict=True)]
    values = list(map(to_number, texts))
    return any(percents) and None not in values and values[0] == values[1]


def _plain_text(text: str) -> str:
    return unwrapped(" ".join(text.split())).casefold()


def _math_readings(response: str) -> Iterator[str]:
    r"""Yield texts, any of which may be the answer: the last tag, else the last box, else the response.

    Of several boxes math-verify makes a set, which "\boxed{1} and \boxed{2}" may mean. Of "#### 42 apples
    for 7 people" it takes the 7, so a number with words after it is read here.
    """
    tagged = list(filter(None, tagged_answers(response)))
    boxes = list(itertools.islice(filter(None, boxed_answers(response)), 2))
    if tagged:
        yield _bare_number(tagged[0]) or _latex(tagged[0])
        return
    bare, is_only = _bare_number(boxes[0]) if boxes else "", response.count("boxed{") == 1
    if boxes and (bare or not is_only):
        yield bare or f"\\boxed{{{boxes[0]}}}"
    if bare and is_only:
        return
    line = "" if boxes else next(filter(None, hash_answers(response)), "")
    marked = "" if boxes else find_answer(response) or ""
    yield _bare_number(marked.rstrip("!")) or (_latex(line) if line else _formula(marked) or response)


def _formula(marked: str) -> str:
    """Return a marked answer that is a formula, as LaTeX, or "".

    Without LaTeX's marks math-verify reads only the 5 of "the answer is 5x".
    """
    plain = unwrapped(_symbols(marked.partition(". ")[0]))
    return _latex(PI.sub(r"\\pi ", plain)) if FORMULA.fullmatch(plain) else ""


def _bare_number(text: str) -> str:
    """Return the number of a marked answer that is a number with words after it, or ""."""
    number, plain = stated_number(text), plain_numbers(text)
    first = NUMBER.search(plain)
    if number is None or first is None or not IN_WORDS.match(plain, first.end()) or has_decimal_comma(text):
        return ""  # math-verify makes a set of 2,5
    digits, _, power = first.group().replace(",", "").lower().partition("e")
    digits = f"-{digits}" if number < 0 and digits[0] != "-" else digits  # minus 3
    return f"${digits}\\times 10^{{{power}}}$" if power else f"${digits}$"


def _same_math(gold: Sequence[Any], given: Sequence[Any], seconds: Callable[[], int]) -> bool:
    """Return whether two parsed answers are equal; small numbers are compared by significant digits.

    math-verify rounds to decimals, so that all numbers below 1e-6 would be equal.
    """
    from math_verify import verify

    if not verify(list(gold), list(given), timeout_seconds=seconds()):
        return False
    places = _places([*gold, *given], seconds())
    return places <= PLACES or verify(
        list(gold),
        list(given),
        timeout_seconds=seconds(),
        float_rounding=places,
        numeric_precision=places + 10,
    )


def _places(values: Sequence[Any], seconds: int) -> int:
    """Return the decimals that show the smallest number of parsed answers, at least PLACES."""
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout
    from sympy import Basic, MatrixBase

    def smallest() -> int:
        places, rest = PLACES, list(values)
        while rest:
            value = rest.pop()
            if isinstance(value, MatrixBase):
                rest += value.flat()
            elif isinstance(value, Basic) and not value.is_number:
                rest += value.args
            elif isinstance(value, Basic) and (size := abs(value.evalf(5))).is_Float and size:
                _, _, power, bits = size._mpf_
                places = max(places, DIGITS - math.floor((power + bits - 1) * math.log10(2)))
        return min(places, MAX_PLACES)

    try:
        return timeout(timeout_seconds=seconds)(smallest)()
    except (Exception, TimeoutException):  # third-party arithmetic on arbitrary numbers
        return PLACES


def countdown_reward(sample: RewardSample) -> tuple[float, Outcome]:
    """Return 1.0 if the expression uses exactly the given numbers and makes the target.

    Numbers and target are the row's columns `numbers` (or `nums`) and `target`, or keys of a dict answer.
    """
    numbers, target = countdown_task(sample)
    expression = find_expression(sample.final)
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
    """Return reasoning-gym's score in [0, 1] of the marked answer, else of the whole response.

    The row's columns must be the task's entry: question, answer, metadata with source_dataset. A scorer that
    raises on the policy's text (some do on non-numeric answers) scores 0, unparsed.
    """
    metadata = sample.columns.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise UserError('gym needs the column metadata with "source_dataset", as reasoning-gym makes it')
    scorer = _gym_scorer(metadata["source_dataset"])
    response = sample.final.strip()
    marked = find_answer(response)
    if not (given := response if marked is None else marked):
        return 0.0, Outcome.UNPARSED
    question = sample.messages[-1]["content"] if sample.messages else sample.prompt
    entry: dict[str, Any] = {"question": question, "answer": sample.answer, **sample.columns}
    try:
        score = float(scorer(answer=given, entry=entry))
        if score < 1.0:  # some compare with tuples, which files hold as lists
            score = max(score, float(scorer(answer=given, entry={**entry, "metadata": _tuples(metadata)})))
    except Exception:  # third-party scorers, called with arbitrary text
        return 0.0, Outcome.UNPARSED
    if score >= 1.0:
        return score, Outcome.CORRECT
    return score, Outcome.UNPARSED if marked is None else Outcome.WRONG


def verdict_reward(sample: RewardSample) -> tuple[float, Outcome]:
    """Return 1.0 if the verdict equals the row's, to train a generative reward model.

    data/preference.py writes the prompts.
    """
    verdict = find_verdict(sample.final)
    if verdict is None:
        return 0.0, Outcome.UNPARSED
    return binary(verdict in accepted_answers(sample.answer))


def format_reward(sample: RewardSample) -> float:
    """Return 1.0 if the response is <think>..</think> then <answer>..</answer>, each once, nothing else.

    DeepSeek-R1, arXiv:2501.12948, section 2.2.2. The first <think> may be in the prompt, if the chat template
    writes it there.
    """
    text, tags = sample.text or sample.response, ("</think>", "<answer>", "</answer>")
    match = FORMAT.fullmatch(text) if all(text.count(tag) == 1 for tag in tags) else None
    if match is None or text.count("<think>") != bool(match[1]):
        return 0.0
    return float(sample.opens_thought is None or sample.opens_thought != bool(match[1]))


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


def same_answer(given: str, answer: str) -> bool:
    """Return whether two answers are equal, as numbers if both are numbers, else as words."""
    left, right = to_number(given), to_number(answer)
    return left == right if None not in (left, right) else is_answer(given, answer)


def binary(correct: bool) -> tuple[float, Outcome]:
    """Return score and outcome of a response that is right or wrong."""
    return (1.0, Outcome.CORRECT) if correct else (0.0, Outcome.WRONG)


@functools.lru_cache(maxsize=256)
def _gold(text: str) -> tuple[Any, ...]:
    """Parse an accepted answer, once for its group; it is read as LaTeX unless it has a mark."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    bare = gold_text(text)
    number = _bare_number(bare) if len(NUMBER.findall(plain_numbers(bare))) == 1 else ""
    return () if is_worked(bare) else tuple(parse(number or _symbols(_latex(bare))))


def _latex(text: str) -> str:
    """Return an answer for `math_verify.parse`, which reads LaTeX between marks."""
    return text if any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[")) else f"${text.strip()}$"


def _symbols(text: str) -> str:
    r"""Return text with LaTeX in place of mathematical characters: math-verify reads 2\u221a3 as 2."""
    text = ROOT.sub(lambda match: rf"\sqrt{{{next(filter(None, match.groups()), '')}}}", text)
    raised = lambda match: f"^{{{unicodedata.normalize('NFKC', match.group())}}}"
    return DASH.sub("-", RAISED_SIGNS.sub(raised, text)).translate(SYMBOLS)


def _tuples(value: Any) -> Any:
    """Convert lists in a value to tuples, at any depth."""
    if isinstance(value, dict):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=256)
def _gym_scorer(task: str) -> Callable[..., Any]:
    import reasoning_gym  # heavy: only in the workers that need it

    return reasoning_gym.get_score_answer_fn(task)
