"""Answers to flags of other systems: the equivalent key, or a note without one."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping

from jaxrl_import.systems import fields_by_name
from jaxrl_import.values import key_table

_TABLES = key_table("hints")
SAME: Mapping[str, str] = _TABLES["same"]
"""Flag of another system -> the key here, of flags that no table of a system has."""
MISSING: Mapping[str, str] = {
    flag: answer for answer, flags in _TABLES["missing"].items() for flag in flags.split()
}
"""Flag of another system without an equivalent -> a note."""
GROUPS: Mapping[str, str] = _TABLES["groups"]
"""First word of a flag of another system, which has many that begin with it -> the answer."""
INSIDE: Mapping[str, str] = _TABLES["inside"]
"""Part of keys of another system -> a note on all such keys."""


def translate(key: str, known: Container[str] = ()) -> str:
    """Return a sentence with the equivalent of a flag of another system; "" if the flag is unknown.

    The whole key is looked up, then without its first part and so on; at last its first word.

    Args:
        known: keys of the recipe. A flag that several trainers have (loss_type) is the one of its algorithm.
    """
    fields = fields_by_name()
    for tail in tails(key):
        if tail in SAME:
            return f"Here it is {SAME[tail]}."
        if tail in MISSING:
            return f"{MISSING[tail]}."
        answers = [field.hint or f"--{field.ours}" for field in fields.get(tail, ())]
        if answers := [answer for answer in answers if answer.startswith("--")]:
            own = (answer for answer in answers if _option_of_algorithm(answer) in known)
            return f"Here it is {next(own, answers[0])}."
    group = _group(key)
    return group and f"{group}."


def _option_of_algorithm(answer: str) -> str:
    """Return the key that an answer begins with, if it is one of an algorithm's settings; else ""."""
    found = re.match(r"--(algo\.[\w.]*\w)", answer)
    return found[1] if found else ""


def missing_reason(key: str) -> str:
    """Return the note on a key without counterpart; "" if nothing is known."""
    for tail in tails(key):
        if answer := MISSING.get(tail, SAME.get(tail, "")):
            return answer
    return next((answer for part, answer in INSIDE.items() if part in key), "")


def tails(key: str) -> Iterator[str]:
    """Yield the key, and it without its first part, without two and so on."""
    parts = key.lower().replace("-", "_").split(".")
    yield from (".".join(parts[i:]) for i in range(len(parts)))


def _group(key: str) -> str:
    name = key.lower().replace("-", "_")
    return next((answer for word, answer in GROUPS.items() if re.match(rf"{word}(_|\.|$)", name)), "")
