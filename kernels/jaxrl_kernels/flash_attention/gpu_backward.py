"""The backward kernels of `pallas_gpu`: dq of a query tile, dk and dv of a key tile."""

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
    Here,
    Inputs,
    Mask,
    Plan,
    copy_blocks,
    copy_tile,
    key_rings,
    over_blocks,
    over_columns,
    over_rows,
    store_tile,
    walks,
)
from jaxrl_kernels.flash_attention.spec import Place
from jaxrl_kernels.hopper import (
    COMPUTE,
    FEW_REGISTERS,
    MANY_REGISTERS,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    add_product,
    launch,
    read,
)


def dq(plan: Plan, inputs: Inputs, place: Place) -> jax.Array:
    """[B, Tq, H, E] like q, of padded inputs."""
    batch, length, heads, _ = inputs.q.shape
    scratch = {
        "q": plan.matrix(COMPUTE, ROWS),
        "d_out": plan.matrix(COMPUTE, ROWS),
        "k": plan.matrix(plan.stages, plan.block),
        "v": plan.matrix(plan.stages, plan.block),
        **plan.numbers(jnp.int32, "q_ids"),
        **plan.numbers(jnp.float32, "lse", "delta"),
        **plan.numbers(jnp.int32, "k_ids", ring=True),
        "tile_ready": plgpu.Barrier(num_arrivals=5 * COMPUTE),
        **plan.barriers(k_ready=2, v_ready=1, k_free=COMPUTE, v_free=COMPUTE),
    }
    ways = walks(plan.spec, place, inputs.q_segments, inputs.kv_segments, TILE, plan.block, of_keys=False)
    shape = jax.ShapeDtypeStruct(inputs.q.shape, plan.dtype)
    grid = {"head": heads, "tile": length // TILE, "batch": batch}
    kernel = launch(functools.partial(_dq_kernel, plan), shape, scratch, grid, COMPUTE, plan.interpret)
    return kernel(*inputs._replace(walks=ways))


def _dq_kernel(plan: Plan, *refs: Any, **memory: Any) -> None:
    inputs, out, memory = Inputs(*refs[:-1]), refs[-1], SimpleNamespace(**memory)
    here = Here.of(inputs, longest_first=True)

    @pl.when(here.me == COMPUTE)
    def _copy():
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        batch, head = here.batch, here.head
        copy_tile(
            here,
            memory.tile_ready,
            (lambda rows: inputs.q.at[batch, rows, head], memory.q),
            (lambda rows: inputs.d_out.at[batch, rows, head], memory.d_out),
            (lambda rows: inputs.q_segments.at[batch, rows], memory.q_ids),
            (lambda rows: inputs.lse.at[batch, head, rows], memory.lse),
            (lambda rows: inputs.delta.at[batch, head, rows], memory.delta),
        )
        copy_blocks(plan, here.walk.count, key_rings(plan, here, inputs, memory))

    @pl.when(here.me < COMPUTE)
    def _compute():
        plgpu.set_max_registers(MANY_REGISTERS, action="increase")
        plgpu.barrier_wait(memory.tile_ready)
        mask = Mask.of(plan, here, inputs, memory.q_ids, memory.k_ids)
        step = functools.partial(
            _dq_step, plan, here, memory, mask, _statistics(plan, memory, here.me, PER_ROW)
        )
        zeros = plan.cores.full((ROWS, plan.dim), 0.0)
        total = over_blocks(step, zeros, 0, here.walk.masked, here.walk.count)
        rows = out.at[here.batch, pl.ds(here.first, ROWS), here.head]
        store_tile((total * plan.spec.scale).astype(plan.dtype), memory.q.at[here.me], rows)
        plgpu.wait_smem_to_gmem(0)


def _statistics(plan: Plan, memory: Any, index: jax.Array, layout: Any) -> tuple[jax.Array, jax.Array]:
    """The log-sum-exp and the delta of some queries."""
    return plan.cores.layout(memory.lse[index], layout), plan.cores.layout(memory.delta[index], layout)


def _dq_step(
    plan: Plan,
    here: Here,
    memory: Any,
    mask: Mask,
    statistics: tuple,
    i: jax.Array,
    total: jax.Array,
    masked: bool,
) -> jax.Array:
    cores, shape, me, slot = plan.cores, (ROWS, plan.block), here.me, lax.rem(i, jnp.int32(plan.stages))
    lse, delta = (over_columns(x, shape) for x in statistics)

    def score_gradient(product, weight_gradient):
        plgpu.barrier_wait(memory.k_ready.at[slot])
        add_product(product, memory.q.at[me], memory.k.at[slot], transpose=True)
        plgpu.barrier_wait(memory.v_ready.at[slot])
        add_product(weight_gradient, memory.d_out.at[me], memory.v.at[slot], transpose=True)
        scores = plan.scores(read(product, unfinished=1))
        weights = plan.weights(scores, lse, mask(slot, here.walk.block(i)) if masked else None)
        gradient = weights * (read(weight_gradient) - delta)
        return plan.score_gradient(gradient, scores).astype(plan.dtype)

    gradient = cores.scratch(score_gradient, shape, shape)
    plgpu.barrier_arrive(memory.v_free.at[slot])
    (total,) = cores.accumulate(lambda ref: add_product(ref, gradient, memory.k.at[slot]), [total])
    plgpu.barrier_arrive(memory.k_free.at[slot])
    return total


def dkv(plan: Plan, wanted: tuple[str, ...], inputs: Inputs, place: Place) -> list[jax.Array]:
    """The `wanted` of dk and dv, [B, Tk, K, E] like k, of padded inputs."""
    batch, length, heads, _ = inputs.k.shape
    scratch = {
        "k": plan.matrix(COMPUTE, ROWS),
        "v": plan.matrix(COMPUTE, ROWS),
        "q": plan.matrix(plan.stages, plan.block),
        "d_out": plan.matrix(plan.stages, plan.block),
        **plan.numbers(jnp.int32, "k_ids"),
        **plan.numbers(jnp.int32, "q_ids", ring=True),
        **plan.numbers(jnp.float32, "lse", "delta", ring=True),
        "tile_ready": plgpu.Barrier(num_arrivals=3 * COMPUTE),
        **plan.barriers(q_ready=4, d_out_ready=1, q_free=COMPUTE, d_out_free=COMPUTE),
    }
    ways = walks(plan.spec, place, inputs.q_segments, inputs.kv_segments, plan.block, TILE, of_keys=True)
    shapes = [jax.ShapeDtypeStruct(inputs.k.shape, plan.dtype) for _ in wanted]
    grid = {"head": heads, "tile": length // TILE, "batch": batch}
    body = functools.partial(_dkv_kernel, plan, wanted)
    return launch(body, shapes, scratch, grid, COMPUTE, plan.interpret)(*inputs._replace(walks=ways))


def _dkv_kernel(plan: Plan, wanted: tuple[str, ...], *refs: Any, **memory: Any) -> None:
    count = len(Inputs._fields)
    inputs, outs, memory = Inputs(*refs[:count]), refs[count:], SimpleNamespace(**memory)
    here = Here.of(inputs)

    @pl.when(here.me == COMPUTE)
    def _copy():
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        batch, head = here.batch, here.head
        copy_tile(
            here,
            memory.tile_ready,
            (lambda rows: inputs.k.at[batch, rows, head], memory.k),
            (lambda rows: inputs.v.at[batch, rows, head], memory.v),
            (lambda rows: inputs.kv_segments.at[batch, rows], memory.k_ids),
        )
        copy_blocks(plan, here.walk.count * plan.group, _query_rings(plan, here, inputs, memory))

    @pl.when(here.me < COMPUTE)
    def _compute():
        plgpu.set_max_registers(MANY_REGISTERS, action="increase")
        plgpu.barrier_wait(memory.tile_ready)
        mask = Mask.of(plan, here, inputs, memory.k_ids, memory.q_ids, of_keys=True)
        totals = [plan.cores.full((ROWS, plan.dim), 0.0) for _ in wanted]
        step = functools.partial(_dkv_step, plan, here, memory, mask, wanted)
        walk = here.walk
        totals = over_blocks(step, totals, 0, walk.masked * plan.group, walk.count * plan.group)
        for name, out, total in zip(wanted, outs, totals, strict=True):
            buffer, scale = (memory.k, plan.spec.scale) if name == "dk" else (memory.v, 1.0)
            rows = out.at[here.batch, pl.ds(here.first, ROWS), here.head]
            store_tile((total * scale).astype(plan.dtype), buffer.at[here.me], rows)
        plgpu.wait_smem_to_gmem(0)


def _query_rings(plan: Plan, here: Here, inputs: Inputs, memory: Any) -> tuple:
    """What a key tile reads of queries, for `copy_blocks`: each block for every head that shares the keys."""

    def rows(i):
        return pl.ds(here.walk.block(lax.div(i, jnp.int32(plan.group))) * plan.block, plan.block)

    def head(i):
        return here.head * plan.group + lax.rem(i, jnp.int32(plan.group))

    queries = (
        (lambda i: inputs.q.at[here.batch, rows(i), head(i)], memory.q),
        (lambda i: inputs.q_segments.at[here.batch, rows(i)], memory.q_ids),
        (lambda i: inputs.lse.at[here.batch, head(i), rows(i)], memory.lse),
        (lambda i: inputs.delta.at[here.batch, head(i), rows(i)], memory.delta),
    )
    gradients = ((lambda i: inputs.d_out.at[here.batch, rows(i), head(i)], memory.d_out),)
    return (memory.q_ready, memory.q_free, queries), (memory.d_out_ready, memory.d_out_free, gradients)


def _dkv_step(
    plan: Plan, here: Here, memory: Any, mask: Mask, wanted: tuple, i: jax.Array, totals: list, masked: bool
) -> list[jax.Array]:
    cores, shape, me, slot = plan.cores, (ROWS, plan.block), here.me, lax.rem(i, jnp.int32(plan.stages))

    def factors(product, *weight_gradients):
        plgpu.barrier_wait(memory.q_ready.at[slot])
        add_product(product, memory.k.at[me], memory.q.at[slot], transpose=True)
        plgpu.barrier_wait(memory.d_out_ready.at[slot])
        for ref in weight_gradients:
            add_product(ref, memory.v.at[me], memory.d_out.at[slot], transpose=True)
        scores = plan.scores(read(product, unfinished=len(weight_gradients)))
        lse, delta = (over_rows(x, shape) for x in _statistics(plan, memory, slot, PER_COLUMN))
        block = here.walk.block(lax.div(i, jnp.int32(plan.group)))
        weights = plan.weights(scores, lse, mask(slot, block) if masked else None)
        found = {"dv": weights.astype(plan.dtype)}
        for ref in weight_gradients:
            gradient = weights * (read(ref) - delta)
            found["dk"] = plan.score_gradient(gradient, scores).astype(plan.dtype)
        return [found[name] for name in wanted]

    found = cores.scratch(factors, *[shape] * (2 if "dk" in wanted else 1))

    def add(*refs):
        for name, ref, factor in zip(wanted, refs, found, strict=True):
            add_product(ref, factor, (memory.q if name == "dk" else memory.d_out).at[slot])

    totals = cores.accumulate(add, totals)
    plgpu.commit_smem()  # the statistics have been read, before TMA writes there again
    plgpu.barrier_arrive(memory.q_free.at[slot])
    plgpu.barrier_arrive(memory.d_out_free.at[slot])
    return totals
