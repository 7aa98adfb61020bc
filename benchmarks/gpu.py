"""Kernels, trainer and rollout on one Hopper GPU, against published numbers.

    python benchmarks/gpu.py                       # on a GPU: benchmarks/results/gpu_<device>.json
    python benchmarks/gpu.py --only update rollout # these parts alone; the others keep their results
    python benchmarks/gpu.py --compile h100        # no GPU: the same programs through the CUDA compiler
    python benchmarks/gpu.py --small               # any device, tiny shapes: a test of the script

Targets, on an H100: attention forward 579 TFLOP/s (FlashAttention-3, causal, head_dim 128, 4k tokens; arXiv
2407.08608) and backward 450, packed rows within 10% of whole ones; linear_logprob 670 (Liger, hidden 4096,
vocabulary 131072); grouped_matmul 590 forward, 500 with Zipf's loads, 450 for gradients, no less than
tokamax where it is installed (shapes of Qwen3-30B-A3B); decode 85% of memory bandwidth and 12k tokens/s of a
Qwen3-0.6B, 512 in and 128 out (vLLM); a GRPO update of it 36k tokens/s. Each part runs in a process of its
own: its peak of memory is its own, and one that fails or hangs ends alone. `--compile` needs `pip install
'jaxrl-llm[plan]'`; it proves that programs compile and what memory they take, and no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from machine import report_head

from jaxrl_kernels.chips import CHIPS, GPUS, peak_flops
from jaxrl_kernels.decode_attention import bench as decode
from jaxrl_kernels.flash_attention import bench as attention
from jaxrl_kernels.flash_attention.bench import Shape
from jaxrl_kernels.grouped_matmul import bench as grouped
from jaxrl_kernels.grouped_matmul.api import grouped_matmul
from jaxrl_kernels.linear_logprob import bench as logprob
from jaxrl_kernels.linear_logprob.api import linear_logprob
from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.builders.models import make_stages
from jaxrl_llm.builders.sizes import make_meshes
from jaxrl_llm.config import DataConfig, ModelConfig, RolloutConfig, SourceConfig, TrainConfig
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.flops import training_flops
from jaxrl_llm.plan.compiled import open_target
from jaxrl_llm.plan.plan import make_plan
from jaxrl_llm.plan.topology import parse_topology
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

RESULTS = Path(__file__).parent / "results"
QWEN = TransformerConfig()  # the shape of Qwen3-0.6B
QWEN_EXPERTS = (131_072, 128, 2048, 768)
"""Rows, experts, hidden size and width of an expert of Qwen3-30B-A3B: 16k tokens, eight experts each."""
TINY = replace(QWEN, vocab_size=512, hidden_size=64, mlp_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
               head_dim=16)  # fmt: skip


def gpu_recipe(
    model: TransformerConfig, tokens: int, prompt: int, response: int, *, slots: int, share: bool = True
) -> TrainConfig:
    """Return the config of a GRPO update of eight micro-batches of `tokens` tokens, 8 responses a prompt."""
    return TrainConfig(
        run_dir="runs/gpu",
        algo=grpo.Config(kl_coef=0.0),
        prompts_per_step=max(tokens // (prompt + response), 1),
        responses_per_prompt=8,
        share_prefixes=share,
        tokens_per_device=tokens,
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        model=ModelConfig(architecture=model, tokenizer="tiny", dtype="bfloat16", remat="dots"),
        rollout=RolloutConfig(slots=slots, dtype="bfloat16"),
        data=DataConfig(train=(SourceConfig(path="task:arithmetic"),)),
    )


def measure_attention(shape: Shape, seconds: float) -> dict[str, Any]:
    """Measure TFLOP/s over the visible area, forward and backward, of all implementations, with packing."""
    results: dict[str, Any] = {"shape": shape._asdict()}
    names = attention.OF_PLATFORM[jax.devices()[0].platform]
    for label, one in {"whole rows": shape, "4 sequences a row": shape._replace(packed=4)}.items():
        rows = {}
        for row in attention.compare(one, names, seconds):
            if isinstance(row, str):
                rows[row.partition(":")[0]] = row
            else:
                rows[row.name] = dict(zip(("forward", "backward"), row.rates(one), strict=True))
        results[label] = rows
    return results


def measure_grouped(shape: tuple[int, int, int, int], repeat: int) -> list[dict[str, Any] | str]:
    """Measure TFLOP/s of grouped products, balanced and with Zipf's loads; what fails is recorded."""
    rows = []
    for name in grouped.implementations():
        for skew in (0.0, 1.0):
            try:
                rows.append(grouped.measure_product(name, *shape, skew=skew, repeat=repeat))
            except Exception as error:  # such as memory for XLA's dense product
                rows.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    return rows


def measure_update(config: TrainConfig, repeat: int) -> dict[str, float]:
    """Measure tokens a second of a whole update, each response with its prompt counted: packing,
    micro-batches, optimizer."""
    model, prompt = config.model.architecture, config.max_prompt_tokens
    stage = make_stages(config, model, make_meshes(config, jax.devices()[:1]))[-1]
    learner, rng = stage.policy, np.random.default_rng(0)
    state = learner.init_state(models.init(model, jax.random.key(0)))
    ids = lambda count: rng.integers(2, model.vocab_size, count).astype(np.int32)

    def item(first: np.ndarray) -> PackItem:
        tokens = np.r_[first, ids(config.max_response_tokens)]
        mask = (np.arange(len(tokens)) >= prompt).astype(np.float32)
        noise = rng.standard_normal(len(tokens)).astype(np.float32)
        return PackItem(tokens, mask, {"advantages": noise * mask, "rollout_logprobs": -np.abs(noise) * mask})

    prompts = [ids(prompt) for _ in range(config.prompts_per_step)]
    items, seconds = [item(first) for first in prompts for _ in range(config.responses_per_prompt)], []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        state, metrics = learner.update(state, [items])
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    tokens, median = config.max_tokens * len(items), statistics.median(seconds[1:])
    results = {
        "tokens": tokens,
        "tokens_per_row": config.row_tokens,
        "seconds": median,
        "tokens_per_second": tokens / median,
        "loss_is_finite": bool(np.isfinite(float(metrics["loss"]))),
    }
    if peak := peak_flops(jax.devices()[0].device_kind):
        lengths = [config.max_tokens] * len(items)
        results["model_flops_of_peak"] = training_flops(model, lengths) / median / peak
    return results


def measure_rollout(config: TrainConfig, requests: int, repeat: int) -> dict[str, float]:
    """Measure output tokens a second of the native engine, every response of full length."""
    model, prompt, response = config.model.architecture, config.max_prompt_tokens, config.max_response_tokens
    engine = NativeEngine(config.rollout, model, make_mesh(MeshConfig(), jax.devices()[:1]))
    engine.publish(jax.jit(models.init, static_argnums=0)(model, jax.random.key(0)), 1)
    rng = np.random.default_rng(0)
    ids = lambda: rng.integers(2, model.vocab_size, prompt).astype(np.int32)
    todo = [Request(ids(), i, 1, response) for i in range(requests)]
    speeds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        engine.generate(todo, SamplingConfig(ignore_eos=True), jax.random.key(0))
        speeds.append(requests * response / (time.perf_counter() - start))
    speed, slots = statistics.median(speeds[1:]), min(config.rollout.slots, requests)
    weights = 2 * sum(x.size for x in jax.tree.leaves(models.abstract(model)))
    cache = 4 * model.num_layers * model.num_kv_heads * model.head_dim * (prompt + response / 2)
    moved = speed * (weights / slots + cache)  # bytes a second that decoding cannot do without
    results = {"slots": slots, "tokens_per_second": speed, "gigabytes_per_second": moved / 1e9}
    for kind in GPUS:
        if kind.upper() in jax.devices()[0].device_kind:
            results["of_bandwidth"] = moved / CHIPS[kind].bandwidth
    return results


def measure_run(steps: int) -> dict[str, Any]:
    """Run grpo_tiny.py with a model 30 times as large, by its command."""
    sizes = {"hidden_size": 256, "mlp_size": 1024, "head_dim": 64}
    more = " ".join(f"--model.architecture.{name} {value}" for name, value in sizes.items())
    more += " --model.dtype bfloat16 --rollout.dtype bfloat16"
    flags = f"--config grpo_tiny.py --steps {steps} --run_dir runs/gpu_grpo --log.progress none {more}"
    shutil.rmtree("runs/gpu_grpo", ignore_errors=True)  # an earlier run would be continued
    subprocess.run([sys.executable, "-m", "jaxrl_llm.train", *flags.split()], check=True)
    rows = [json.loads(line) for line in Path("runs/gpu_grpo/metrics.jsonl").read_text().splitlines()]
    passed = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    steps_s = [row["time/step"] for row in rows if row["kind"] == "train"]
    return {"command": flags, "pass@1": passed, "median step, s": statistics.median(steps_s)}


def make_parts(small: bool) -> dict[str, Callable[[], Any]]:
    """Return the parts: name -> function that returns its results."""
    model, repeat, seconds = (TINY, 2, 0.1) if small else (QWEN, 5, 0.3)
    shape = Shape(1, 256, 4, 2, head_dim=64, dtype="float32") if small else Shape()
    head = (256, 64, 512) if small else (16_384, 4096, 131_072)
    experts = (256, 4, 64, 64) if small else QWEN_EXPERTS
    decoded = {"slots": 4, "context": 60, "repeat": 2} if small else {"repeat": repeat}
    pages = (16,) if small else (64, 128)
    slots, lengths = (8, (1024, 64, 64)) if small else (256, (16_384, 512, 512))
    update, apart = (gpu_recipe(model, *lengths, slots=slots, share=share) for share in (True, False))
    rollout = gpu_recipe(model, *((1024, 16, 16) if small else (16_384, 512, 128)), slots=slots)
    kernels = {
        "attention, TFLOP/s": lambda: measure_attention(shape, seconds),
        "linear_logprob": lambda: [logprob.measure("auto", *head, repeat=repeat)],
        "grouped_matmul": lambda: measure_grouped(experts, repeat),
        "decode_attention": lambda: [decode.measure_decoding(page=page, **decoded) for page in pages],
    }
    return {
        "head": report_head,
        "kernels": lambda: {name: part() for name, part in kernels.items()},
        "update": lambda: measure_update(update, repeat),
        "update, prompts not shared": lambda: measure_update(apart, repeat),
        "rollout": lambda: measure_rollout(rollout, 16 if small else 500, repeat),
        "grpo": lambda: measure_run(2 if small else 100),
    }


def run_part(name: str, small: bool) -> None:
    """Measure one part and print its results as the last line, with the peak of the device's memory."""
    try:
        results = make_parts(small)[name]()
    except Exception as error:  # the other parts' results are kept
        results = f"failed: {type(error).__name__}: {str(error)[:500]}"
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if isinstance(results, dict) and peak and name != "head":
        results["peak_GiB"] = peak / 2**30
    print(json.dumps(results), flush=True)


def measure_parts(names: list[str], small: bool, limit: float) -> dict[str, Any]:
    """Measure each part in a separate process. The failure of one is recorded, but of the head."""

    def measure(name: str) -> Any:
        words = [sys.executable, __file__, "--part", name, *(["--small"] if small else [])]
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=limit, check=True)
            part = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            part = f"failed: {error}"
        print(name, json.dumps(part), flush=True)
        return part

    head = measure("head")
    if isinstance(head, str):
        raise SystemExit(head)
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    return {**head, "command": command, **{name: measure(name) for name in names}}


def compile_for(kind: str) -> dict[str, Any]:
    """Compile all parts for a GPU that this machine need not have."""
    target = open_target(parse_topology(kind))
    mesh = make_mesh(MeshConfig(), target.devices)
    results: dict[str, Any] = {**report_head(), "label": "compiled, not run", "device": kind}
    replicated = NamedSharding(mesh, PartitionSpec())
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated)
    for packed in (1, 4):
        shape = Shape(packed=packed)
        q, kv = (bf16(shape.batch, shape.length, n, shape.head_dim) for n in (shape.heads, shape.kv_heads))
        attend = attention.ours("auto", shape)
        total = lambda *x, attend=attend: attend(*x).astype(jnp.float32).sum()
        results[f"attention, {packed} sequences a row"] = compile_cuda(
            mesh, jax.grad(total, (0, 1, 2)), q, kv, kv
        )
    targets = jnp.zeros((1, 16_384), jnp.int32)
    loss = lambda hidden, head: sum(x.sum() for x in linear_logprob(hidden, head, targets))
    results["linear_logprob"] = compile_cuda(
        mesh, jax.grad(loss, (0, 1)), bf16(1, 16_384, 4096), bf16(131_072, 4096)
    )
    rows, groups, depth, columns = QWEN_EXPERTS
    product = lambda lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes).astype(jnp.float32).sum()
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32, sharding=replicated)
    results["grouped_matmul"] = compile_cuda(
        mesh, jax.grad(product, (0, 1)), bf16(rows, depth), bf16(groups, depth, columns), sizes
    )
    for name, config in {
        "update": gpu_recipe(QWEN, 16_384, 512, 512, slots=256),
        "rollout": gpu_recipe(QWEN, 16_384, 512, 128, slots=256),
    }.items():
        plan = make_plan(config, target, only=name)
        results[name] = {"fits": plan.fits, "peak_GiB": plan.peak.peak / 2**30}
        print(name, json.dumps(results[name]), flush=True)
    return results


def compile_cuda(mesh, function: Callable, *args) -> dict[str, Any]:
    """Compile for CUDA. Returns seconds, temporary memory and the number of our kernels."""
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).compile()
    kernels = compiled.as_text().count('custom_call_target="mosaic_gpu')
    memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
    results = {"seconds": time.perf_counter() - start, "temporary_MiB": memory, "mosaic_gpu_calls": kernels}
    print(json.dumps(results), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name in make_parts(small=True) if name != "head"]
    parser.add_argument("--compile", metavar="KIND", help="h100 or h200: compile for it, run nothing")
    parser.add_argument("--small", action="store_true", help="tiny shapes; nothing is written")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="parts to measure")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a part is given up")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_part(options.part, options.small)
        return
    if options.compile:
        results, name = compile_for(options.compile), f"gpu_compiled_{options.compile}.json"
    else:
        results = measure_parts(options.only, options.small, options.limit)
        name = f"gpu_{next((kind for kind in GPUS if kind.upper() in results['device']), 'other')}.json"
    print(json.dumps(results, indent=1))
    if not options.small:
        path = RESULTS / name
        earlier = json.loads(path.read_text()) if path.exists() and options.only != names else {}
        path.write_text(json.dumps(earlier | results, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    main()
