"""Generated tasks of several turns, for environments that answer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from jaxrl_llm.data.problem import Problem, check, compute, join


@dataclass(frozen=True)
class Calculate:
    """Settings of task:calculate."""

    digits: int = 3  # of both operands
    operators: str = "*"
    noise: float = 0.0  # share of demonstrations that give up
    size: int = 1_000_000


@dataclass(frozen=True)
class Guess:
    """Settings of task:guess."""

    largest: int = 15
    noise: float = 0.0  # share of demonstrations that do not listen
    size: int = 1_000_000


def calculate(rng: random.Random, options: Calculate) -> Problem:
    """ "317*442=" -> a call of the tool calculator, then its result. The mistake: it gives up."""
    check(set(options.operators) <= set("+-*") and options.operators, "operators must be of + - *")
    check(options.digits >= 1, "digits must be at least 1")
    operands = [rng.randrange(10 ** (options.digits - 1), 10**options.digits) for _ in range(2)]
    signs = [rng.choice(options.operators)]
    expression, value = join(operands, signs), str(compute(operands, signs))
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    called = ("assistant", f"<tool_call>{call}</tool_call>"), ("tool", value), ("assistant", value)
    turns = spoken(*called), spoken(("assistant", "?"))
    return Problem(expression, f"{expression}=", value, value, "?", turns=turns)


def guess(rng: random.Random, options: Guess) -> Problem:
    """ "1-15" -> a game that finds the number. The mistake: one that does not listen.

    The answer is drawn, and a game is never another in disguise: held-out games have the same numbers.
    """
    check(options.largest >= 2, "largest must be at least 2")
    number = rng.randint(1, options.largest)

    def game(listens: bool) -> tuple[dict, ...]:
        low, high, said = 1, options.largest, []
        while not said or said[-1][1] != str(number):
            one = rng.randint(low, high)
            said.append(("assistant", str(one)))
            if one != number:
                said.append(("user", "higher" if one < number else "lower"))
            if listens:
                low, high = (one + 1, high) if one < number else (low, one - 1)
        return spoken(*said)

    right, wrong = game(True), game(False)
    answer = str(number)
    return Problem(str(rng.random()), f"1-{options.largest}", answer, answer, answer, turns=(right, wrong))


def spoken(*turns: tuple[str, str]) -> tuple[dict, ...]:
    return tuple({"role": role, "content": content} for role, content in turns)
