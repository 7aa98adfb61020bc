"""Rollout of a few long responses with drafts, against the same without.

    make models/SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/drafts.py --output benchmarks/results/drafts.json      # an hour on a CPU

SmolLM2-135M-Instruct in float32 generates responses to each of PROMPTS, the tail of a larger batch. Without
drafts (with the ring cache, the default on a CPU); with drafts in the first epoch; and in the second, with
the responses of the repetition before. The three alternate, with a new key in each repetition. Reported are
medians of wall and CPU time a token and of the paired ratios, the draft tokens that were read and accepted,
and the share of responses with the text of the ring: a token whose uniform number is next to the border of
two tokens may be another one after other rounding.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np
from machine import report_head
from paired import medians, paired_ratios, timed

from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.hf.tokenizer import load_tokenizer
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import Request, SamplingConfig
from jaxrl_llm.rollout.native.drafts import DraftMemory
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

ROWS = [("alpha", 12, "green"), ("beta", 7, "green"), ("gamma", 21, "red"), ("delta", 3, "red")]
FILE = ",\n".join(f'{{"name": "{name}", "size": {size}, "color": "{color}"}}' for name, size, color in ROWS)
PROMPTS = {
    "revision of a file": f"Repeat this file, with every size doubled:\n[{FILE}]",
    "table": "Write the multiplication table of 7, from 7 x 1 to 7 x 40, one line each.",
    "sum in steps": "Calculate 43 + 14 + 27 + 88 step by step, then check each step again.",
}
SETTINGS = {"ring": {"cache": "ring"}, "drafts": {"draft_tokens": 7}}
SECOND = "drafts, second epoch"
MODES = (*SETTINGS, SECOND)


def make_engines(path: str, slots: int) -> dict[str, NativeEngine]:
    """Return the engine of each mode, with the model's weights."""
    folder, mesh = resolve_model(path), make_mesh(MeshConfig(), jax.devices()[:1])
    model = read_config(folder)
    tokenizer, params = load_tokenizer(folder, model), load_params(folder, model)
    engines = {}
    for mode, settings in SETTINGS.items():
        engines[mode] = NativeEngine(RolloutConfig(slots=slots, **settings), model, mesh, tokenizer)
        engines[mode].publish(params, version=0)
    return engines | {SECOND: engines["drafts"]}


def measure_prompt(
    engines: dict[str, NativeEngine], prompt: str, tokens: int, sampling: SamplingConfig, *, repetitions: int
) -> dict[str, Any]:
    """Return milliseconds a token, speedups over the ring and acceptance of all modes."""
    tokenizer = engines["ring"].tokenizer
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    request = Request(np.array(ids, np.int32), 0, engines["ring"].config.slots, tokens)
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    earlier = DraftMemory()  # of the repetition before
    for repetition in range(repetitions + 1):
        texts: dict[str, list[list[int]]] = {}
        for mode, engine in engines.items():
            engine.memory = earlier if mode == SECOND else DraftMemory()
            key = jax.random.key(repetition)
            responses, seconds = timed(functools.partial(engine.generate, [request], sampling, key))
            texts[mode] = [t.response_ids.tolist() for t in responses]
            same = statistics.mean(map(list.__eq__, texts[mode], texts["ring"]))
            wall, cpu = (1e3 * value / engine.metrics["rollout/tokens"] for value in seconds.values())
            drafted = engine.metrics.get("rollout/draft_tokens", 0)
            accepted = round(drafted * engine.metrics.get("rollout/draft_accepted", 0))
            runs[mode].append(
                {
                    "wall_ms_per_token": wall,
                    "cpu_ms_per_token": cpu,
                    "tokens": engine.metrics["rollout/tokens"],
                    "draft_tokens": drafted,
                    "draft_tokens_accepted": accepted,
                    "same_text": same,
                }
            )
    measured = {mode: rows[1:] for mode, rows in runs.items()}  # the first repetition compiles
    report: dict[str, Any] = {"text": responses[0].text[:200]}
    for mode, rows in measured.items():
        report[mode] = medians(rows)
        for key in ("wall", "cpu"):
            speedups = paired_ratios(measured["ring"], rows, f"{key}_ms_per_token")
            report[mode][f"{key}_speedup"] = statistics.median(speedups)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--responses", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {
        **report_head(),
        "responses": options.responses,
        "max_tokens": options.tokens,
        "temperature": options.temperature,
        "prompts": {},
    }
    engines = make_engines(options.model, options.responses)
    for name, prompt in PROMPTS.items():
        sampling = SamplingConfig(temperature=options.temperature)
        result = measure_prompt(engines, prompt, options.tokens, sampling, repetitions=options.repetitions)
        report["prompts"][name] = result
        for mode in MODES:
            parts = ", ".join(f"{key} {value:.2f}" for key, value in result[mode].items())
            print(f"{name}, {mode}: {parts}", flush=True)
        if options.output:
            options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
