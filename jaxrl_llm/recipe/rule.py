"""A rule on recipes, and how a list of rules is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["recipe", "model", "devices"]


@dataclass(frozen=True)
class Rule:
    """A condition that a run must fulfil."""

    phase: Phase
    """Facts that the rule needs: the recipe alone, recipe and architectures, or recipe and devices."""
    keys: str
    """Keys that the rule reads, separated by spaces; "" = all."""
    problems: Callable[..., Iterable[str]]
    """Yield a message for each thing that is wrong: the key, the reason and the fix. Its arguments are the
    recipe, in phase "model" also the architectures by role, in phase "devices" all devices instead."""
    sized: bool = False
    """Of the recipe: the rule reads sizes of meshes, of which -1 is not known yet, and is asked again when
    the devices are known. Rules on models all are."""
    ends: bool = False
    """Later rules depend on this one, so they are skipped if it finds a problem."""


def apply_rules(rules: Sequence[Rule], *facts: Any) -> Iterator[tuple[Rule, list[str]]]:
    """Yield each rule with its messages, in order; a rule that is not asked is left out."""
    for rule in rules:
        lines = list(rule.problems(*facts))
        yield rule, lines
        if lines and rule.ends:
            return
