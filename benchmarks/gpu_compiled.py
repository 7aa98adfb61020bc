"""The programs of benchmarks/gpu_parts.py through the CUDA compiler, without a GPU."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import strict
from gpu_parts import Results
from gpu_recipes import (
    EXPERTS,
    FP8_CACHE,
    HEAD,
    LONGEST,
    ROW_MULTIPLE,
    SMOLLM2,
    WARM_UP,
    attention_shapes,
    bytes_name,
    delta_shape,
    qlora_recipe,
    qlora_rows,
    recipes,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_kernels.decode_attention.api import decode_attention
from jaxrl_kernels.flash_attention import bench as attention
from jaxrl_kernels.gated_delta.api import gated_delta
from jaxrl_kernels.grouped_matmul.api import grouped_matmul
from jaxrl_kernels.linear_logprob.api import linear_logprob
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.plan.compiled import CompileTarget, open_target
from jaxrl_llm.plan.plan import make_plan
from jaxrl_llm.plan.topology import parse_topology
from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

GIB = 2**30
FIRST_ROWS = (65_536, 131_072)
"""Tokens of the first two QLoRA rows that are compiled; their memory predicts the longest one."""
DECODED = (256, 576, 64)
"""Slots, tokens of each and tokens of a page."""


class Compiler:
    """The target of a part's compilation, and its mesh of one device."""

    def __init__(self, kind: str):
        self.target: CompileTarget = open_target(parse_topology(kind))
        self.mesh: Mesh = make_mesh(MeshConfig(), self.target.devices)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())

    def array(self, *shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def kernel(self, function: Callable, *args: Any) -> dict[str, Any]:
        """Compile a function. Returns seconds, temporary memory and the number of our kernels."""
        begin = time.perf_counter()
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            compiled = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).compile()
        kernels = compiled.as_text().count('custom_call_target="mosaic_gpu')
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "temporary_MiB": memory, "mosaic_gpu_calls": kernels}

    def recipe(self, config: TrainConfig, only: str = "", *, label: str = "") -> Results:
        """Compile the phases of a recipe's step: memory of each, and roofline of one call."""
        plan = make_plan(config, self.target, only, log=lambda line: print(line, flush=True))
        yield f"{label}fits", plan.fits
        for phase in plan.phases:
            least = max(phase.roofline.values(), default=0.0)
            numbers = {"peak_GiB": phase.peak / GIB, "roof_ms": 1e3 * least, "seconds": phase.compile_seconds}
            yield f"{label}{phase.name}", {**numbers, **({"error": phase.error} if phase.error else {})}


def compile_attention(compiler: Compiler) -> Results:
    for label, shape in attention_shapes(small=False).items():
        q, kv = (
            compiler.array(shape.batch, shape.length, n, shape.head_dim)
            for n in (shape.heads, shape.kv_heads)
        )
        attend = attention.ours("auto", shape)
        total = lambda *x, attend=attend: attend(*x).astype(jnp.float32).sum()
        yield f"attention, {label}", compiler.kernel(jax.grad(total, (0, 1, 2)), q, kv, kv)


def compile_grouped(compiler: Compiler) -> Results:
    rows, groups, depth, columns = EXPERTS
    product = lambda lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes).astype(jnp.float32).sum()
    operands = compiler.array(rows, depth), compiler.array(groups, depth, columns)
    sizes = compiler.array(groups, dtype=jnp.int32)
    yield "grouped products", compiler.kernel(jax.grad(product, (0, 1)), *operands, sizes)


def compile_delta(compiler: Compiler) -> Results:
    shape = delta_shape(small=False)
    tokens = shape.batch, shape.length
    q = compiler.array(*tokens, shape.key_heads, shape.key_dim)
    v = compiler.array(*tokens, shape.value_heads, shape.value_dim)
    g, beta = (compiler.array(*tokens, shape.value_heads, dtype=x) for x in (jnp.float32, jnp.bfloat16))
    segments = jnp.ones(tokens, jnp.int32)
    rule = functools.partial(gated_delta, segments=segments, implementation="pallas_gpu")
    total = lambda *x: rule(*x)[0].astype(jnp.float32).sum()
    yield "gated delta rule", compiler.kernel(jax.grad(total, (0, 1, 2, 3, 4)), q, q, v, g, beta)


def compile_kernels(compiler: Compiler) -> Results:
    tokens, hidden, vocab = HEAD
    targets = jnp.zeros((1, tokens), jnp.int32)
    loss = lambda hidden, head: sum(x.sum() for x in linear_logprob(hidden, head, targets))
    operands = compiler.array(1, tokens, hidden), compiler.array(vocab, hidden)
    yield "linear_logprob", compiler.kernel(jax.grad(loss, (0, 1)), *operands)
    slots, context, page = DECODED
    row = -(-context * 11 // 10 // page)
    pages, q = compiler.array(slots * row, 8, page, 128), compiler.array(slots, 16, 128)
    table, lengths = (compiler.array(*dims, dtype=jnp.int32) for dims in ((slots, row), (slots,)))
    attend = lambda q, k, v, table, lengths: decode_attention(q, k, v, table, lengths, scale=128**-0.5)
    yield "decode_attention", compiler.kernel(attend, q, pages, pages, table, lengths)


def compile_qlora(compiler: Compiler) -> Results:
    """Find the longest row of Qwen3-8B on nf4 whose update fits by `plan`."""

    def peak_of(row: int) -> float:
        plan = make_plan(qlora_recipe(row), compiler.target, "update")
        print(f"a row of {row} tokens: {plan.peak.peak / GIB:.2f} GiB, {plan.peak.name}", flush=True)
        return plan.peak.peak

    row, peak = longest_row(peak_of, compiler.target.memory, FIRST_ROWS)
    yield LONGEST, row
    yield bytes_name(row), peak
    yield "memory of a run, bytes", compiler.target.memory
    for near in qlora_rows(row):
        yield bytes_name(near), peak_of(near)


def longest_row(
    peak_of: Callable[[int], float], memory: float, first: tuple[int, int], *, multiple: int = ROW_MULTIPLE
) -> tuple[int, float]:
    """Return the longest row that fits, within 1% of a longer one that does not, and its peak in bytes.

    Args:
        peak_of: returns the peak in bytes of a row of so many tokens; it rises with them.
        first: two rows, whose peaks predict the next one.
    """
    known = {row: peak_of(row) for row in first}
    while True:
        fitting = [row for row, peak in known.items() if peak <= memory]
        others = [row for row, peak in known.items() if peak > memory]
        low, high = max(fitting, default=0), min(others, default=math.inf)
        if high - low <= max(low // 100, multiple):
            return low, known.get(low, 0.0)
        # A line through the two rows that are nearest to the limit.
        a, b = sorted(sorted(known, key=lambda row: abs(known[row] - memory))[:2])
        row = a + (memory - known[a]) * (b - a) / (known[b] - known[a])
        row = int(min(max(row, low + multiple), high - multiple, 4 * max(known)) // multiple) * multiple
        if row in known:  # between neighbours the line may point back
            row = (low + int(high)) // 2 // multiple * multiple if high < math.inf else low + multiple
        known[row] = peak_of(row)


def compile_start(compiler: Compiler) -> Results:
    yield from compiler.recipe(command_config(SMOLLM2))


def compile_strict(compiler: Compiler) -> Results:
    for label, flags in {"bfloat16": (), "bfloat16 with a cache of fp8": FP8_CACHE}.items():
        words = strict.train_words("bfloat16", True, steps=12, flags=(*WARM_UP, *flags))
        try:
            yield from compiler.recipe(command_config(words), label=f"{label}: ")
        except UserError as error:
            yield f"{label}: fits", f"refused: {error}"


def command_config(words: list[str]) -> TrainConfig:
    """Return the config of a command of training."""
    return from_command_line(list(words), "python -m jaxrl_llm plan", writes=False).config


def compile_part(name: str, kind: str) -> Results:
    """Compile the programs of a part for a GPU."""
    compiler = Compiler(kind)
    if name in OTHERS:
        yield from OTHERS[name](compiler)
    else:
        only = "rollout" if name == "rollout" else "update"
        yield from compiler.recipe(recipes(small=False)[name], only)


OTHERS: dict[str, Callable[[Compiler], Results]] = {
    "attention": compile_attention,
    "grouped_matmul": compile_grouped,
    "gated_delta": compile_delta,
    "more kernels": compile_kernels,
    "qlora": compile_qlora,
    "start": compile_start,
    "strict": compile_strict,
}
"""Parts that are not one recipe of `gpu_parts.recipes`."""
