"""Countdown: combine the given numbers, each once, into the target. The expression is checked exactly.

The expression is read as a syntax tree and never executed. Only + - * / and parentheses exist in it,
so its value is bounded by its length.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from fractions import Fraction
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.extract import marked_answers
from jaxrl_llm.rewards.numerals import DIGITS
from jaxrl_llm.rewards.sample import RewardSample

MAX_LENGTH = 200  # characters of an expression
MAX_DIGITS = 12  # of a number in it
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "\u00d7": "*", "\u00f7": "/", "\u2013": "-"}
SIGNS |= {"x": "*", "\\left": "", "\\right": "", "\\(": "", "\\)": "", "\\[": "", "\\]": ""}
SIGN = re.compile("|".join(map(re.escape, SIGNS)))
EXPRESSION = re.compile(r"[\d\s()+*/.-]*\d[\d\s()+*/.-]*", re.ASCII)


def countdown_task(sample: RewardSample) -> tuple[list[int], Fraction]:
    """Return (numbers, target) of a row.

    Raises:
        UserError: a column is missing or holds no number.
    """
    row: dict[str, Any] = dict(sample.columns)
    answer = sample.answer
    try:
        if isinstance(answer, str) and answer.lstrip().startswith("{"):
            answer = json.loads(answer)
        for extra in (row.get("metadata"), answer):
            row.update(extra if isinstance(extra, dict) else {})
        numbers = row.get("numbers", row.get("nums"))
        target = row.get("target", sample.answer)
        return [int(number) for number in numbers], Fraction(str(target)[:MAX_LENGTH])
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            "countdown needs the columns numbers (or nums), whole numbers, and target, a number; the row has "
            f"{sorted(map(str, row))}: {error}"
        ) from None


def find_expression(response: str) -> str | None:
    """Return the expression in the marked answer, or in the last line that has one, up to its "="; else None.

    Of "29 = 3*8+5" it is the right side.
    """
    for line in list(marked_answers(response)) or response.splitlines()[::-1]:
        left, _, right = SIGN.sub(lambda match: SIGNS[match.group()], line.translate(DIGITS)).partition("=")
        left = (right if left.strip(" $`*").isdigit() and right else left).strip(" $.`*")
        if len(left) <= MAX_LENGTH and EXPRESSION.fullmatch(left):
            return left.strip()
    return None


def evaluate_countdown(expression: str) -> tuple[Fraction, list[int]]:
    """Return (exact value, the numbers used).

    Raises:
        ValueError, SyntaxError: the expression is too long, or has anything except + - * / of integers.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError("the expression is too long")
    used: list[int] = []
    return _value(ast.parse(expression, mode="eval").body, used), used


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10**MAX_DIGITS:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, used)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"not allowed in an expression: {ast.unparse(node)}")
