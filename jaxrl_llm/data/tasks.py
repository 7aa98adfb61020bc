"""Generated tasks: endless, verifiable, learnable by a tiny character-level model in minutes.

A problem is drawn from a random stream that its index seeds. A hash of the problem itself, not of its
index, says whether it is held out, so that no held-out problem is ever trained on, in any guise.

Each problem has a worked demonstration and a wrong one that makes the same mistake each time. `noise` is
the share of wrong demonstrations: a model warmed up on them repeats the mistake that often, and
reinforcement learning has something to lift.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.data import turn_tasks
from jaxrl_llm.data.problem import Problem, check, compute, join
from jaxrl_llm.errors import UserError

HELD_OUT = 10  # one problem in so many


@dataclass(frozen=True)
class Arithmetic:
    """Settings of task:arithmetic."""

    digits: int = 2  # of the largest operand
    operators: str = "+"  # of + - *
    terms: int = 2
    noise: float = 0.0  # share of wrong demonstrations, 0 to 1
    size: int = 1_000_000  # problems of an epoch


@dataclass(frozen=True)
class Countdown:
    """Settings of task:countdown."""

    numbers: int = 3
    largest: int = 9
    operators: str = "+-*"
    noise: float = 0.0
    size: int = 1_000_000


@dataclass(frozen=True)
class Maximum:
    """Settings of task:maximum."""

    count: int = 3
    digits: int = 2
    noise: float = 0.0
    size: int = 1_000_000


@dataclass(frozen=True)
class Reverse:
    """Settings of task:reverse."""

    length: int = 4  # of the longest word
    letters: str = "abcdefgh"
    noise: float = 0.0
    size: int = 1_000_000


@dataclass(frozen=True)
class Preference:
    """Settings of task:preference."""

    digits: int = 2
    operators: str = "+"
    terms: int = 2
    noise: float = 0.0  # share of pairs the wrong way round
    size: int = 1_000_000


@dataclass(frozen=True)
class Steps:
    """Settings of task:steps."""

    terms: int = 4
    largest: int = 9
    noise: float = 0.0
    size: int = 1_000_000


def arithmetic(rng: random.Random, options: Arithmetic) -> Problem:
    """ "12+34=" -> "46". The mistake: one too many."""
    check(set(options.operators) <= set("+-*") and options.operators, "operators must be of + - *")
    check(options.terms >= 2 and options.digits >= 1, "terms must be at least 2 and digits at least 1")
    operands = [rng.randrange(10**options.digits) for _ in range(options.terms)]
    signs = [rng.choice(options.operators) for _ in operands[1:]]
    value = compute(operands, signs)
    commutes = set(signs) in ({"+"}, {"*"})
    return Problem(
        key=join(sorted(operands) if commutes else operands, signs),
        prompt=join(operands, signs) + "=",
        answer=str(value),
        response=str(value),
        mistake=str(value + 1),
    )


def countdown(rng: random.Random, options: Countdown) -> Problem:
    """ "3,5,2>13:" -> "3*5-2": each number once, usual precedence. The mistake: a wrong operator."""
    check(set(options.operators) <= set("+-*") and len(options.operators) > 1, "operators: 2 or 3 of + - *")
    check(options.numbers >= 2 and options.largest >= 3, "numbers must be at least 2 and largest at least 3")
    mistakes: list[str] = []
    while not mistakes:  # few draws have no other target within reach of one operator, such as 2*2
        operands = [rng.randint(1, options.largest) for _ in range(options.numbers)]
        signs = [rng.choice(options.operators) for _ in operands[1:]]
        target = compute(operands, signs)
        others = [[sign, *signs[1:]] for sign in options.operators]
        mistakes = [join(operands, s) for s in others if compute(operands, s) != target]
    shown = rng.sample(operands, len(operands))
    return Problem(
        key=f"{sorted(operands)}{target}",
        prompt=f"{','.join(map(str, shown))}>{target}:",
        answer=str(target),
        response=join(operands, signs),
        mistake=mistakes[0],
        columns={"numbers": shown, "target": target},
    )


def maximum(rng: random.Random, options: Maximum) -> Problem:
    """ "37,52,18>" -> "52". The mistake: the smallest."""
    check(
        2 <= options.count <= 10**options.digits, "count must be at least 2, and less than there are numbers"
    )
    numbers = rng.sample(range(10**options.digits), options.count)
    return Problem(
        key=str(sorted(numbers)),
        prompt=",".join(map(str, numbers)) + ">",
        answer=str(max(numbers)),
        response=str(max(numbers)),
        mistake=str(min(numbers)),
    )


def reverse(rng: random.Random, options: Reverse) -> Problem:
    """ "abcd>" -> "dcba". The mistake: the word as it is."""
    check(options.length >= 2 and len(set(options.letters)) >= 2, "length and letters must be at least 2")
    word = ""
    while word == word[::-1]:
        word = "".join(rng.choices(options.letters, k=rng.randint(2, options.length)))
    return Problem(word, f"{word}>", word[::-1], word[::-1], mistake=word)


def preference(rng: random.Random, options: Preference) -> Problem:
    """Arithmetic. The mistake: any other number about as large, another each time."""
    right = arithmetic(rng, Arithmetic(options.digits, options.operators, options.terms))
    value, shift = int(right.answer), 0
    reach = rng.choice([3, 10, 10**options.digits])  # near misses and far ones
    while shift == 0:
        shift = rng.randint(-reach, reach)
    return dataclasses.replace(right, mistake=str(value + shift))


def steps(rng: random.Random, options: Steps) -> Problem:
    """ "3+5+2=" -> "8\\n10", the sums so far, a line each. The mistake: wrong from a random step on.

    `steps` are the right solution or the mistake, each as often.
    """
    check(options.terms >= 2 and options.largest >= 1, "terms must be at least 2 and largest at least 1")
    operands = [rng.randint(1, options.largest) for _ in range(options.terms)]
    sums = list(itertools.accumulate(operands))[1:]
    at = rng.randrange(len(sums))
    slip = rng.choice([-1, 1, 2])
    wrong = [value + slip * (i >= at) for i, value in enumerate(sums)]
    shown = wrong if rng.random() < 0.5 else sums
    texts = [f"{value}\n" for value in shown[:-1]] + [str(shown[-1])]
    labels = [float(value == s) for value, s in zip(shown, sums, strict=True)]
    return Problem(
        key=str(operands),
        prompt=join(operands, ["+"] * len(sums)) + "=",
        answer=str(sums[-1]),
        response="\n".join(map(str, sums)),
        mistake="\n".join(map(str, wrong)),
        steps=tuple(zip(texts, labels, strict=True)),
    )


TASKS: dict[str, tuple[Callable[[random.Random, Any], Problem], type]] = {
    "arithmetic": (arithmetic, Arithmetic),
    "countdown": (countdown, Countdown),
    "maximum": (maximum, Maximum),
    "reverse": (reverse, Reverse),
    "preference": (preference, Preference),
    "steps": (steps, Steps),
    "calculate": (turn_tasks.calculate, turn_tasks.Calculate),
    "guess": (turn_tasks.guess, turn_tasks.Guess),
}


def held_out(key: str) -> bool:
    """Whether a problem belongs to the held-out tenth."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0


def parse_options(settings: type, options: dict[str, Any], where: str) -> Any:
    """`settings` with `options` set. Raises ValueError naming an unknown key or a wrong type."""
    known = {f.name: f.default for f in dataclasses.fields(settings)}
    for key, value in options.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{where} has no option {key!r}{hint} Its options: {', '.join(known)}")
        wanted = (int, float) if isinstance(known[key], float) else type(known[key])
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise UserError(f"{where}: option {key} must be {type(known[key]).__name__}, got {value!r}")
    made = settings(**options)
    check(0.0 <= made.noise <= 1.0, "noise must be in [0, 1]")
    check(made.size >= 1, "size must be at least 1")
    return made
