"""Seconds from a command to its first update, with a cold and a warm compilation cache, and to its help.

    python benchmarks/start.py        # benchmarks/results/start.json, about 2 minutes on 2 quiet cores
    python benchmarks/start.py --against OTHER    # also another checkout, in turn, and the ratios
    python benchmarks/start.py --against OTHER --model models/SmolLM2-135M-Instruct.Q4_1.gguf

Each command is a separate process. `grpo_tiny.py` with one step runs first with an empty compilation cache
in a temporary home directory, then with the programs of that run; both end with the line of the first step,
here an update of the SFT warm-up; with --model, of grpo_smollm2.py. CPU seconds are of the process, with
its threads; "peak MiB" is the most resident memory of the process until then. Reported are medians of the
repetitions, but of the cold start, which is measured once; "phases" come from the run's line. Ratios are
medians of ratios of neighbouring runs: below 1, this checkout needs less.
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
from paired import paired_ratios

Run = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
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


def measure_command(words: list[str], environment: dict[str, str], first_step: bool = False) -> Run:
    """Return wall and CPU seconds of a command.

    Args:
        first_step: up to the command's first step, at which it is ended; with its peak memory and phases.

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
            result = {**seconds(), "peak MiB": peak_mib(process.pid), "phases": found[1].strip()}
            process.kill()
            break  # children may keep the pipe open
    result = result or seconds()  # before `wait`, after which it has no entry in /proc
    process.stdout.close()
    failed = process.wait() != 0
    if "phases" not in result if first_step else failed:
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


def peak_mib(pid: int) -> float:
    """Return the most resident memory of a process on Linux so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def median_run(runs: list[Run]) -> Run:
    """Return the run of median wall time, with the median of the CPU seconds."""
    middle = sorted(runs, key=lambda run: run["wall"])[len(runs) // 2]
    return {**middle, "cpu": statistics.median(run["cpu"] for run in runs)}


def checkout(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return the environment in which commands run the code of a checkout."""
    places = [str(folder / name) for name in ("", "kernels", "importer")]
    return {**environment, "PYTHONPATH": os.pathsep.join(places)}


def ratios_between(rows: list[dict[str, Run]]) -> dict[str, list[float]]:
    """Return smallest, median and largest ratio of "this" to "other" in runs side by side, by number."""
    these, others = ([row[tree] for row in rows] for tree in ("this", "other"))
    spread = lambda values: [round(x, 3) for x in (min(values), statistics.median(values), max(values))]
    numbers = [name for name in ("wall", "cpu", "peak MiB") if name in these[0]]
    return {name: spread(paired_ratios(these, others, name)) for name in numbers}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--model", type=Path, help="SmolLM2 as a GGUF file: grpo_smollm2.py starts with it")
    options = parser.parse_args()
    report: dict[str, Any] = report_head()
    trees = {"this": ROOT} | ({"other": options.against.resolve()} if options.against else {})
    recipe = [*RECIPE, *ONE_STEP]
    if options.model:
        model = ["--model.path", str(options.model.resolve())]
        recipe = ["--config", "grpo_smollm2.py", *model, "--steps", "1", "--eval.every", "0"]

    def in_turn(words: list[str], homes: dict[str, dict[str, str]], run: str = "") -> dict[str, Run]:
        """Return the run of a command in each checkout; `run` = the name of its run directory, to train."""
        place = lambda home: ["--run_dir", f"{home['HOME']}/{run}"] if run else []
        return {
            tree: measure_command([*words, *place(home)], home, bool(run)) for tree, home in homes.items()
        }

    with tempfile.TemporaryDirectory() as folder:
        homes = {tree: checkout(path, without_cache(f"{folder}/{tree}")) for tree, path in trees.items()}
        for home in homes.values():
            Path(home["HOME"]).mkdir()
        rows = {"first update, cold cache": [in_turn(recipe, homes, "cold")]}
        times = range(options.repetitions)
        rows["first update, warm cache"] = [in_turn(recipe, homes, f"warm_{i}") for i in times]
        for name, words in LISTS.items():
            rows[name] = [in_turn(words, homes) for _ in times]
    for name, runs in rows.items():
        report[name] = median_run([run["this"] for run in runs])
        if options.against:
            report[name]["ratios to the other"] = ratios_between(runs)
    report["load at the end"] = os.getloadavg()[0]
    text = json.dumps(report, indent=1)
    stem = f"start_{options.model.stem.split('-')[0].lower()}" if options.model else "start"
    RESULT.with_stem(stem).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
