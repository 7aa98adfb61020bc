"""Seconds from a command to its first update, with a cold and a warm compilation cache, and to its help.

    python benchmarks/start.py        # benchmarks/results/start.json, about 2 minutes on 2 quiet cores

Each command is a separate process. `grpo_tiny.py` with one step runs first with an empty compilation cache
in a temporary home directory, then with the programs of that run; both end with the line of the first step,
here an update of the SFT warm-up. CPU seconds are of the process, with its threads. Reported are
medians of the repetitions, but of the cold start, which is measured once; "phases" come from the run's
line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import report_head

RESULT = Path(__file__).parent / "results/start.json"
TRAIN = [sys.executable, "-m", "jaxrl_llm.train"]
RECIPE = ["--config", "grpo_tiny.py"]
ONE_STEP = ["--steps", "1", "--warm_start.steps", "1", "--eval.every", "0"]
LISTS = {
    "--help": ["--help"],
    "--list": ["--list"],
    "--help of a recipe": [*RECIPE, "--help"],
}
FIRST_STEP = re.compile(r"first step done [\d.]+ s after the start: (.*)")


def measure_command(
    words: list[str], environment: dict[str, str], first_step: bool = False, *, kill: bool = False
) -> dict[str, Any]:
    """Return wall and CPU seconds of a command up to its first step, or up to its end.

    Args:
        kill: end the command at its first step.

    Raises:
        SystemExit: the command failed.
    """
    start, result = time.perf_counter(), {}
    seconds = lambda: {"wall": time.perf_counter() - start, "cpu": cpu_seconds(process.pid)}
    process = subprocess.Popen(
        [*TRAIN, *words],
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if first_step and (found := FIRST_STEP.search(line)):
            result = {**seconds(), "phases": found[1].strip()}
            if kill:
                process.kill()
                break  # children may keep the pipe open
    result = result or seconds()  # before `wait`, after which it has no entry in /proc
    process.stdout.close()
    failed = process.wait() and not (kill and "phases" in result)
    if failed or (first_step and "phases" not in result):
        raise SystemExit(f"{' '.join(words)} failed:\n{''.join(lines[-20:])}")
    return result


def without_cache(home: str) -> dict[str, str]:
    """Return the environment with an empty compilation cache, in another home directory."""
    kept = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return {**kept, "HOME": home}


def cpu_seconds(pid: int) -> float:
    """Return the user and system seconds of a process on Linux, whose end need not have been waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run of median wall time, with the median of the CPU seconds."""
    middle = sorted(runs, key=lambda run: run["wall"])[len(runs) // 2]
    return {**middle, "cpu": statistics.median(run["cpu"] for run in runs)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    report: dict[str, Any] = report_head()
    with tempfile.TemporaryDirectory() as folder:
        home = without_cache(folder)

        def first_update(i: int) -> dict[str, Any]:
            return measure_command([*RECIPE, *ONE_STEP, "--run_dir", f"{folder}/run_{i}"], home, True)

        report["first update, cold cache"] = first_update(0)
        warm = [first_update(i) for i in range(1, options.repetitions + 1)]
        report["first update, warm cache"] = median_run(warm)
    for name, words in LISTS.items():
        report[name] = median_run(
            [measure_command(words, dict(os.environ)) for _ in range(options.repetitions)]
        )
    report["load at the end"] = os.getloadavg()[0]
    text = json.dumps(report, indent=1)
    RESULT.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
