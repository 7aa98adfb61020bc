"""Native rollout on separate devices: synchronous against asynchronous, time of a step and idle time.

    python benchmarks/own_devices.py                 # about 10 minutes on 2 quiet cores

Eight virtual CPU devices in one process: the policy has four (`--devices 0:4`), the rollout one of the
others (`--rollout.devices 4:5`: XLA runs programs of several CPU devices one at a time, so that a rollout
on all four would wait for the trainer). Virtual devices share the cores of the machine, on which rollout
and trainer would compete. Therefore each decoded token takes a simulated delay besides, in which the host
does nothing, as it does while an accelerator decodes. Weights, tokens and learning are real. The
synchronous runs have the same devices and the same delay. `--delay 0` leaves the delay out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from machine import report_head

ROOT = Path(__file__).parents[1]
OUT, RESULTS = Path("runs/own_devices"), ROOT / "benchmarks/results"
STEPS, SKIPPED = 12, 2
DEVICES = ("--devices", "0:4", "--rollout.devices", "4:5")
METRICS = ("time/step", "time/rollout", "time/update", "trainer/idle_fraction", "rollout/idle_fraction")

DELAYED = """
import sys, time
from jaxrl_llm.rollout.native import schedule
from jaxrl_llm.train import main

delay, decode = float(sys.argv.pop(1)), schedule.Scheduler._decode

def delayed(self, sampling):
    chunk = decode(self, sampling)
    time.sleep(delay * int(chunk.steps))
    return chunk

schedule.Scheduler._decode = delayed
sys.exit(main(sys.argv[1:]))
"""
"""argv: seconds a token, then the arguments of training."""


def train_on_own_devices(run_dir: Path, delay: float, *arguments: str) -> list[dict]:
    """Run grpo_tiny.py and return the rows of its metrics.jsonl."""
    shutil.rmtree(run_dir, ignore_errors=True)  # an earlier run would be continued
    common = ("--log.progress", "none", "--log.tensorboard", "false", "--run_dir", str(run_dir))
    words = ["-c", DELAYED, str(delay), "--config", "grpo_tiny.py", *common, *DEVICES, *arguments]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, *words], check=True, env={**os.environ, **flags})
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def summarize_steps(rows: list[dict]) -> dict[str, float]:
    """Return medians of the steps but the first ones, which compile."""
    steps = [row for row in rows if row["kind"] == "train"][SKIPPED:]
    medians = {name: statistics.median(row[name] for row in steps) for name in METRICS if name in steps[0]}
    return {**medians, "staleness/max": max(row["staleness/max"] for row in steps)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--delay", type=float, default=0.03, help="simulated seconds a decoded token, besides its compute"
    )
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    head = report_head()
    common = ("--steps", str(STEPS), "--warm_start.steps", "5", "--eval.every", "0")
    runs: dict[str, list] = {}
    for seed in range(options.seeds):
        for staleness in (0, 1, 2):
            more = (*common, "--seed", str(seed), "--rollout.max_staleness", str(staleness))
            rows = train_on_own_devices(OUT / f"{staleness}_{seed}", options.delay, *more)
            runs.setdefault(f"max_staleness {staleness}", []).append(summarize_steps(rows))
    synchronous, *others = runs
    ratio = lambda a, b: a["time/step"] / b["time/step"]
    speedup = {
        label: [ratio(a, b) for a, b in zip(runs[synchronous], runs[label], strict=True)] for label in others
    }
    report = {**head, "simulated_seconds_per_token": options.delay, "devices": DEVICES}
    report["load_average"] = os.getloadavg()[2]  # of 15 minutes: other jobs take cores from both sides
    text = json.dumps({**report, "speedup": speedup, "runs": runs}, indent=2)
    (RESULTS / "own_devices.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
