"""Generated tasks: endless, verifiable, learnable by a tiny character-level model in minutes.

A problem is drawn from a random stream that its index seeds. A hash of the problem itself, not of its index,
decides whether it is held out, so that no held-out problem (nor an equivalent one) is ever trained on. Each
problem has a worked demonstration and a wrong one, which always makes the same mistake. `noise` is the share
of wrong demonstrations: a model warmed up on them repeats the mistake that often, and reinforcement learning
has something to improve.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.ranges import Count, Fraction, Range, problems
from jaxrl_llm.user_file import did_you_mean

HELD_OUT_EVERY = 10  # one problem in so many is held out
Digits = Annotated[int, Range(1, 18)]
Terms = Annotated[int, Range(2, 200)]  # a product has fewer digits than Python prints


@dataclass(frozen=True)
class TaskProblem:
    """One problem of a task."""

    key: str  # equal for problems that are the same in another guise: 1+2 and 2+1
    prompt: str
    answer: Any
    response: str  # demonstration
    mistake: str  # wrong demonstration
    steps: tuple[tuple[str, float], ...] = ()  # a worked solution, right or not: text, 1 = right so far
    columns: dict[str, Any] = field(default_factory=dict)
    turns: tuple[tuple[dict, ...], ...] = ()  # demonstration and mistake, if they take several turns


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options that every task has."""

    noise: Fraction = 0.0
    """Share of wrong demonstrations; of pairs the wrong way round."""
    size: Count = 1_000_000
    """Problems of an epoch."""


@dataclass(frozen=True)
class ArithmeticOptions(TaskOptions):
    """Options of task:arithmetic and, with other mistakes, of task:preference."""

    digits: Digits = 2  # of the largest operand
    operators: str = "+"  # of + - *
    terms: Terms = 2

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        yield from _operator_problems(self.operators, at_least=1)


@dataclass(frozen=True)
class CountdownOptions(TaskOptions):
    """Options of task:countdown."""

    numbers: Annotated[int, Range(2, 100)] = 3
    largest: Annotated[int, Range(3, 10**9)] = 9
    operators: str = "+-*"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        yield from _operator_problems(self.operators, at_least=2)


@dataclass(frozen=True)
class MaximumOptions(TaskOptions):
    """Options of task:maximum."""

    count: Annotated[int, Range(2, 1000)] = 3
    digits: Digits = 2

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        if self.count > 10**self.digits:
            yield "count", f"is {self.count}: it must be at most 10 ** digits, or numbers repeat."


@dataclass(frozen=True)
class ReverseOptions(TaskOptions):
    """Options of task:reverse."""

    length: Annotated[int, Range(2, 10_000)] = 4  # of the longest word
    letters: str = "abcdefgh"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        if len(set(self.letters)) < 2 or not self.letters.isprintable():
            yield "letters", f"is {self.letters!r}: it must be two or more different letters."


@dataclass(frozen=True)
class StepsOptions(TaskOptions):
    """Options of task:steps."""

    terms: Terms = 4
    largest: Annotated[int, Range(1, 10**18)] = 9


@dataclass(frozen=True)
class CalculateOptions(TaskOptions):
    """Options of task:calculate, whose wrong demonstrations give up."""

    digits: Digits = 3  # of both operands
    operators: str = "*"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        yield from _operator_problems(self.operators, at_least=1)


@dataclass(frozen=True)
class GuessOptions(TaskOptions):
    """Options of task:guess, whose wrong demonstrations guess at random."""

    largest: Annotated[int, Range(2, 1000)] = 15


def draw_arithmetic(rng: random.Random, options: ArithmeticOptions) -> TaskProblem:
    """Draw "12+34=" -> "46". The mistake: one too large."""
    operands = [rng.randrange(10**options.digits) for _ in range(options.terms)]
    signs = [rng.choice(options.operators) for _ in operands[1:]]
    value = evaluate_expression(operands, signs)
    commutes = set(signs) in ({"+"}, {"*"})
    return TaskProblem(
        key=format_expression(sorted(operands) if commutes else operands, signs),
        prompt=format_expression(operands, signs) + "=",
        answer=str(value),
        response=str(value),
        mistake=str(value + 1),
    )


def draw_countdown(rng: random.Random, options: CountdownOptions) -> TaskProblem:
    """Draw "3,5,2>13:" -> "3*5-2": each number once, usual precedence. The mistake: a wrong operator."""
    mistakes: list[str] = []
    while not mistakes:  # few draws have no other target within reach of one operator, such as 2*2
        operands = [rng.randint(1, options.largest) for _ in range(options.numbers)]
        signs = [rng.choice(options.operators) for _ in operands[1:]]
        target = evaluate_expression(operands, signs)
        others = [[sign, *signs[1:]] for sign in options.operators]
        mistakes = [
            format_expression(operands, s) for s in others if evaluate_expression(operands, s) != target
        ]
    shown = rng.sample(operands, len(operands))
    return TaskProblem(
        key=f"{sorted(operands)}{target}",
        prompt=f"{','.join(map(str, shown))}>{target}:",
        answer=str(target),
        response=format_expression(operands, signs),
        mistake=mistakes[0],
        columns={"numbers": shown, "target": target},
    )


def draw_maximum(rng: random.Random, options: MaximumOptions) -> TaskProblem:
    """Draw "37,52,18>" -> "52". The mistake: the smallest."""
    numbers = rng.sample(range(10**options.digits), options.count)
    return TaskProblem(
        key=str(sorted(numbers)),
        prompt=",".join(map(str, numbers)) + ">",
        answer=str(max(numbers)),
        response=str(max(numbers)),
        mistake=str(min(numbers)),
    )


def draw_reverse(rng: random.Random, options: ReverseOptions) -> TaskProblem:
    """Draw "abcd>" -> "dcba". The mistake: the word as it is."""
    word = ""
    while word == word[::-1]:
        word = "".join(rng.choices(options.letters, k=rng.randint(2, options.length)))
    return TaskProblem(word, f"{word}>", word[::-1], word[::-1], mistake=word)


def draw_preference(rng: random.Random, options: ArithmeticOptions) -> TaskProblem:
    """Draw arithmetic. The mistake: a random other number of about the same size."""
    right = draw_arithmetic(rng, options)
    value, shift = int(right.answer), 0
    reach = rng.choice([3, 10, 10**options.digits])  # near misses and far ones
    while shift == 0:
        shift = rng.randint(-reach, reach)
    return dataclasses.replace(right, mistake=str(value + shift))


def draw_steps(rng: random.Random, options: StepsOptions) -> TaskProblem:
    """Draw "3+5+2=" -> "8\\n10", the partial sums, one per line. The mistake: wrong from a random step on.

    `steps` are the right solution or the mistake, equally often.
    """
    operands = [rng.randint(1, options.largest) for _ in range(options.terms)]
    sums = list(itertools.accumulate(operands))[1:]
    at = rng.randrange(len(sums))
    slip = rng.choice([-1, 1, 2])
    wrong = [value + slip * (i >= at) for i, value in enumerate(sums)]
    shown = wrong if rng.random() < 0.5 else sums
    texts = [f"{value}\n" for value in shown[:-1]] + [str(shown[-1])]
    labels = [float(value == s) for value, s in zip(shown, sums, strict=True)]
    return TaskProblem(
        key=str(operands),
        prompt=format_expression(operands, ["+"] * len(sums)) + "=",
        answer=str(sums[-1]),
        response="\n".join(map(str, sums)),
        mistake="\n".join(map(str, wrong)),
        steps=tuple(zip(texts, labels, strict=True)),
    )


def draw_calculate(rng: random.Random, options: CalculateOptions) -> TaskProblem:
    """Draw "317*442=" -> a call of the tool calculator, then its result. The mistake: no call, "?"."""
    operands = [rng.randrange(10 ** (options.digits - 1), 10**options.digits) for _ in range(2)]
    signs = [rng.choice(options.operators)]
    expression, value = format_expression(operands, signs), str(evaluate_expression(operands, signs))
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    demonstration = [("assistant", f"<tool_call>{call}</tool_call>"), ("tool", value), ("assistant", value)]
    turns = _as_messages(demonstration), _as_messages([("assistant", "?")])
    return TaskProblem(expression, f"{expression}=", value, value, mistake="?", turns=turns)


def draw_guess(rng: random.Random, options: GuessOptions) -> TaskProblem:
    """Draw "1-15" -> a game that finds the number by its replies. The mistake: guesses at random.

    The answer is drawn too. Held-out games use the same numbers, so no game is equivalent to another.
    """
    number = rng.randint(1, options.largest)

    def game(uses_replies: bool) -> tuple[dict, ...]:
        low, high, turns = 1, options.largest, []
        while not turns or turns[-1][1] != str(number):
            guess = rng.randint(low, high)
            turns.append(("assistant", str(guess)))
            if guess != number:
                turns.append(("user", "higher" if guess < number else "lower"))
            if uses_replies:
                low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        return _as_messages(turns)

    right, wrong = game(True), game(False)
    answer = str(number)
    return TaskProblem(
        str(rng.random()), f"1-{options.largest}", answer, answer, mistake=answer, turns=(right, wrong)
    )


TASKS: dict[str, tuple[Callable[[random.Random, Any], TaskProblem], type]] = {
    "arithmetic": (draw_arithmetic, ArithmeticOptions),
    "countdown": (draw_countdown, CountdownOptions),
    "maximum": (draw_maximum, MaximumOptions),
    "reverse": (draw_reverse, ReverseOptions),
    "preference": (draw_preference, ArithmeticOptions),
    "steps": (draw_steps, StepsOptions),
    "calculate": (draw_calculate, CalculateOptions),
    "guess": (draw_guess, GuessOptions),
}


def is_held_out(key: str) -> bool:
    """Return whether a problem belongs to the held-out tenth."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_EVERY == 0


def parse_options(options_class: type, given: dict[str, Any], where: str) -> Any:
    """Return the options of a task. Raises UserError naming an unknown key, a wrong type or value."""
    known = {f.name: f.default for f in dataclasses.fields(options_class)}
    for key, value in given.items():
        if key not in known:
            near = did_you_mean(key, known)
            raise UserError(f"{where} has no option {key!r}.{near} Its options: {', '.join(known)}")
        allowed = (int, float) if isinstance(known[key], float) else type(known[key])
        if not isinstance(value, allowed) or isinstance(value, bool):
            raise UserError(f"{where}: option {key} must be {type(known[key]).__name__}, got {value!r:.100}")
    options = options_class(**given)
    for key, problem in problems(options):
        raise UserError(f"{where}: option {key} {problem}")
    return options


def evaluate_expression(operands: list[int], signs: list[str]) -> int:
    """Return the value of operands joined by + - *, with the usual precedence."""
    total, product = 0, operands[0]
    for sign, operand in zip(signs, operands[1:], strict=True):
        if sign == "*":
            product *= operand
            continue
        total, product = total + product, operand if sign == "+" else -operand
    return total + product


def format_expression(operands: list[int], signs: list[str]) -> str:
    """Return "3*5-2" for [3, 5, 2] and ["*", "-"]."""
    return str(operands[0]) + "".join(f"{s}{n}" for s, n in zip(signs, operands[1:], strict=True))


def _operator_problems(operators: str, at_least: int) -> Iterator[tuple[str, str]]:
    if not set(operators) <= set("+-*") or len(set(operators)) < at_least:
        yield "operators", f"is {operators!r}: it must be {at_least} or more of + - *."


def _as_messages(turns: list[tuple[str, str]]) -> tuple[dict, ...]:
    return tuple({"role": role, "content": content} for role, content in turns)
