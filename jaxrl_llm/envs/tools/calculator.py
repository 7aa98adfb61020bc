"""The tool `calculator`: arithmetic, evaluated on Python's syntax tree and never by `eval`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar

from jaxrl_llm.envs.env import ToolError

MAX_CHARS = 500
MAX_BITS = 10_000  # of an integer: 3,010 digits
MAX_FACTORIAL = 1000
Number = int | float


class Calculator:
    """The tool `calculator`. Integers are exact; an even integer quotient stays an integer."""

    schema: ClassVar[dict[str, Any]] = {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression: + - * / // % ** ( ), numbers, pi, e, and the "
        "functions abs, ceil, cos, exp, factorial, floor, gcd, log(x, base), max, min, round(x, digits), "
        "sin, sqrt, tan.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as (3 + 4) * 12 / 7"}},
            "required": ["expression"],
        },
    }

    async def call(self, arguments: dict[str, Any]) -> str:
        """Return the value of the expression in digits."""
        return calculate(arguments["expression"])


def calculate(expression: str) -> str:
    """Return the value of an expression in digits.

    Raises:
        ToolError: the expression is not arithmetic, has no real value, or is too large.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression is longer than {MAX_CHARS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ToolError(f"not an arithmetic expression: {expression!r}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except (RecursionError, MemoryError):
        raise ToolError("the expression is nested too deeply") from None
    except (TypeError, ValueError) as error:  # of a function: too many arguments, sqrt(-1)
        raise ToolError(str(error)) from None
    return str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
            return _checked(OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _checked(FUNCTIONS[name](*map(_value, arguments)))
    hint = " (write ** for powers)" if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor) else ""
    raise ToolError(f"not allowed: {ast.unparse(node)[:80]}{hint}")


def _checked(value: Any) -> Number:
    if isinstance(value, complex) or value != value:
        raise ToolError("the result is not a real number")
    if value in (math.inf, -math.inf) or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        raise ToolError("the result is too large")
    return value


def _divide(a: Number, b: Number) -> Number:
    whole = isinstance(a, int) and isinstance(b, int) and b != 0 and a % b == 0
    return a // b if whole else a / b


def _power(a: Number, b: Number) -> Number:
    exact = isinstance(a, int) and isinstance(b, int) and abs(a) > 1
    if exact and abs(b) * abs(a).bit_length() > 2 * MAX_BITS:
        raise ToolError("the power is too large")
    return a**b


def _sqrt(x: Number) -> Number:
    if x < 0:
        raise ToolError("the square root of a negative number")
    root = math.isqrt(x) if isinstance(x, int) else 0
    return root if root * root == x else math.sqrt(x)


def _round(x: Number, digits: int = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 300:
        raise ToolError("round(x, digits) takes at most 300 digits")
    return round(x, digits or None)


def _factorial(n: Number) -> int:
    if not isinstance(n, int) or not 0 <= n <= MAX_FACTORIAL:
        raise ToolError(f"factorial takes an integer from 0 to {MAX_FACTORIAL}")
    return math.factorial(n)


CONSTANTS = {"pi": math.pi, "e": math.e}
OPERATORS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "factorial": _factorial,
    "floor": math.floor,
    "gcd": math.gcd,
    "log": math.log,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "round": _round,
    "sin": math.sin,
    "sqrt": _sqrt,
    "tan": math.tan,
}
