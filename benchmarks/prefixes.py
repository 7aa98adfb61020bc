"""Updates with a prompt once for all its responses, against rows of one response each.

    python benchmarks/prefixes.py --save      # minutes on a CPU

The small model of cpu_peers.py, and random weights in the shape of SmolLM2-135M (10 GB of memory); GRPO's
loss, `--model.remat dots`; prompts x 8 responses in one micro-batch. For each size the two updates alternate.
Reported are medians of wall and CPU seconds, and the paired ratio; the temporary memory of the compiled
program, which no load changes; loss and gradient norm agree.
"""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import jax
import numpy as np
import ours
import work
from machine import measure_cases
from paired import medians, paired_ratios, timed

from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.structs import Metrics


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
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in learners}
    numbers: dict[str, dict[str, float]] = {}

    def update(name: str) -> Metrics:
        states[name], metrics = learners[name].update(states[name], [sequences])
        jax.block_until_ready(states[name])
        return metrics

    for _ in range(repetitions + 1):
        for name in learners:
            metrics, seconds = timed(functools.partial(update, name))
            runs[name].append(seconds)
            numbers[name] = {key: float(metrics[key]) for key in ("loss", "grad_norm")}
    measured = {name: rows[1:] for name, rows in runs.items()}  # the first repetition compiles
    for name, built in learners.items():
        program = built.update_programs(("advantages",), microbatches=1)["accumulate"]
        with jax.set_mesh(built.mesh):
            compiled = program.fn.lower(*program.args, **program.static).compile()
        numbers[name]["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
        numbers[name] |= medians(measured[name])
    ratio = {
        name: statistics.median(paired_ratios(measured["apart"], measured["shared"], name))
        for name in ("wall", "cpu")
    }
    memory = numbers["apart"]["temporary_bytes"] / numbers["shared"]["temporary_bytes"]
    return {**numbers, "ratio": ratio | {"temporary_bytes": memory}}


if __name__ == "__main__":
    measure_cases("prefixes", __doc__, SIZES, measure_size, part="sizes", repetitions=7)
