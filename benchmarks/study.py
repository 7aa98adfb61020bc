"""Types of studies: runs that are compared, the claim about them, and the suite that they belong to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean
from typing import Literal

PASS = "eval/pass@1"
Values = dict[str, list[float]]  # label -> one number a seed


@dataclass(frozen=True)
class Study:
    """Runs that are compared, and a claim about them."""

    claim: str
    runs: dict[str, str]  # label -> arguments; {start} is the folder of the SFT warm-up, {seed} the seed
    holds: Callable[[Values], bool]
    metric: str = PASS
    start: str = "sums"  # key of the suite's starts; "" = none
    of: Literal["last", "run_mean", "gain"] = "last"  # of the metric, what `holds` takes; gain = last - first
    starts_below: float = math.inf  # the claim needs every run's first value below it
    seeds: tuple[int, ...] = (0, 1, 2)
    also: tuple[str, ...] = ()  # further metrics of the report
    after: str = ""  # a study whose runs must exist before
    files: dict[str, str] = field(default_factory=dict)  # file that the runs need -> script that writes it
    shows: tuple[str, ...] = ()  # labels whose responses before and after are in the report


@dataclass(frozen=True)
class Start:
    """An SFT warm-up: a recipe without the RL."""

    task: str
    arguments: str
    config: str = "grpo_tiny.py"


@dataclass(frozen=True)
class Suite:
    """Studies that share a page."""

    page: str  # below docs/; its pictures are in the folder of that name
    runs: str  # folder of the runs
    intro: str
    studies: dict[str, Study]
    starts: dict[str, Start] = field(default_factory=dict)
    minutes: bool = False  # the page says how long each run took

    def start_arguments(self, name: str, seed: int) -> str:
        """Return the arguments of the SFT warm-up that a seed's runs begin with."""
        start = self.starts[name]
        return " ".join(f"--config {start.config} --steps 0 {start.arguments} --seed {seed}".split())


def all_at_least(bound: float) -> Callable[[Values], bool]:
    """Return the claim that every seed of every label reaches `bound`."""
    return lambda results: all(value >= bound for values in results.values() for value in values)


def exceeds(label: str, baseline: str, margin: float) -> Callable[[Values], bool]:
    """Return the claim that `label` is above `baseline` in every seed, by `margin` or more on their mean."""
    gaps = lambda results: [a - b for a, b in zip(results[label], results[baseline], strict=True)]
    return lambda results: min(gaps(results)) > 0 and mean(gaps(results)) >= margin


def every(*claims: Callable[[Values], bool]) -> Callable[[Values], bool]:
    """Return the claim that all claims hold."""
    return lambda results: all(claim(results) for claim in claims)


def within(baseline: str, margin: float) -> Callable[[Values], bool]:
    """Return the claim that the mean over the seeds of no label is more than `margin` below `baseline`."""
    return lambda results: min(map(mean, results.values())) >= mean(results[baseline]) - margin


def options(**values: int | float) -> str:
    """Return the options of a generated task as an argument of the command line."""
    return f"'{json.dumps(values, separators=(',', ':'))}'"


def unseen(path: str, prompts: int, **values: int) -> str:
    """Return the arguments of an evaluation on distinct problems that training never draws."""
    source = f"--data.eval.0.path {path} --data.eval.0.options {options(**values, size=20_000)}"
    return f"{source} --data.eval.0.split test --data.eval.0.distinct True --eval.prompts {prompts}"
