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
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.exact import judge
from jaxrl_llm.rewards.extract import find_answer
from jaxrl_llm.rewards.sample import Sample

MAX_LENGTH = 200  # characters of an expression
MAX_DIGITS = 12  # of a number in it
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXPRESSION = re.compile(r"[\d\s()+*/.-]*\d[\d\s()+*/.-]*")


def reward(sample: Sample) -> tuple[float, Outcome]:
    """1.0 if the expression uses exactly the given numbers and makes the target; no expression: unparsed.

    Numbers and target are the row's columns `numbers` (or `nums`) and `target`, or those of a dict answer.
    """
    numbers, target = task(sample)
    expression = find_expression(sample.response)
    if expression is None:
        return 0.0, Outcome.UNPARSED
    try:
        value, used = evaluate(expression)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return 0.0, Outcome.UNPARSED
    except ZeroDivisionError:
        return 0.0, Outcome.WRONG
    return judge(value == target and sorted(used) == sorted(numbers))


def task(sample: Sample) -> tuple[list[int], Fraction]:
    """(numbers, target) of a row. Raises ValueError naming the missing column."""
    row: dict[str, Any] = dict(sample.columns)
    answer = sample.answer
    if isinstance(answer, str) and answer.lstrip().startswith("{"):
        answer = json.loads(answer)
    for extra in (row.get("metadata"), answer):
        row.update(extra if isinstance(extra, dict) else {})
    numbers = row.get("numbers", row.get("nums"))
    target = row.get("target", sample.answer)
    if numbers is None or target is None or isinstance(target, dict):
        raise UserError(
            f"countdown needs the columns numbers (or nums) and target; the row has {sorted(row)}"
        )
    return [int(number) for number in numbers], Fraction(str(target))


def find_expression(response: str) -> str | None:
    """The marked answer, or the last line that holds an expression; what follows "=" is dropped."""
    given = find_answer(response)
    lines = response.splitlines() if given is None else [given]
    for line in reversed(lines):
        left = line.replace("\\times", "*").replace("\u00d7", "*").replace("\u00f7", "/").partition("=")[0]
        found = EXPRESSION.fullmatch(left.strip(" $.`")[:MAX_LENGTH])
        if found:
            return found.group().strip()
    return None


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """(exact value, the numbers used). Raises ValueError or SyntaxError on all but + - * / of integers."""
    if len(expression) > MAX_LENGTH:
        raise UserError("the expression is too long")
    used: list[int] = []
    return _value(ast.parse(expression, mode="eval").body, used), used


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10**MAX_DIGITS:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise UserError(f"not allowed in an expression: {ast.unparse(node)}")
