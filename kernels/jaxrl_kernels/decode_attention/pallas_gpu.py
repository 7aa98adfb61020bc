"""Attention over a paged cache on Hopper GPUs (H100, H200): Pallas Mosaic GPU, TMA copies and wgmma.

A thread block takes one kv head of one slot, all query heads that share it, and a split of its context: the
producer warpgroup copies the pages in use into a ring in shared memory, the consumer computes. A wgmma has 64
rows, of which the query heads fill a few: decoding is bound by memory bandwidth. Contexts are split
(split-KV, as in flash-decoding) into as many parts as occupy the card.

bfloat16 and float16 only, as in `flash_attention.pallas_gpu`.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxrl_kernels.chips import HOPPER_SMS
from jaxrl_kernels.decode_attention.reference import ArrayOrShape, merge_splits
from jaxrl_kernels.flash_attention.shapes import HEAD_DIMS
from jaxrl_kernels.flash_attention.spec import MASKED_LSE
from jaxrl_kernels.hopper import (
    PER_ROW,
    ROWS,
    TILE_ROWS,
    WarpgroupOps,
    add_product,
    launch,
    matrix_memory,
    next_multiple,
    read_accumulator,
    stages_that_fit,
)


class _Plan(NamedTuple):
    """Static parameters of the kernel."""

    scale: float
    softcap: float | None
    rows: int
    page: int
    stages: int
    splits: int
    dtype: Any
    ops: WarpgroupOps


def decode_attention(
    q: Float[Array, "S H E"],
    k_pages: Float[Array, "P K page E"],
    v_pages: Float[Array, "P K page E"],
    page_table: Int[Array, "S N"],
    lengths: Int[Array, "S"],
    *,
    scale: float,
    window: int | Int[Array, ""],
    softcap: float | None = None,
    k_scales: None = None,
    v_scales: None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "S H E"], Float[Array, "S H"]]:
    """Compute `reference.decode_attention` without scales.

    Args:
        splits: parts of every context, one thread block each; None = as many as occupy the card.

    Raises:
        ValueError: the pages do not fit into shared memory.
    """
    slots, heads, dim = q.shape
    _, kv_heads, page, _ = k_pages.shape
    group, splits = heads // kv_heads, splits or splits_for(slots * kv_heads, page_table.shape[1])
    # The query heads of a kv head are the rows of one wgmma.
    rows = next_multiple(group, TILE_ROWS)
    grouped = jnp.pad(q.reshape(slots, kv_heads, group, dim), ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    stages = _stages(dim, page)
    plan = _Plan(scale, softcap, rows, page, stages, splits, q.dtype, WarpgroupOps(interpret))
    matrix = lambda *shape: matrix_memory((*shape, dim), q.dtype, math.gcd(dim, page))
    scratch = {
        "q": matrix(ROWS),
        "k": matrix(stages, page),
        "v": matrix(stages, page),
        "out": matrix_memory((ROWS, dim), jnp.float32, dim),
        "lse": plgpu.SMEM((ROWS,), jnp.float32),
        "q_ready": plgpu.Barrier(),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.Barrier(num_barriers=stages),
    }
    # Each split writes its part of the output; `merge_splits` merges them.
    shape = (splits, slots, kv_heads, rows)
    outputs = [jax.ShapeDtypeStruct((*shape, *more), jnp.float32) for more in ((dim,), ())]
    grid = {"part": splits, "head": kv_heads, "slot": slots}
    kernel = launch(functools.partial(_kernel, plan), tuple(outputs), scratch, grid, 1, interpret)
    window = jnp.asarray(window, jnp.int32).reshape(1)
    out, lse = kernel(page_table, lengths, window, grouped, k_pages, v_pages)
    out, lse = (x[:, :, :group] for x in merge_splits(out, lse[..., None]))
    return out.astype(q.dtype).reshape(q.shape), lse.reshape(q.shape[:2])


def unsupported(q: ArrayOrShape, k_pages: ArrayOrShape, page_table: ArrayOrShape) -> str | None:
    """Return why the kernel does not take queries and pages of such shapes and types, or None."""
    _, kv_heads, page, dim = k_pages.shape
    if dim not in HEAD_DIMS:
        return f"head_dim {dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if q.dtype != k_pages.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries of {q.dtype}, pages of {k_pages.dtype}: give both bfloat16 or both float16"
    if q.shape[1] > ROWS * kv_heads:
        return f"{q.shape[1] // kv_heads} query heads to a kv head are more than {ROWS}"
    try:
        _stages(dim, page)
    except ValueError as error:
        return str(error)
    return None


def _stages(dim: int, page: int) -> int:
    """Return the pages of keys and values in the ring, beside the queries and the outputs."""
    return stages_that_fit(f"decode_attention at head_dim {dim}", page, ROWS * (6 * dim + 4), 4 * dim)


def splits_for(blocks: int, pages: int) -> int:
    """Return the splits of a context: enough for two thread blocks a multiprocessor, no more than pages."""
    return max(1, min(-(-2 * HOPPER_SMS // blocks), pages))


def _kernel(plan: _Plan, *refs: Any, **memory: Any) -> None:
    """Compute one split of one slot's context, for one kv head."""
    (table, lengths, window, q, k, v, out, lse), memory = refs, SimpleNamespace(**memory)
    part, head, slot, warpgroup = (lax.axis_index(name) for name in ("part", "head", "slot", "group"))
    end = lengths[slot]
    begin = jnp.maximum(end - window[0], 0)
    # This split's share of the pages from the window's first to the last.
    page, stages = jnp.int32(plan.page), jnp.int32(plan.stages)
    first, last = lax.div(begin, page), lax.div(end + page - 1, page)
    share = lax.div(last - first + plan.splits - 1, jnp.int32(plan.splits))
    start = first + part * share
    count = jnp.maximum(jnp.minimum(start + share, last) - start, 0)

    @pl.when(warpgroup == 1)
    def _copy():
        plgpu.copy_gmem_to_smem(q.at[slot, head], memory.q.at[pl.ds(0, plan.rows)], memory.q_ready)

        @pl.loop(0, count)
        def _(i):
            stage = lax.rem(i, stages)
            pl.when(i >= plan.stages)(functools.partial(plgpu.barrier_wait, memory.free.at[stage]))
            number = table[slot, start + i]
            plgpu.copy_gmem_to_smem(k.at[number, head], memory.k.at[stage], memory.ready.at[stage])
            plgpu.copy_gmem_to_smem(v.at[number, head], memory.v.at[stage], memory.ready.at[stage])

        @pl.loop(jnp.maximum(count - plan.stages, 0), count)  # wait for every phase of a barrier
        def _(i):
            plgpu.barrier_wait(memory.free.at[lax.rem(i, stages)])

    # Attend to them, and store the sums of this split.
    @pl.when(warpgroup == 0)
    def _compute():
        plgpu.barrier_wait(memory.q_ready)
        acc, top, total = _attend(plan, memory, start, count, begin, end)
        attends = total > 0.0
        total = jnp.where(attends, total, 1.0)
        memory.out[...] = acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
        memory.lse[...] = jnp.where(attends, top + jnp.log(total), MASKED_LSE)
        plgpu.commit_smem()
        mine = pl.ds(0, plan.rows)
        plgpu.copy_smem_to_gmem(memory.out.at[mine], out.at[part, slot, head])
        plgpu.copy_smem_to_gmem(memory.lse.at[mine], lse.at[part, slot, head])
        plgpu.wait_smem_to_gmem(0)


def _attend(plan: _Plan, memory: Any, start, count, begin, end) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the sums of weighted values [ROWS, E], maxima and sums of weights [ROWS] of `count` pages."""
    # Online softmax over the pages: the sums shrink whenever the maximum rises.
    ops, shape = plan.ops, (ROWS, plan.page)
    wide = lambda x, shape: lax.broadcast_in_dim(x, shape, [0])

    def step(i, carry):
        acc, top, total = carry
        stage = lax.rem(i, jnp.int32(plan.stages))
        plgpu.barrier_wait(memory.ready.at[stage])

        def product(ref):
            add_product(ref, memory.q, memory.k.at[stage], transpose=True)
            return read_accumulator(ref)

        scores = ops.scratch(product, shape) * plan.scale
        if plan.softcap is not None:
            scores = plan.softcap * jnp.tanh(scores / plan.softcap)
        position = ops.iota(shape, 1) + (start + i) * plan.page
        visible = (position >= begin) & (position < end)
        scores = jnp.where(visible, scores, MASKED_LSE)
        # Rescale the sums to the new maximum, and add this page.
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(visible, jnp.exp(scores - wide(new, shape)), 0.0)
        shrink = jnp.exp(top - new)
        total = total * shrink + jnp.sum(weights, axis=1)
        acc = acc * wide(shrink, acc.shape)
        weights = weights.astype(plan.dtype)
        (acc,) = ops.accumulate(lambda ref: add_product(ref, weights, memory.v.at[stage]), [acc])
        plgpu.barrier_arrive(memory.free.at[stage])
        return acc, new, total

    dim = memory.q.shape[1]
    top, total = (ops.full((ROWS,), value, PER_ROW) for value in (MASKED_LSE, 0.0))
    return lax.fori_loop(jnp.int32(0), count, step, (ops.full((ROWS, dim), 0.0), top, total))
