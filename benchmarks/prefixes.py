"""Updates with a prompt once for all its responses, against rows of one response each.

    python benchmarks/prefixes.py --save      # minutes on a CPU

The small model of cpu_peers.py, and random weights in the shape of SmolLM2-135M (10 GB of memory); GRPO's
loss, `--model.remat dots`; prompts x 8 responses in one micro-batch. For each size the two updates alternate.
Reported are medians of wall and CPU seconds, and the paired ratio; the temporary memory of the compiled
program, which no load changes; loss and gradient norm agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import jax
import numpy as np
import ours
import work
from machine import kept_results, report_head, results_path

from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.models import TransformerConfig


class Size(NamedTuple):
    """A model and the tokens of an update: of a prompt, and of each of the 8 responses to it."""

    prompts: int
    prompt_tokens: int
    response_tokens: int
    model: TransformerConfig = ours.MODEL


SIZES = {
    "64 + 8 x 128": Size(4, 64, 128),
    "1024 + 8 x 64": Size(1, 1024, 64),
    "38 + 8 x 11": Size(8, 38, 11),
    "SmolLM2-135M, 1024 + 8 x 64": Size(1, 1024, 64, ours.LLAMA),
}


def make_items(size: Size) -> list[PackItem]:
    """Return random responses to random prompts."""
    rng = np.random.default_rng(0)
    mask = np.r_[np.zeros(size.prompt_tokens), np.ones(size.response_tokens)].astype(np.float32)
    draw = lambda count: rng.integers(3, work.SMALL.vocab, count, dtype=np.int32)
    firsts = [draw(size.prompt_tokens) for _ in range(size.prompts)]
    return [
        PackItem(np.r_[first, draw(size.response_tokens)], mask, {"advantages": mask * rng.normal()})
        for first in firsts
        for _ in range(work.SMALL.group)
    ]


def learner(size: Size, share: bool) -> Learner:
    """Return the learner whose micro-batch holds all responses."""
    row = size.prompt_tokens + size.response_tokens
    rows = {"row_tokens": row, "rows": size.prompts * work.SMALL.group}
    if share:
        row += (work.SMALL.group - 1) * (size.response_tokens + 1)
        rows = {"row_tokens": row, "rows": size.prompts, "share_prefixes": True}
    return ours.learner(size.model, rows)


def measure_size(size: Size, repetitions: int) -> dict[str, Any]:
    """Return seconds and memory of both updates."""
    sequences = make_items(size)
    learners = {name: learner(size, share=name == "shared") for name in ("shared", "apart")}
    states = {name: ours.fresh_state(built) for name, built in learners.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in learners}
    numbers: dict[str, dict[str, float]] = {name: {} for name in learners}
    for repetition in range(repetitions + 1):
        for name, built in learners.items():
            wall, cpu = time.perf_counter(), time.process_time()
            states[name], metrics = built.update(states[name], [sequences])
            jax.block_until_ready(states[name])
            if repetition:
                seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            numbers[name] |= {key: float(metrics[key]) for key in ("loss", "grad_norm")}
    for name, built in learners.items():
        program = built.update_programs(("advantages",), microbatches=1)["accumulate"]
        with jax.set_mesh(built.mesh):
            compiled = program.fn.lower(*program.args, **program.static).compile()
        numbers[name]["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
        numbers[name]["wall"], numbers[name]["cpu"] = map(statistics.median, zip(*seconds[name], strict=True))
    ratios = [
        [a / b for a, b in zip(apart, shared, strict=True)]
        for apart, shared in zip(seconds["apart"], seconds["shared"], strict=True)
    ]
    wall, cpu = map(statistics.median, zip(*ratios, strict=True))
    memory = numbers["apart"]["temporary_bytes"] / numbers["shared"]["temporary_bytes"]
    return {**numbers, "ratio": {"wall": wall, "cpu": cpu, "temporary_bytes": memory}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--save", action="store_true", help="write results/prefixes_PROCESSOR.json")
    options = parser.parse_args()
    report: dict[str, Any] = {
        **report_head(),
        "sizes": {},
    }
    for name in options.sizes:
        result = {"commit": report["commit"], **measure_size(SIZES[name], options.repetitions)}
        report["sizes"][name] = result
        parts = ", ".join(f"{key} {value:.2f}" for key, value in result["ratio"].items())
        print(f"{name} tokens, apart / shared: {parts}", flush=True)
    if options.save:
        path = results_path("prefixes", report["device"])
        report["sizes"] = kept_results(path, "sizes", report["versions"]) | report["sizes"]
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
