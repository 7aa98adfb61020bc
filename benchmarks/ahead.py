"""Asynchronous against synchronous rollout: time of a step, idle time, and learning.

    python benchmarks/ahead.py                       # 3 seeds, about 15 minutes on 2 quiet cores
    python benchmarks/ahead.py --sglang .venv-sglang/bin/python      # the same, about 20 minutes

Without `--sglang`, two fake servers (of the tests: our engine behind SGLang's JSON) take 20 ms a
token whatever their number of concurrent responses, as accelerators do; their time costs the trainer nothing.
With it, two real SGLang servers share one core, and the trainer has another. Weights, tokens and learning are
real in both. One prompt in 32 has a long response (configs/grpo_async.py). `--oversample 1.5` adds runs with
--rollout.oversample and twice the bound of staleness.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

from machine import report_head

from jaxrl_llm.configs import grpo_async
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.export import save_description
from jaxrl_llm.rollout.config import RolloutConfig, ServersConfig
from jaxrl_llm.rollout.servers.launch import ServerProcesses

ROOT = Path(__file__).parents[1]
OUT, RESULTS = Path("runs/ahead"), ROOT / "benchmarks/results"
TOKEN_SECONDS = "0.02"
TOTAL_SECONDS = "steps but the first, s"
STEPS, SKIPPED = 16, 4
METRICS = (
    "time/step",
    "tokens_per_second",
    "trainer/idle_fraction",
    "servers/idle_fraction",
    "servers/occupancy",
    "staleness/mean",
    "staleness/max",
    "response_tokens/mean",
)


def train_async(run_dir: Path, *arguments: str) -> list[dict]:
    """Run grpo_async.py and return the rows of its metrics.jsonl."""
    common = ("--log.progress", "none", "--log.tensorboard", "false", "--run_dir", str(run_dir))
    words = [sys.executable, "-m", "jaxrl_llm.train", "--config", "grpo_async.py", *common, *arguments]
    path = os.pathsep.join([str(ROOT / "tests/rollout/servers/stub"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        words, check=True, env={**os.environ, "PYTHONPATH": path, "FAKE_SGLANG_PACE": TOKEN_SECONDS}
    )
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def summarize_run(rows: list[dict]) -> dict[str, float]:
    """Return seconds of all steps but the first, which compiles; medians of the later ones; accuracy."""
    steps = [row for row in rows if row["kind"] == "train"]
    summary = {TOTAL_SECONDS: sum(row["time/step"] for row in steps[1:])}
    summary |= {name: statistics.median(row[name] for row in steps[SKIPPED:]) for name in METRICS}
    accuracy = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    return {**summary, "pass@1 before": accuracy[0], "pass@1 after": accuracy[-1]}


@contextlib.contextmanager
def pinned_servers(python: str) -> Iterator[tuple[str, ...]]:
    """Run two servers on one core, and this process and its children on another.

    Yields the arguments of training.
    """
    config = grpo_async.get_config()
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        shell = save_description(
            config.model.architecture, Path(folder) / "shell", make_tokenizer(), config.rollout.dtype
        )
        settings = ServersConfig(python=python, flags=config.servers.flags)
        os.sched_setaffinity(0, {second})
        launched = ServerProcesses(RolloutConfig(engine="sglang", launch=2), settings, shell, Path(folder))
        os.sched_setaffinity(0, {first})
        try:
            launched.wait()
            yield ("--rollout.launch", "0", "--rollout.servers", *launched.urls, "--rollout.slots", "32")
        finally:
            launched.close()


def compare_rollouts(
    servers: tuple[str, ...], max_staleness: int, *, oversample: float, seeds: Sequence[int]
) -> dict[str, list[dict[str, float]]]:
    """Return label -> the summary of each seed."""
    cases = {"synchronous": (0, 1.0), "asynchronous": (max_staleness, 1.0)}
    if oversample > 1:
        cases["over-sampled"] = (2 * max_staleness, oversample)
    results: dict[str, list] = {label: [] for label in cases}
    for seed in seeds:
        start, own = OUT / f"start_{seed}", ("--seed", str(seed))
        alone = ("--rollout.engine", "native", "--rollout.launch", "0", "--rollout.max_staleness", "0")
        train_async(start, *own, *alone, "--steps", "0")
        begin = ("--model.path", str(start / "hf"), "--model.tokenizer", "tiny", "--warm_start.steps", "0")
        for label, (staleness, factor) in cases.items():
            more = ("--rollout.max_staleness", str(staleness), "--rollout.oversample", str(factor), *servers)
            often = ("--steps", str(STEPS), "--eval.every", str(STEPS))
            run_dir = OUT / f"{label}_{seed}"
            shutil.rmtree(run_dir, ignore_errors=True)  # an earlier run would be continued
            rows = train_async(run_dir, *own, *begin, *more, *often)
            results[label].append(summarize_run(rows))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sglang", help="interpreter that has SGLang; without it the servers are fake")
    parser.add_argument(
        "--window", type=int, default=2, help="--rollout.max_staleness of the asynchronous runs"
    )
    parser.add_argument(
        "--oversample", type=float, default=1.0, help="--rollout.oversample of further runs; 1 = none"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    head = report_head(computes=False)
    real = options.sglang
    fake = contextlib.nullcontext(("--servers.python", sys.executable))
    with pinned_servers(real) if real else fake as servers:
        results = compare_rollouts(
            servers, options.window, oversample=options.oversample, seeds=options.seeds
        )
    seconds = {label: [run[TOTAL_SECONDS] for run in runs] for label, runs in results.items()}
    slow = seconds.pop("synchronous")
    ratios = {label: [s / f for s, f in zip(slow, fast, strict=True)] for label, fast in seconds.items()}
    pace = None if real else float(TOKEN_SECONDS)
    report = {**head, "pace_seconds": pace, "max_staleness": options.window}
    report |= {"speedup": ratios, "runs": results}
    text = json.dumps(report, indent=2)
    name = f"ahead_real_{options.window}" if real else "ahead"
    (RESULTS / f"{name}{'_oversample' * (options.oversample > 1)}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
