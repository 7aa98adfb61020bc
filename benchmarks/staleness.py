"""Stale tokens in asynchronous rollout on real SGLang servers: the default against `--algo.old policy`.

    python benchmarks/staleness.py --sglang .venv-sglang/bin/python --output benchmarks/results/staleness.json

grpo_tiny.py with 200 warm-up steps and 12 GRPO steps on two SGLang servers on a CPU, three seeds:
synchronous; with --rollout.max_staleness 1 (old log-probs are the rollout's); the same with --algo.old
policy, which treats responses of older weights as on-policy. Prints held-out accuracy at 0, 6 and 12 steps.
About 4 minutes a run on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import report_head, sglang_version

FLAGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --max-total-tokens 16384 "
    "--disable-overlap-schedule"
)
COMMON = (
    "--config grpo_tiny.py --steps 12 --warm_start.steps 200 --eval.every 6 --rollout.engine sglang "
    "--rollout.launch 2 --rollout.slots 128"
)
MODES = {
    "synchronous": "--rollout.max_staleness 0",
    "asynchronous": "--rollout.max_staleness 1",
    "asynchronous, --algo.old policy": "--rollout.max_staleness 1 --algo.old policy",
}


def held_out_accuracies(python: str, mode: str, seed: int) -> list[float]:
    """Run one training and return held-out accuracy at each evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxrl_llm.train", *COMMON.split(), *MODES[mode].split()]
        command += ["--seed", str(seed), "--run_dir", f"{folder}/run", "--servers.python", python]
        subprocess.run([*command, "--servers.flags", FLAGS], check=True, stdout=subprocess.DEVNULL)
        rows = map(json.loads, Path(folder, "run/metrics.jsonl").read_text().splitlines())
        return [row["eval/pass@1"] for row in rows if row.get("eval/pass@1") is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sglang", required=True, help="interpreter that has sglang")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    head, results = report_head(), {}
    head["versions"] |= {"sglang": sglang_version(options.sglang)}
    for mode in MODES:
        results[mode] = [held_out_accuracies(options.sglang, mode, seed) for seed in range(options.seeds)]
        print(mode, results[mode], flush=True)
    if options.output:
        options.output.write_text(json.dumps({**head, "pass@1": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
