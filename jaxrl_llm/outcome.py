"""What became of a sample; apart from structs.py so that reward workers start without jax."""

from __future__ import annotations

import enum


class Outcome(enum.IntEnum):
    """What became of a sample. A failed reward is masked, never scored 0."""

    CORRECT = 0
    WRONG = 1
    UNPARSED = 2
    FAILED = 3
