"""Computations of shell scripts: whole numbers, edits of a variable (${X%.*}), and paths."""

from __future__ import annotations

import ast
import fnmatch
import operator
import posixpath
import re
from collections.abc import Callable

from jaxrl_import.values import unknown

MAX_EDITED = 4096  # of a variable that ${X%pattern} cuts
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def edited_value(value: str, edit: str) -> str:
    """Return ${X%pattern} and similar edits of the value of X; unknown for other edits."""
    if (match := re.fullmatch(r"([#%])(\1?)(.*)", edit, re.DOTALL)) and len(value) < MAX_EDITED:
        lengths = range(len(value) + 1)
        at_end = match[1] == "%"
        ends = [value[len(value) - n :] if at_end else value[:n] for n in lengths]
        fits = [end for end in ends if fnmatch.fnmatchcase(end, match[3])]
        cut = len((fits[-1] if match[2] else fits[0]) if fits else "")
        return value[: len(value) - cut] if at_end else value[cut:]
    if match := re.fullmatch(r"/(/?)([^/*?\[]+)(?:/(.*))?", edit, re.DOTALL):
        return value.replace(match[2], match[3] or "", -1 if match[1] else 1)
    if match := re.fullmatch(r":(\d+)(?::(\d+))?", edit):
        start = int(match[1])
        return value[start : start + int(match[2]) if match[2] else None]
    return {",,": value.lower(), "^^": value.upper()}.get(edit, unknown(f"{{...{edit}}}"))


def default_text(text: str, quoted: bool, expand: Callable[[str], str]) -> str:
    """Return the text after :- in ${X:-text}. Single quotes quote, unless the whole is in double quotes.

    Args:
        expand: replaces the variables of a part without quotes.
    """
    has_command = "$(" in text or "`" in text  # which may have quotes, too
    parts = [text] if quoted or has_command or text.count("'") % 2 else text.split("'")
    return "".join(part if i % 2 else expand(part.replace('"', "")) for i, part in enumerate(parts))


def integer_value(node: ast.expr) -> int:
    """Return the value of whole-number arithmetic.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](integer_value(node.left), integer_value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -integer_value(node.operand)
    raise ValueError("not whole-number arithmetic")


def path_output(words: list[str]) -> str | None:
    """Return the output of a command that only computes a path; None = it is another command."""
    if words == ["pwd"]:
        return "."
    if len(words) >= 2 and words[0] in ("dirname", "basename"):
        return str(getattr(posixpath, words[0])(words[-1])) or "."
    if len(words) >= 2 and words[0] in ("realpath", "readlink"):
        return posixpath.normpath(words[-1])
    if len(words) == 4 and words[0] == "cd" and words[2:] == ["&&", "pwd"]:
        return posixpath.normpath(words[1])
    return None
