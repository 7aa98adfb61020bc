"""Outcomes of scored responses, in a module without jax, since reward workers import it."""

from __future__ import annotations

import enum


class Outcome(enum.IntEnum):
    """Outcome of one response. A failed reward is masked, not scored 0."""

    CORRECT = 0
    WRONG = 1
    UNPARSED = 2
    FAILED = 3
