"""One problem of a generated task, and the arithmetic that several tasks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One problem of a task."""

    key: str  # equal for problems that are the same in another guise: 1+2 and 2+1
    prompt: str
    answer: Any
    response: str  # demonstration
    mistake: str  # wrong demonstration
    steps: tuple[tuple[str, float], ...] = ()  # a worked solution, right or not: text, 1 = right so far
    columns: dict[str, Any] = field(default_factory=dict)
    turns: tuple[tuple[dict, ...], ...] = ()  # demonstration and mistake, where they take several turns


def compute(operands: list[int], signs: list[str]) -> int:
    """Value of operands joined by + - *, with the usual precedence."""
    total, product = 0, operands[0]
    for sign, operand in zip(signs, operands[1:], strict=True):
        if sign == "*":
            product *= operand
            continue
        total, product = total + product, operand if sign == "+" else -operand
    return total + product


def join(operands: list[int], signs: list[str]) -> str:
    """ "3*5-2" of [3, 5, 2] and ["*", "-"]."""
    return str(operands[0]) + "".join(f"{s}{n}" for s, n in zip(signs, operands[1:], strict=True))


def check(ok: Any, message: str) -> None:
    if not ok:
        raise UserError(message)
