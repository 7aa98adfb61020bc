"""Values of expressions of Python files, from the syntax tree: nothing is run."""

from __future__ import annotations

import ast
import operator
import posixpath
from collections.abc import Mapping
from typing import Any

from jaxrl_import.expressions import ARITHMETIC
from jaxrl_import.values import unknown, unknown_names

OPERATIONS = {**ARITHMETIC, ast.Div: operator.truediv, ast.Pow: operator.pow}
COMPARISONS = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
LARGEST, MAX_POWER = 1e15, 64
"""Bounds of the numbers in arithmetic of a file."""


def name_of(call: ast.Call) -> str:
    """Return the last name of the function that is called; "" = it has no name."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def root_of(node: ast.expr) -> ast.expr:
    """Return the expression at the root of a.b, a[b] or a.b(...)."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


class TakenBranches(ast.NodeTransformer):
    """Leaves out the branches of `if` that constants of the file decide against."""

    def __init__(self, reader: ScriptValues):
        self._reader = reader

    def visit_If(self, node: ast.If) -> ast.If | list[ast.stmt]:
        """Return the `if`, or the statements of its branch if its condition is known."""
        self.generic_visit(node)
        taken = self._reader.value(node.test)
        if not isinstance(taken, bool | int | None):
            return node
        return (node.body if taken else node.orelse) or [ast.copy_location(ast.Pass(), node)]


class ScriptValues:
    """Values of expressions: literals, names with one value, defaults of add_argument."""

    def __init__(self, tree: ast.Module, name: str, variables: Mapping[str, str]):
        self.name = name
        self.nodes: dict[str, ast.expr] = {}
        self._several: set[str] = set()
        self._places: dict[str, int] = {}
        self.imported: dict[str, str] = {}
        self._values: dict[str, Any] = dict(variables)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], node.value)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
                self.imported |= names
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self._several.add(node.target.id)
            elif isinstance(node, ast.Call) and name_of(node) == "add_argument" and node.args:
                self._add_argument(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            first = self.nodes.setdefault(target.id, value)
            if ast.dump(first) != ast.dump(value):
                self._several.add(target.id)
        elif isinstance(target, ast.Tuple):
            same = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for i, name in enumerate(target.elts):
                if same:
                    self._assign(name, value.elts[i])
                elif isinstance(name, ast.Name) and name.id not in self.nodes:
                    # Such as train, test = load_dataset(NAME, split=["train", "test"]).
                    self.nodes[name.id], self._places[name.id] = value, i

    def _add_argument(self, call: ast.Call) -> None:
        flag = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
        default = next((word.value for word in call.keywords if word.arg == "default"), None)
        if isinstance(flag, str) and default is not None:
            key = f"args.{flag.lstrip('-').replace('-', '_')}"
            self._values.setdefault(key, self.value(default))

    def where(self, node: ast.expr) -> str:
        """Return file and line."""
        return f"{self.name}:{node.lineno}"

    def call_named(self, node: ast.expr | None, names: tuple[str, ...]) -> tuple[ast.Call | None, int | None]:
        """Return the call of one of these names that gives an expression, through names, indices and methods,
        and its index if several names are assigned at once."""
        place = None
        for _ in range(10):
            if isinstance(node, ast.Call) and name_of(node) in names:
                return node, place
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node = node.func.value
            elif isinstance(node, ast.Subscript):
                node = node.value
            elif isinstance(node, ast.Name):
                place = self._places.get(node.id, place)
                node = self.nodes.get(node.id)
        return None, None

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression; a value that only a run would tell is marked unknown."""
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        key = ast.unparse(node)
        if key in self._values:
            return self._values[key]
        if key.startswith("torch.") and isinstance(node, ast.Attribute):
            return key
        if depth > 10 or (isinstance(node, ast.Name) and node.id in self._several):
            return unknown(key)
        if isinstance(node, ast.Name) and node.id in self.nodes:
            return self.value(self.nodes[node.id], depth + 1)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            first = self.value(node.values[0], depth + 1)
            rest = node.values[1] if len(node.values) == 2 else ast.BoolOp(ast.Or(), node.values[1:])
            if first is None or not unknown_names(first):
                return first or self.value(rest, depth + 1)
        # Text, lists and arithmetic of known values.
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(part.value) if isinstance(part, ast.Constant) else str(self.value(part.value, depth + 1))
                for part in node.values
            )
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, depth + 1) for item in node.elts]
        if isinstance(node, ast.Call) and not node.keywords:
            return self._of_call(node, [self.value(argument, depth + 1) for argument in node.args])
        if isinstance(node, ast.IfExp) and isinstance(test := self.value(node.test, depth + 1), bool):
            return self.value(node.body if test else node.orelse, depth + 1)
        operands = [self.value(operand, depth + 1) for operand in _operands(node)]
        if not operands or any(map(unknown_names, operands)):
            return unknown(key)
        try:
            return _computed(node, operands)
        except (TypeError, ValueError, ArithmeticError):
            return unknown(key)

    def _of_call(self, node: ast.Call, values: list[Any]) -> Any:
        """Return the value of len(...) or os.path.join(...) of known values."""
        known = bool(values) and not any(map(unknown_names, values))
        if known and name_of(node) == "len" and isinstance(values[0], list | tuple):
            return len(values[0])
        if known and ast.unparse(node.func).endswith("path.join") and all(isinstance(v, str) for v in values):
            return posixpath.join(*values)
        return unknown(ast.unparse(node))


def _operands(node: ast.expr) -> list[ast.expr]:
    """Return the operands of arithmetic, `not` or one comparison; none of another expression."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return [node.left, node.right]
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        return [node.left, *node.comparators]
    return [node.operand] if isinstance(node, ast.UnaryOp) else []


def _computed(node: ast.expr, operands: list[Any]) -> Any:
    """Return the value of an expression of `_operands`."""
    if isinstance(node, ast.Compare):
        return COMPARISONS[type(node.ops[0])](*operands)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not operands[0]
    are_numbers = all(isinstance(operand, int | float) and abs(operand) < LARGEST for operand in operands)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and are_numbers:
        return -operands[0]
    is_text = isinstance(getattr(node, "op", None), ast.Add) and all(isinstance(o, str) for o in operands)
    if not isinstance(node, ast.BinOp) or not (are_numbers or is_text):
        raise ValueError("no arithmetic of numbers")
    if isinstance(node.op, ast.Pow) and abs(operands[1]) > MAX_POWER:
        raise ValueError("a large power")
    return OPERATIONS[type(node.op)](*operands)
