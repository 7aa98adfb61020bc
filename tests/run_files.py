"""Files of runs that tests write and compare."""

import json
from pathlib import Path

DIGITS = """
def digits(solution_str, ground_truth):  # unlike whether a sum is right, it differs from the first step on
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
"""
"""A reward file."""


def untimed_metrics(run_dir: Path) -> list[dict]:
    """Return the rows of metrics.jsonl without what depends on the clock or on the number of processes."""
    timed = (
        "time/",
        "perf/",
        "goodput/",
        "trainer/idle",
        "tokens_per_second",
        "rollout/",
        "reward/wall",
        "reward/seconds",
    )
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]
