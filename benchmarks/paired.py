"""Times of alternatives that are measured in turn, so that other load on the machine affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Rows = Sequence[Mapping[str, float]]


def timed(call: Callable[[], Result]) -> tuple[Result, dict[str, float]]:
    """Return the call's result, and its wall and CPU seconds by name: "wall" and "cpu"."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def medians(rows: Rows) -> dict[str, float]:
    """Return the median of each number over the repetitions."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def paired_ratios(rows: Rows, others: Rows, name: str) -> list[float]:
    """Return the ratio of one number of `rows` to the same of `others` in each repetition."""
    return [row[name] / other[name] for row, other in zip(rows, others, strict=True)]
