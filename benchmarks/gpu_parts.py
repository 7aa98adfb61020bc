"""The parts of benchmarks/gpu.py: generators of (name of a result, value), in the order of gpu_targets.py."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import start
import strict
from gpu_recipes import (
    EXPERTS,
    FP8_CACHE,
    HEAD,
    LONGEST,
    MODEL,
    ROW_MULTIPLE,
    SMOLLM2,
    WARM_UP,
    Trainer,
    attention_shapes,
    bytes_name,
    delta_shape,
    qlora_recipe,
    qlora_rows,
    random_items,
    recipes,
)
from gpu_targets import CARD, compiled_result, kind_of
from machine import ROOT

from jaxrl_kernels.chips import peak_flops
from jaxrl_kernels.decode_attention import bench as decode
from jaxrl_kernels.flash_attention import bench as attention
from jaxrl_kernels.gated_delta import bench as delta
from jaxrl_kernels.grouped_matmul import bench as grouped
from jaxrl_kernels.linear_logprob import bench as logprob
from jaxrl_llm import models
from jaxrl_llm.models.flops import training_flops
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

Results = Iterator[tuple[str, Any]]


def update_part(part: str, name: str, small: bool, repeat: int) -> Results:
    """Measure tokens of rows a second of a whole update: packing, micro-batches, optimizer."""
    config = recipes(small)[part]
    trainer, items = Trainer(config), random_items(config)
    learner = trainer.learner
    yield "first update with its compilation, s", trainer.update(items)
    batches = learner.scorer.batches(items, learner.config.rows)
    rows = sum(int((batch.segments > 0).any(axis=1).sum()) for batch in batches)
    seconds = statistics.median(trainer.update(items) for _ in range(repeat))
    yield f"{name}, tokens/s", rows * config.row_tokens / seconds
    yield "seconds of an update, rows, tokens of a row", [seconds, rows, config.row_tokens]
    if peak := peak_flops(jax.devices()[0].device_kind):
        flops = training_flops(learner.model, [config.row_tokens] * rows)
        yield f"{name}, share of the peak", flops / seconds / peak
    yield "peak of the device's memory, bytes", peak_memory()


def peak_memory() -> int:
    """Return the most bytes that the arrays of this process had on the device; 0 = unknown."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def attention_part(small: bool) -> Results:
    """Measure TFLOP/s over the visible area, forward and backward, of our kernels."""
    name = attention.OF_PLATFORM[jax.devices()[0].platform][0]
    for label, shape in attention_shapes(small).items():
        (row,) = attention.compare(shape, (name,), 0.1 if small else 0.5)
        rates = (row, row) if isinstance(row, str) else row.rates(shape)
        yield from zip(
            (f"attention {way}, {label}, TFLOP/s" for way in ("forward", "backward")), rates, strict=True
        )


def rollout_part(small: bool) -> Results:
    """Measure output tokens a second of the native engine, every response of full length."""
    config = recipes(small)["rollout"]
    model, slots, length = config.model.architecture, config.rollout.slots, config.max_response_tokens
    engine = NativeEngine(config.rollout, model, make_mesh(MeshConfig(), jax.devices()[:1]))
    engine.publish(jax.jit(models.init, static_argnums=0)(model, jax.random.key(0)), 1)
    rng = np.random.default_rng(0)
    ids = lambda: rng.integers(2, model.vocab_size, config.max_prompt_tokens).astype(np.int32)

    def seconds(prompts: int, each: int, tokens: int) -> float:
        todo = [Request(ids(), i, each, tokens) for i in range(prompts)]
        times = []
        for _ in range(4):  # the first one compiles
            begin = time.perf_counter()
            engine.generate(todo, SamplingConfig(ignore_eos=True), jax.random.key(0))
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    whole = seconds(slots, 1, length)
    yield "rollout of Qwen3-0.6B, 256 prompts, tokens/s", slots * length / whole
    of_groups = seconds(slots // 8, 8, length)
    yield "rollout of Qwen3-0.6B, 32 prompts x 8, tokens/s", slots * length / of_groups
    decoded = (whole - seconds(slots, 1, length // 2)) / (length - length // 2)
    yield "decoding Qwen3-0.6B, 256 slots, ms a token", 1e3 * decoded
    planned = compiled_result(kind_of(jax.devices()[0].device_kind), "rollout", "rollout: decode")
    yield "the roof of it by `plan`, ms a token", planned["roof_ms"] if planned else None
    yield "peak of the device's memory, bytes", peak_memory()


def grouped_part(small: bool) -> Results:
    """Measure TFLOP/s of grouped products, with Zipf's loads and balanced, and of tokamax if installed."""
    shape, own = (256, 4, 64, 64) if small else EXPERTS, grouped.implementations()
    for name in (own[0], *(one for one in own if one == grouped.PEER)):
        for label, skew in (("by Zipf", 1.0), ("balanced", 0.0)):
            row = grouped.measure_product(name, *shape, skew=skew, repeat=3 if small else 10)
            whose = "" if name == own[0] else f", {name}"
            yield f"grouped products {label}, forward, TFLOP/s{whose}", row["forward_tflops"]
            yield f"grouped products {label}, gradients, TFLOP/s{whose}", row["gradients_tflops"]


def delta_part(small: bool) -> Results:
    """Measure the gated delta rule, ours and flash-linear-attention's."""
    repeat, name = (3, "auto") if small else (10, "pallas_gpu")  # which "auto" leaves out
    ours, peer = None, None
    for row in delta.compare_delta(delta_shape(small), repeat, name):
        if isinstance(row, str):
            yield "gated delta rule, forward and backward, times as fast as the peer", row
            return
        yield f"gated delta rule, {row['implementation']}", row
        ours, peer = (row, None) if ours is None else (ours, row)
    for name, key in (("forward and backward", "both_s"), ("forward", "forward_s")):
        yield f"gated delta rule, {name}, times as fast as the peer", peer[key] / ours[key]


def qlora_part(small: bool) -> Results:
    """Train rows around the longest one by `plan`, in the memory of an H100 of 80 GB."""
    planned, multiple = 512, 16
    if not small:
        planned, multiple = compiled_result(CARD, "qlora", LONGEST), ROW_MULTIPLE
        if not planned:
            raise FileNotFoundError(f"no row by plan: python benchmarks/gpu.py --compile {CARD} --only qlora")
    yield LONGEST, planned
    trainer = Trainer(qlora_recipe(planned, small))
    for row in qlora_rows(planned, multiple):
        yield "row that was tried last, tokens", row
        seconds = seconds_of_row(trainer, row, small)
        yield f"a row of {row} tokens, seconds with compilation, 0 = out of memory", seconds
        if seconds:
            yield "QLoRA of Qwen3-8B, longest row that trains in 80 GB, tokens", row
            expected = compiled_result(CARD, "qlora", bytes_name(row))
            difference = abs(peak_memory() / expected - 1) if expected else "no plan of this row"
            yield "QLoRA of Qwen3-8B, peak of memory against `plan`, difference", difference
            break


def seconds_of_row(trainer: Trainer, row: int, small: bool) -> float:
    """Return the seconds of an update with a row, with its compilation; 0.0 = it does not fit."""
    config = qlora_recipe(row, small)
    trainer.learner = trainer.make_learner(config)
    try:
        return trainer.update(random_items(config))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return 0.0


def start_part(small: bool) -> Results:
    """Measure seconds from the command to its first update, with an empty compilation cache and again."""
    words = [*start.RECIPE, *start.ONE_STEP]
    if not small:
        if not MODEL.exists():
            raise FileNotFoundError(f"{MODEL.relative_to(ROOT)} is missing: make weights")
        words = [*SMOLLM2, "--model.path", str(MODEL)]
    with tempfile.TemporaryDirectory() as home:
        for label in ("cold", "warm"):
            run_dir = str(Path(home) / label)
            command, environment = [*words, "--run_dir", run_dir], start.without_cache(home)
            run = start.measure_command(command, environment, first_step=True)
            yield f"command to first update of grpo_smollm2.py, {label} cache, s", run["wall"]
            yield f"its phases, {label} cache", run["phases"]


def strict_part(small: bool) -> Results:
    """Measure mismatch and cost of strict mode, in bfloat16 and with an 8-bit cache."""
    steps, skipped = (2, 1) if small else (12, 4)
    for label, flags in {"bfloat16": (), "bfloat16 with a cache of fp8": FP8_CACHE}.items():
        seconds = []
        for is_strict in (True, False):
            name = f"{'strict mode' if is_strict else 'without it'}, {label}"
            try:
                rows = strict.train_steps("bfloat16", is_strict, steps=steps, flags=(*WARM_UP, *flags))
            except RuntimeError as error:  # such as a refused combination
                yield f"{name}, largest mismatch, nats", f"failed: {error}"
                break
            yield f"{name}, largest mismatch, nats", max(row["mismatch/max_abs"] for row in rows)
            seconds.append(statistics.median(row["time/step"] for row in rows[skipped:]))
            yield f"{name}, seconds a step", seconds[-1]
        else:
            yield f"strict mode, {label}, times the seconds of a step", seconds[0] / seconds[1]


def kernels_part(small: bool) -> Results:
    """Measure log-probs of a linear head, and attention of decoded tokens."""
    row = logprob.measure("auto", *((256, 64, 512) if small else HEAD), repeat=3)
    yield "linear_logprob, forward, TFLOP/s", row["forward_tflops"]
    yield "linear_logprob, both passes, TFLOP/s", row["tflops_done"]
    sizes = {"slots": 4, "context": 60} if small else {}
    row = decode.measure_decoding(page=16 if small else 64, repeat=3, **sizes)
    yield "decode_attention, 256 slots of 576 tokens, TB/s", row["gigabytes_per_second"] / 1e3


def updates(part: str, name: str, repeat: int = 1) -> Callable[[bool], Results]:
    return lambda small: update_part(part, name, small, repeat)


PARTS: dict[str, Callable[[bool], Results]] = {
    "attention": attention_part,
    "update": updates("update", "GRPO update of Qwen3-0.6B, rows of 4,624", 3),
    "rollout": rollout_part,
    "grouped_matmul": grouped_part,
    "gated_delta": delta_part,
    "update, rows of 16k": updates("update, rows of 16k", "GRPO update of Qwen3-0.6B, rows of 16k", 5),
    "LoRA, rows of 16k": updates("LoRA, rows of 16k", "LoRA 16 of Qwen3-4B, rows of 16k", 3),
    "update, rows of 65k": updates("update, rows of 65k", "GRPO update of Qwen3-0.6B, rows of 65k"),
    "LoRA, rows of 65k": updates("LoRA, rows of 65k", "LoRA 16 of Qwen3-4B, rows of 65k"),
    "qlora": qlora_part,
    "start": start_part,
    "strict": strict_part,
    "more kernels": kernels_part,
}
