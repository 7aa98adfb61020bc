"""Backward kernels of attention on Hopper: dq of a query tile; dk and dv of a key tile."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_kernels.flash_attention.gpu_plan import (
    TILE,
    BlockMask,
    Inputs,
    TilePlan,
    Work,
    blocks_to_read,
    copy_blocks,
    copy_tile,
    key_rings,
    over_blocks,
    over_columns,
    over_rows,
    store_tile,
)
from jaxrl_kernels.flash_attention.spec import DynamicMask
from jaxrl_kernels.hopper import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PER_COLUMN,
    PER_ROW,
    PRODUCER_REGISTERS,
    ROWS,
    add_product,
    launch,
    read_accumulator,
)


def dq(plan: TilePlan, inputs: Inputs, mask: DynamicMask) -> jax.Array:
    """Return dq [B, Tq, H, E] of padded inputs."""
    (batch, length), heads = inputs.q_segments.shape, inputs.q.shape[2]
    scratch = {
        "q": plan.matrix(CONSUMERS, ROWS),
        "d_out": plan.matrix(CONSUMERS, ROWS),
        "k": plan.matrix(plan.stages, plan.block),
        "v": plan.matrix(plan.stages, plan.block),
        **plan.numbers(jnp.int32, "q_ids", "q_windows"),
        **plan.numbers(jnp.float32, "lse", "delta"),
        **plan.numbers(jnp.int32, "k_ids", ring=True),
        "tile_ready": plgpu.Barrier(num_arrivals=6 * CONSUMERS),
        **plan.barriers(k_ready=2, v_ready=1, k_free=CONSUMERS, v_free=CONSUMERS),
    }
    ranges = blocks_to_read(plan.spec, mask, inputs, TILE, plan.block, of_keys=False)
    shape = jax.ShapeDtypeStruct(inputs.q.shape, plan.dtype)
    grid = {"head": heads, "tile": length // TILE, "batch": batch}
    kernel = launch(functools.partial(_dq_kernel, plan), shape, scratch, grid, CONSUMERS, plan.interpret)
    return kernel(*inputs._replace(ranges=ranges))


def _dq_kernel(plan: TilePlan, *refs: Any, **memory: Any) -> None:
    inputs, out, memory = Inputs(*refs[:-1]), refs[-1], SimpleNamespace(**memory)
    # The producer warpgroup loads the query tile, then streams blocks of keys; consumers sum dq.
    work = Work.from_grid(plan, inputs, longest_first=True)

    @pl.when(work.warpgroup == CONSUMERS)
    def _copy():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        batch, head = work.batch, work.head
        copy_tile(
            work,
            memory.tile_ready,
            (lambda rows: inputs.q.at[batch, rows, head], memory.q),
            (lambda rows: inputs.d_out.at[batch, rows, head], memory.d_out),
            (lambda rows: inputs.q_segments.at[batch, rows], memory.q_ids),
            (lambda rows: inputs.q_windows.at[batch, rows], memory.q_windows),
            (lambda rows: inputs.lse.at[batch, head, rows], memory.lse),
            (lambda rows: inputs.delta.at[batch, head, rows], memory.delta),
        )
        copy_blocks(plan, work.blocks.count, key_rings(plan, work, inputs, memory))

    # Sum dq over the blocks of keys, and store it.
    @pl.when(work.warpgroup < CONSUMERS)
    def _compute():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        plgpu.barrier_wait(memory.tile_ready)
        mask = BlockMask.of_rows(plan, work, inputs, memory)
        step = functools.partial(
            _dq_step, plan, work, memory, mask, _statistics(plan, memory, work.warpgroup, PER_ROW)
        )
        zeros = plan.ops.full((ROWS, plan.dim), 0.0)
        total = over_blocks(step, zeros, 0, work.blocks.masked, work.blocks.count)
        rows = out.at[work.batch, pl.ds(work.first_row, ROWS), work.head]
        store_tile((total * plan.spec.scale).astype(plan.dtype), memory.q.at[work.warpgroup], rows)
        plgpu.wait_smem_to_gmem(0)


def _statistics(plan: TilePlan, memory: Any, index: jax.Array, layout: Any) -> tuple[jax.Array, jax.Array]:
    """Return the log-sum-exp and the delta of some queries."""
    return plan.ops.layout(memory.lse[index], layout), plan.ops.layout(memory.delta[index], layout)


def _dq_step(
    plan: TilePlan,
    work: Work,
    memory: Any,
    mask: BlockMask,
    statistics: tuple,
    i: jax.Array,
    total: jax.Array,
    masked: bool,
) -> jax.Array:
    ops, shape, warpgroup = plan.ops, (ROWS, plan.block), work.warpgroup
    slot = lax.rem(i, jnp.int32(plan.stages))
    lse, delta = (over_columns(x, shape) for x in statistics)

    # Both products run while the softmax is recomputed from the saved log-sum-exp.
    def score_gradient(product, weight_gradient):
        plgpu.barrier_wait(memory.k_ready.at[slot])
        add_product(product, memory.q.at[warpgroup], memory.k.at[slot], transpose=True)
        plgpu.barrier_wait(memory.v_ready.at[slot])
        add_product(weight_gradient, memory.d_out.at[warpgroup], memory.v.at[slot], transpose=True)
        scores = plan.scores(read_accumulator(product, in_flight=1))
        weights = plan.weights(scores, lse, mask(slot, work.blocks.block(i)) if masked else None)
        gradient = weights * (read_accumulator(weight_gradient) - delta)
        return plan.score_gradient(gradient, scores).astype(plan.dtype)

    gradient = ops.scratch(score_gradient, shape, shape)
    plgpu.barrier_arrive(memory.v_free.at[slot])
    (total,) = ops.accumulate(lambda ref: add_product(ref, gradient, memory.k.at[slot]), [total])
    plgpu.barrier_arrive(memory.k_free.at[slot])
    return total


def dkv(plan: TilePlan, outputs: tuple[str, ...], inputs: Inputs, mask: DynamicMask) -> list[jax.Array]:
    """Return the gradients named in `outputs` ("dk", "dv"), [B, Tk, K, E], of padded inputs."""
    (batch, length), heads = inputs.kv_last.shape, inputs.k.shape[2]
    scratch = {
        "k": plan.matrix(CONSUMERS, ROWS),
        "v": plan.matrix(CONSUMERS, ROWS),
        "q": plan.matrix(plan.stages, plan.block),
        "d_out": plan.matrix(plan.stages, plan.block),
        **plan.numbers(jnp.int32, "k_ids"),
        **plan.numbers(jnp.int32, "q_ids", "q_windows", ring=True),
        **plan.numbers(jnp.float32, "lse", "delta", ring=True),
        "tile_ready": plgpu.Barrier(num_arrivals=3 * CONSUMERS),
        **plan.barriers(q_ready=5, d_out_ready=1, q_free=CONSUMERS, d_out_free=CONSUMERS),
    }
    # A key tile reads only the blocks of queries that attend to it.
    ranges = blocks_to_read(plan.spec, mask, inputs, plan.block, TILE, of_keys=True)
    shapes = [jax.ShapeDtypeStruct(inputs.k.shape, plan.dtype) for _ in outputs]
    grid = {"head": heads, "tile": length // TILE, "batch": batch}
    body = functools.partial(_dkv_kernel, plan, outputs)
    return launch(body, shapes, scratch, grid, CONSUMERS, plan.interpret)(*inputs._replace(ranges=ranges))


def _dkv_kernel(plan: TilePlan, outputs: tuple[str, ...], *refs: Any, **memory: Any) -> None:
    # The producer warpgroup loads the key tile, then streams blocks of queries; consumers sum dk and dv.
    count = len(Inputs._fields)
    inputs, outs, memory = Inputs(*refs[:count]), refs[count:], SimpleNamespace(**memory)
    work = Work.from_grid(plan, inputs)

    @pl.when(work.warpgroup == CONSUMERS)
    def _copy():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        batch, head = work.batch, work.head
        copy_tile(
            work,
            memory.tile_ready,
            (lambda rows: inputs.k.at[batch, rows, head], memory.k),
            (lambda rows: inputs.v.at[batch, rows, head], memory.v),
            (lambda rows: inputs.kv_last.at[batch, rows], memory.k_ids),
        )
        copy_blocks(plan, work.blocks.count * plan.group, _query_rings(plan, work, inputs, memory))

    # Sum dk and dv over the blocks of queries, and store them.
    @pl.when(work.warpgroup < CONSUMERS)
    def _compute():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        plgpu.barrier_wait(memory.tile_ready)
        mask = BlockMask.of_rows(plan, work, inputs, memory, of_keys=True)
        totals = [plan.ops.full((ROWS, plan.dim), 0.0) for _ in outputs]
        step = functools.partial(_dkv_step, plan, work, memory, mask, outputs)
        blocks = work.blocks
        totals = over_blocks(step, totals, 0, blocks.masked * plan.group, blocks.count * plan.group)
        for name, out, total in zip(outputs, outs, totals, strict=True):
            buffer, scale = (memory.k, plan.spec.scale) if name == "dk" else (memory.v, 1.0)
            rows = out.at[work.batch, pl.ds(work.first_row, ROWS), work.head]
            store_tile((total * scale).astype(plan.dtype), buffer.at[work.warpgroup], rows)
        plgpu.wait_smem_to_gmem(0)


def _query_rings(plan: TilePlan, work: Work, inputs: Inputs, memory: Any) -> tuple:
    """Return the query blocks that a key tile reads, for `copy_blocks`: each once per head that shares
    keys."""

    def rows(i):
        return pl.ds(work.blocks.block(lax.div(i, jnp.int32(plan.group))) * plan.block, plan.block)

    def head(i):
        return work.head * plan.group + lax.rem(i, jnp.int32(plan.group))

    queries = (
        (lambda i: inputs.q.at[work.batch, rows(i), head(i)], memory.q),
        (lambda i: inputs.q_segments.at[work.batch, rows(i)], memory.q_ids),
        (lambda i: inputs.q_windows.at[work.batch, rows(i)], memory.q_windows),
        (lambda i: inputs.lse.at[work.batch, head(i), rows(i)], memory.lse),
        (lambda i: inputs.delta.at[work.batch, head(i), rows(i)], memory.delta),
    )
    gradients = ((lambda i: inputs.d_out.at[work.batch, rows(i), head(i)], memory.d_out),)
    return (memory.q_ready, memory.q_free, queries), (memory.d_out_ready, memory.d_out_free, gradients)


def _dkv_step(
    plan: TilePlan,
    work: Work,
    memory: Any,
    mask: BlockMask,
    outputs: tuple,
    i: jax.Array,
    totals: list,
    masked: bool,
) -> list[jax.Array]:
    ops, shape, warpgroup = plan.ops, (ROWS, plan.block), work.warpgroup
    slot = lax.rem(i, jnp.int32(plan.stages))

    # Recompute the transposed softmax, and from it the factor of each requested gradient.
    def factors(product, *weight_gradients):
        plgpu.barrier_wait(memory.q_ready.at[slot])
        add_product(product, memory.k.at[warpgroup], memory.q.at[slot], transpose=True)
        plgpu.barrier_wait(memory.d_out_ready.at[slot])
        for ref in weight_gradients:
            add_product(ref, memory.v.at[warpgroup], memory.d_out.at[slot], transpose=True)
        scores = plan.scores(read_accumulator(product, in_flight=len(weight_gradients)))
        lse, delta = (over_rows(x, shape) for x in _statistics(plan, memory, slot, PER_COLUMN))
        block = work.blocks.block(lax.div(i, jnp.int32(plan.group)))
        weights = plan.weights(scores, lse, mask(slot, block) if masked else None)
        factor = {"dv": weights.astype(plan.dtype)}
        for ref in weight_gradients:
            gradient = weights * (read_accumulator(ref) - delta)
            factor["dk"] = plan.score_gradient(gradient, scores).astype(plan.dtype)
        return [factor[name] for name in outputs]

    both = ops.scratch(factors, *[shape] * (2 if "dk" in outputs else 1))

    def add(*refs):
        for name, ref, factor in zip(outputs, refs, both, strict=True):
            add_product(ref, factor, (memory.q if name == "dk" else memory.d_out).at[slot])

    totals = ops.accumulate(add, totals)
    plgpu.commit_smem()  # reads of the statistics end before TMA writes there again
    plgpu.barrier_arrive(memory.q_free.at[slot])
    plgpu.barrier_arrive(memory.d_out_free.at[slot])
    return totals
