"""Ranges of config fields, declared where the field is: `b1: Annotated[float, Range(0, 1, open_high=True)]`.

`problems(config)` compares every number of a Config with its range, then calls the Config's own `problems()`,
which checks rules across its fields. `recipe/checks.py` walks all Configs of a run and adds the key.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

LARGEST = 2**31 - 1  # of an int32: steps, tokens, indices on the device


@dataclass(frozen=True)
class Range:
    """Range of a field's values. Infinity is allowed only if a bound is infinite and closed."""

    low: float
    high: float
    open_low: bool = False
    """Exclude `low` itself."""
    open_high: bool = False
    """Exclude `high` itself."""
    usual: str = ""
    """Usual value, for the message: "0.9 is usual"."""

    def __contains__(self, value: float) -> bool:
        above = value > self.low or (value == self.low and not self.open_low)
        below = value < self.high or (value == self.high and not self.open_high)
        return above and below

    def __str__(self) -> str:
        """Return the range in words: "above 0 and at most 1"."""
        parts = []
        if self.low > -math.inf:
            parts.append(f"{'above' if self.open_low else 'at least'} {_number(self.low)}")
        if self.high < math.inf:
            parts.append(f"{'below' if self.open_high else 'at most'} {_number(self.high)}")
        return " and ".join(parts) or "finite"


Fraction = Annotated[float, Range(0.0, 1.0)]
Count = Annotated[int, Range(1, LARGEST)]
CountOrZero = Annotated[int, Range(0, LARGEST)]
Weight = Annotated[float, Range(0.0, 1e6)]
"""A coefficient of a loss or reward, 0 = off."""
Positive = Annotated[float, Range(0.0, 1e9, open_low=True)]
Finite = Annotated[float, Range(-1e9, 1e9)]
Unbounded = Annotated[float, Range(-math.inf, math.inf)]
"""A number or an infinity, such as a bound that may be absent."""
Seconds = Annotated[float, Range(0.0, 1e9, open_low=True)]
SecondsOrZero = Annotated[float, Range(0.0, 1e9)]


def problems(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) of one Config, nested Configs left out."""
    in_range = True
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if problem := _out_of_range(value, field_ranges(type(config))[field.name]):
            in_range = False
            yield field.name, problem
    if in_range and hasattr(config, "problems"):  # rules across fields compute with the values
        yield from config.problems()


@functools.cache
def field_ranges(config_class: type) -> dict[str, Range | None]:
    """Return the Range of each field of a Config; None = it has none."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    return {field.name: range_of(hints[field.name]) for field in dataclasses.fields(config_class)}


def range_of(hint: Any) -> Range | None:
    """Return the Range in a type hint, also inside unions and tuples; None = the hint has none."""
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, Range):
            return extra
    return next((inner for arg in typing.get_args(hint) if (inner := range_of(arg))), None)


def _out_of_range(value: Any, allowed: Range | None) -> str:
    if isinstance(value, tuple):
        return next((problem for item in value if (problem := _out_of_range(item, allowed))), "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if allowed is None:
        finite = isinstance(value, int) or math.isfinite(value)
        return "" if finite else f"is {value}: it must be finite."
    if value in allowed:  # never NaN; infinity only if it is a declared bound
        return ""
    usual = f"; {allowed.usual}" if allowed.usual else ""
    return f"is {value}: it must be {allowed}{usual}."


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e6 or value >= LARGEST * 2 else f"{value:,.0f}"
