"""Parameters of tests of which some run with the slow tests alone."""

from collections.abc import Collection, Iterable

import pytest


def with_slow(names: Iterable[str], slow: Collection[str]) -> list:
    """Return the names as parameters, those in `slow` marked slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]
