"""Responses ahead of the trainer against taking turns: time of a step, idle time, and what is learned.

    python benchmarks/ahead.py                       # 3 seeds, about 15 minutes on 2 quiet cores
    python benchmarks/ahead.py --sglang .venv-sglang/bin/python      # the same, about 20 minutes

Without `--sglang`, two stand-in servers (those of the tests: our own engine behind SGLang's JSON) take 20 ms
a token however many responses they write, as accelerators do; so their time costs the trainer nothing. With
it, two servers of SGLang's own have one core, and the trainer another. Weights, tokens and learning are real
in both. Of 32 prompts one wants a long response (configs/grpo_async.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm.configs import grpo_async
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.export import save_description
from jaxrl_llm.rollout.config import RolloutConfig, SGLangConfig
from jaxrl_llm.rollout.sglang.launch import ServerProcesses

ROOT = Path(__file__).parents[1]
OUT, RESULTS = Path("runs/ahead"), ROOT / "benchmarks/results"
PACE = "0.02"
TAKEN = "steps but the first, s"
SEEDS, STEPS, SKIPPED = (0, 1, 2), 16, 4
MEASURED = (
    "time/step",
    "tokens_per_second",
    "trainer/idle_fraction",
    "servers/idle_fraction",
    "servers/occupancy",
    "staleness/mean",
    "staleness/max",
)


def train(run_dir: Path, *arguments: str) -> list[dict]:
    """Rows of metrics.jsonl of a run of grpo_async.py."""
    common = ("--log.progress", "none", "--log.tensorboard", "false", "--run_dir", str(run_dir))
    words = [sys.executable, "-m", "jaxrl_llm.train", "--config", "grpo_async.py", *common, *arguments]
    path = os.pathsep.join([str(ROOT / "tests/rollout/sglang/stub"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": path, "FAKE_SGLANG_PACE": PACE})
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def measured(rows: list[dict]) -> dict[str, float]:
    """Seconds of all steps but the first, which compiles; medians after the first few; where it ended."""
    steps = [row for row in rows if row["kind"] == "train"]
    found = {TAKEN: sum(row["time/step"] for row in steps[1:])}
    found |= {name: statistics.median(row[name] for row in steps[SKIPPED:]) for name in MEASURED}
    passed = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    return {**found, "pass@1 before": passed[0], "pass@1 after": passed[-1]}


@contextlib.contextmanager
def on_a_core_of_their_own(python: str) -> Iterator[tuple[str, ...]]:
    """Two servers on one core; whoever is started inside has another. Yields the trainer's arguments."""
    config = grpo_async.get_config()
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        shell = save_description(
            config.model.architecture, Path(folder) / "shell", make_tokenizer(), config.rollout.dtype
        )
        settings = SGLangConfig(python=python, flags=config.sglang.flags)
        os.sched_setaffinity(0, {second})
        launched = ServerProcesses(RolloutConfig(engine="sglang", launch=2), settings, shell, Path(folder))
        os.sched_setaffinity(0, {first})
        try:
            launched.wait()
            yield ("--rollout.launch", "0", "--rollout.servers", *launched.urls, "--rollout.slots", "32")
        finally:
            launched.close()


def compare(servers: tuple[str, ...], window: int) -> dict[str, list[dict[str, float]]]:
    """Label -> what was measured of each seed."""
    results: dict[str, list] = {"take turns": [], "ahead": []}
    for seed in SEEDS:
        start, own = OUT / f"start_{seed}", ("--seed", str(seed))
        alone = ("--rollout.engine", "native", "--rollout.launch", "0", "--rollout.max_staleness", "0")
        train(start, *own, *alone, "--steps", "0")
        begin = ("--model.path", str(start / "hf"), "--model.tokenizer", "tiny", "--warm_start.steps", "0")
        for label, steps_ahead in (("take turns", 0), ("ahead", window)):
            more = ("--rollout.max_staleness", str(steps_ahead), *servers)
            often = ("--steps", str(STEPS), "--eval.every", str(STEPS))
            run_dir = OUT / f"{label.replace(' ', '_')}_{seed}"
            shutil.rmtree(run_dir, ignore_errors=True)  # a run of before would be continued
            rows = train(run_dir, *own, *begin, *more, *often)
            results[label].append(measured(rows))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sglang", help="interpreter that has SGLang; without it stand-ins take its place")
    parser.add_argument("--window", type=int, default=2, help="--rollout.max_staleness of those ahead")
    options = parser.parse_args()
    real = options.sglang
    stand_ins = contextlib.nullcontext(("--sglang.python", sys.executable))
    with on_a_core_of_their_own(real) if real else stand_ins as servers:
        results = compare(servers, options.window)
    taken = {label: [run[TAKEN] for run in runs] for label, runs in results.items()}
    ratios = [slow / fast for slow, fast in zip(*taken.values(), strict=True)]
    report = {"pace_seconds": None if real else float(PACE), "max_staleness": options.window}
    report |= {"speedup": ratios, "runs": results}
    text = json.dumps(report, indent=2)
    (RESULTS / (f"ahead_real_{options.window}.json" if real else "ahead.json")).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
