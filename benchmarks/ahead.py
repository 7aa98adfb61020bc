"""Responses ahead of the trainer against taking turns: time of a step, idle time, and what is learned.

    python benchmarks/ahead.py                       # 3 seeds, about 15 minutes on 2 quiet cores

Two stand-in servers (those of the tests: our own engine behind SGLang's JSON) take 20 ms a token however many
responses they write, as accelerators do; so their time costs the trainer nothing. Weights, tokens and
learning are real. Of 32 prompts one wants a long response (configs/grpo_async.py).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT, RESULT = Path("runs/ahead"), ROOT / "benchmarks/results/ahead.json"
PACE = "0.02"
SEEDS, WINDOW, STEPS, SKIPPED = (0, 1, 2), 2, 24, 4
MEASURED = (
    "time/step",
    "tokens_per_second",
    "trainer/idle_fraction",
    "servers/idle_fraction",
    "servers/occupancy",
    "staleness/mean",
)


def train(run_dir: Path, *arguments: str) -> list[dict]:
    """Rows of metrics.jsonl of a run of grpo_async.py."""
    common = ("--log.progress", "none", "--log.tensorboard", "false", "--run_dir", str(run_dir))
    words = [sys.executable, "-m", "jaxrl_llm.train", "--config", "grpo_async.py", *common, *arguments]
    path = os.pathsep.join([str(ROOT / "tests/rollout/stub"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": path, "FAKE_SGLANG_PACE": PACE})
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def measured(rows: list[dict]) -> dict[str, float]:
    """Medians over the steps after the first few, and where the run ended."""
    steps = [row for row in rows if row["kind"] == "train"][SKIPPED:]
    found = {name: statistics.median(row[name] for row in steps) for name in MEASURED}
    passed = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    return {**found, "pass@1 before": passed[0], "pass@1 after": passed[-1]}


def main() -> None:
    results: dict[str, list] = {"take turns": [], "ahead": []}
    for seed in SEEDS:
        start, own = OUT / f"start_{seed}", ("--seed", str(seed))
        alone = ("--rollout.engine", "native", "--rollout.launch", "0", "--rollout.max_staleness", "0")
        train(start, *own, *alone, "--steps", "0")
        begin = (
            *own,
            "--model.path",
            str(start / "hf"),
            "--model.tokenizer",
            "tiny",
            "--warm_start.steps",
            "0",
        )
        for label, window in (("take turns", 0), ("ahead", WINDOW)):
            more = ("--rollout.max_staleness", str(window), "--sglang.python", sys.executable)
            often = ("--steps", str(STEPS), "--eval.every", str(STEPS))
            rows = train(OUT / f"{label.replace(' ', '_')}_{seed}", *begin, *more, *often)
            results[label].append(measured(rows))
    step = {label: [run["time/step"] for run in runs] for label, runs in results.items()}
    ratios = [slow / fast for slow, fast in zip(*step.values(), strict=True)]
    report = {"pace_seconds": float(PACE), "max_staleness": WINDOW, "speedup": ratios, "runs": results}
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
