"""Conditions of shell scripts: true, false, or None if only running the script would tell."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable

from jaxrl_import.values import unknown_names

COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
CLOSING = {"{": "}", "(": ")", "[": "]"}
TERM = re.compile(r"&&|\|\||'[^']*'|\"(?:[^\"\\]|\\.)*\"|\$\{[^}]*\}|\$\([^)]*\)|\\.|.", re.DOTALL)
WHOLE = re.compile(r"-?\d+")
Words = Callable[[str], list[str]]
"""Expands text as the words of a command."""


def truth(text: str, words: Words) -> bool | None:
    """Return whether a condition holds: tests joined by && and ||, in braces or with ! before them."""
    terms, operators = _split(text.strip().rstrip("; \t\n"))
    result = _term(terms[0], words)
    for sign, term in zip(operators, terms[1:], strict=True):
        other = _term(term, words)
        stop = sign == "||"
        if stop in (result, other):
            result = stop
        elif None in (result, other):
            result = None
        else:
            result = other
    return result


def _split(text: str) -> tuple[list[str], list[str]]:
    """Return the terms between && and || outside brackets and quotes, and these operators."""
    terms, operators, depth, current = [], [], 0, ""
    for match in TERM.finditer(text):
        part = match[0]
        depth += (part in CLOSING) - (part in CLOSING.values())
        if part in ("&&", "||") and depth == 0:
            terms.append(current)
            operators.append(part)
            current = ""
        else:
            current += part
    return [*terms, current], operators


def _term(text: str, words: Words) -> bool | None:
    text = text.strip().rstrip("; \t\n")
    if text.startswith("! "):
        inner = _term(text[2:], words)
        return None if inner is None else not inner
    if text in ("true", ":", "false"):
        return text != "false"
    if text.startswith("[[ ") and text.endswith("]]"):
        terms, _ = _split(text[2:-2])
        if len(terms) == 1:
            return _test(words(text[2:-2]))
        wrapped = re.sub(r"\s(&&|\|\|)\s", r" ]] \1 [[ ", text)
        return None if wrapped == text else truth(wrapped, words)
    if text.startswith("[ ") and text.endswith("]"):
        return _test(words(text[1:-1]))
    if text[:1] in ("{", "(") and text.endswith(CLOSING[text[0]]) and not text.startswith("(("):
        return truth(text[1:-1], words)
    return _test(words(text[5:])) if text.startswith("test ") else None


def _test(words: list[str]) -> bool | None:
    """Return the result of `[ words ]`; of files None."""
    if words[:1] == ["!"]:
        inner = _test(words[1:])
        return None if inner is None else not inner
    if any(map(unknown_names, words)):
        return None
    if len(words) <= 1:
        return bool(words and words[0])
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) == (sign != "!=")
    if sign in COMPARISONS and WHOLE.fullmatch(left) and WHOLE.fullmatch(right):
        return COMPARISONS[sign](int(left), int(right))
    return None


def matches(value: str, patterns: str, words: Words) -> bool | None:
    """Return whether a value is one of a branch of `case`: patterns joined by |."""
    texts = [" ".join(words(pattern)) for pattern in patterns.strip().lstrip("(").split("|")]
    if unknown_names(value) or any(map(unknown_names, texts)):
        return True if texts == ["*"] and not unknown_names(value) else None
    return any(fnmatch.fnmatchcase(value, text) for text in texts)


class Branching:
    """An `if` or `case` that is read: which of its branches is taken.

    Args:
        value: of a case.
    """

    def __init__(self, value: str | None = None):
        self.value = value
        self.active: bool | None = True
        self.expects_pattern = value is not None
        self.is_second = False  # True: an earlier branch may have been taken, too
        self._taken: bool | None = False

    def enter(self, holds: bool | None) -> None:
        """Enter the next branch, whose condition holds, does not, or is not known."""
        before = self._taken
        self.is_second = before is None
        self.active = False if before is True or holds is False else None if None in (before, holds) else True
        if holds is not False and before is not True:
            self._taken = self.active


class Chain:
    """Commands joined by && and ||: whether the present one is run."""

    def __init__(self) -> None:
        self.active: bool | None = True
        self.is_second = False  # True: the command runs if one before it fails
        self.is_begun = False  # True: the present command has words
        self._status: bool | None = True  # of the commands before

    def end(self, operator: str, command: list[str]) -> None:
        """Go on to the command after an operator; "" = the end of the line.

        Args:
            command: words of the command that ends; empty = assignments.
        """
        if not self.is_begun and operator == "":  # a line may end with && and ||
            return
        if self.active is not False:
            self._status = _status(command) if self.active else None
        self.is_begun, self.is_second = False, operator == "||"
        if operator not in ("&&", "||"):
            self.active = self._status = True
        elif self._status is None:
            self.active = None
        else:
            self.active = self._status == (operator == "&&")


def _status(command: list[str]) -> bool | None:
    """Return whether a command succeeds, of assignments and tests; None = only a run would tell."""
    if not command or command[0] in ("true", ":", "false"):
        return command != ["false"]
    ends = {"[": "]", "[[": "]]"}
    if ends.get(command[0]) == command[-1]:
        return _test(command[1:-1])
    return _test(command[1:]) if command[0] == "test" else None
