"""Ranges of config fields: values inside, and messages about those outside."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from jaxrl_llm.ranges import Fraction, Range, problems


@dataclass(frozen=True)
class Config:
    share: Fraction = 0.5
    b1: Annotated[float, Range(0, 1, open_high=True, usual="0.9 is usual")] = 0.9
    cap: Annotated[float, Range(0, math.inf, open_low=True)] = math.inf
    size: Annotated[int, Range(1, 8)] | None = None
    sides: tuple[Annotated[float, Range(0, 10)], ...] = ()
    free: float = 0.0

    def problems(self):
        if self.share > self.b1:
            yield "share", f"is {self.share:g}: it must be at most b1."


@pytest.mark.parametrize(
    "good", [{}, {"share": 0}, {"share": 0.9}, {"cap": 3}, {"size": 8}, {"sides": (0.0, 10.0)}]
)
def test_what_is_inside_has_no_problem(good):
    assert list(problems(Config(**good))) == []


@pytest.mark.parametrize(
    ("bad", "field", "text"),
    [
        ({"share": -0.1}, "share", "is -0.1: it must be at least 0 and at most 1."),
        ({"share": math.nan}, "share", "is nan: it must be at least 0 and at most 1."),
        ({"b1": 1.0}, "b1", "is 1.0: it must be at least 0 and below 1; 0.9 is usual."),
        ({"cap": 0.0}, "cap", "is 0.0: it must be above 0."),
        ({"cap": -math.inf}, "cap", "is -inf: it must be above 0."),
        ({"size": 9}, "size", "is 9: it must be at least 1 and at most 8."),
        ({"sides": (1.0, math.inf)}, "sides", "is inf: it must be at least 0 and at most 10."),
        ({"free": math.nan}, "free", "is nan: it must be finite."),
        ({"share": 0.95}, "share", "is 0.95: it must be at most b1."),
    ],
)
def test_what_is_outside_is_said_with_the_range(bad, field, text):
    assert list(problems(Config(**bad))) == [(field, text)]
