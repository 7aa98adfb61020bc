"""Cost and mismatch of strict mode: grpo_tiny.py with and without it, in float32 and bfloat16.

    python benchmarks/strict.py        # benchmarks/results/strict.json, about 10 minutes on 2 quiet cores

Mismatch: the largest difference between a log-prob of the rollout and the trainer's, in nats, over all tokens
of all steps. Seconds: medians of the steps after the first ten.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import report_head

OUT, RESULTS = Path("runs/strict"), Path(__file__).parent / "results"
STEPS, SKIPPED = 100, 10


def folder_of(dtype: str, strict: bool) -> Path:
    return OUT / f"{dtype}_{'strict' if strict else 'plain'}"


def train_words(dtype: str, strict: bool, *, steps: int, flags: Sequence[str] = ()) -> list[str]:
    """Return the flags of a training."""
    words = ["--config", "grpo_tiny.py", "--run_dir", str(folder_of(dtype, strict))]
    words += ["--steps", str(steps), "--strict", str(strict)]
    words += ["--model.dtype", dtype, "--rollout.dtype", dtype, "--eval.every", str(steps)]
    return [*words, "--log.progress", "none", "--log.tensorboard", "false", *flags]


def train_steps(
    dtype: str, strict: bool, *, steps: int = STEPS, flags: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Run a training and return the rows of its steps in metrics.jsonl.

    Raises:
        RuntimeError: it failed, with the last lines that it printed.
    """
    run_dir, words = folder_of(dtype, strict), train_words(dtype, strict, steps=steps, flags=flags)
    shutil.rmtree(run_dir, ignore_errors=True)  # an earlier run would be continued
    command = [sys.executable, "-m", "jaxrl_llm.train", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout, flush=True)
    if done.returncode:
        raise RuntimeError(" ".join(done.stdout.split("\n")[-4:])[-400:].strip())
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


def main() -> None:
    report: dict = {**report_head(), "steps": STEPS}
    for dtype in ("float32", "bfloat16"):
        for strict in (False, True):
            rows = train_steps(dtype, strict)
            report[f"{dtype}, {'strict' if strict else 'plain'}"] = {
                "mismatch, largest": max(row["mismatch/max_abs"] for row in rows),
                "mismatch, mean": statistics.mean(row["mismatch/mean_abs"] for row in rows),
                "step, s": statistics.median(row["time/step"] for row in rows[SKIPPED:]),
                "reward, last ten": statistics.mean(row["reward/mean"] for row in rows[-10:]),
            }
        plain, strict = (report[f"{dtype}, {label}"]["step, s"] for label in ("plain", "strict"))
        report[f"{dtype}, strict / plain"] = strict / plain
    text = json.dumps(report, indent=2)
    (RESULTS / "strict.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
