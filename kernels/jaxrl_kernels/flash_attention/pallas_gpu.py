"""Attention on Hopper GPUs (H100, H200): Pallas Mosaic GPU kernels with TMA, wgmma, specialised warpgroups.

The ways are those of FlashAttention-3 (arXiv 2407.08608, section 3): a warpgroup does nothing but copy blocks
into a ring in shared memory; two others compute 64 rows each and take turns, so that the softmax of one runs
beside the products of the other; within one, the product of weights and values runs beside the next softmax.
The backward is two kernels, one a query tile for dq, one a key tile for dk and dv, which sums the heads that
share keys: nothing is added atomically, so the same inputs give the same bits.

bfloat16 and float16 only: wgmma multiplies float32 as TF32, which is no float32. `api.choose` takes
another implementation for float32.

Compiled for an H100 and run in Pallas' interpreter, not yet on a GPU: speed and best blocks are not known.
The blocks are what registers hold (`hopper.registers_divided`): to head_dim 128 no kernel spills more than 76
bytes a lane, with a soft-cap 264, and no products are serialised; MOSAIC_GPU_DUMP_PTXAS=1 prints it. Above,
where registers are not divided, products run in turn.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxrl_kernels.flash_attention.gpu_backward import dkv, dq
from jaxrl_kernels.flash_attention.gpu_plan import (
    LN2,
    LOG2E,
    TILE,
    Blocks,
    Here,
    Inputs,
    Mask,
    Plan,
    copy_blocks,
    copy_tile,
    key_rings,
    over_blocks,
    over_columns,
    pad_to,
    padded_inputs,
    passes,
    plan_for,
    store_tile,
    unsupported,
    walks,
)
from jaxrl_kernels.flash_attention.spec import NOTHING, Place, Spec
from jaxrl_kernels.hopper import (
    COMPUTE,
    FEW_REGISTERS,
    MANY_REGISTERS,
    PER_ROW,
    ROWS,
    add_product,
    launch,
    read,
)

__all__ = ["Blocks", "backward", "forward", "unsupported"]


def _kernel(plan: Plan, *refs: Any, **memory: Any) -> None:
    """A query tile: its output and log-sum-exp."""
    inputs, (out, lse), memory = Inputs(*refs[:7]), refs[7:], SimpleNamespace(**memory)
    here = Here.of(inputs, longest_first=True)

    @pl.when(here.me == COMPUTE)
    def _copy():
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        queries = lambda rows: inputs.q.at[here.batch, rows, here.head]
        ids = lambda rows: inputs.q_segments.at[here.batch, rows]
        copy_tile(here, memory.tile_ready, (queries, memory.q), (ids, memory.q_ids))
        copy_blocks(plan, here.walk.count, key_rings(plan, here, inputs, memory))

    @pl.when(here.me < COMPUTE)
    def _compute():
        plgpu.set_max_registers(MANY_REGISTERS, action="increase")
        plgpu.barrier_wait(memory.tile_ready)
        mask = Mask.of(plan, here, inputs, memory.q_ids, memory.k_ids)
        acc, top, total = _attend(plan, here, memory, mask)
        seen = total > 0.0
        total = jnp.where(seen, total, 1.0)
        acc *= over_columns(jnp.where(seen, 1.0 / total, 0.0), acc.shape)
        rows = pl.ds(here.first, ROWS)
        store_tile(acc.astype(plan.dtype), memory.q.at[here.me], out.at[here.batch, rows, here.head])
        lse_rows = jnp.where(seen, top * LN2 + jnp.log(total), NOTHING)
        store_tile(lse_rows, memory.lse.at[here.me], lse.at[here.batch, here.head, rows])
        plgpu.wait_smem_to_gmem(0)
        pl.when(here.me == 0)(functools.partial(plgpu.barrier_wait, memory.turn.at[0]))


def _softmax(
    plan: Plan, product: jax.Array, top: jax.Array, total: jax.Array, seen: jax.Array | None
) -> tuple:
    """The running maximum (in powers of two) and sum, what the sums so far shrink by, and the weights."""
    scores = plan.scores(product)
    scores = scores if seen is None else jnp.where(seen, scores, -jnp.inf)
    new = jnp.maximum(top, jnp.max(scores, axis=1) * plan.unit)
    weights = jnp.exp2(scores * plan.unit - over_columns(new, scores.shape))
    decay = jnp.exp2(top - new)
    return new, total * decay + jnp.sum(weights, axis=1), decay, weights


def _first_block(plan: Plan, here: Here, memory: Any, mask: Mask) -> tuple:
    """The highest scores, the sums and the weights of the first block of keys alone."""
    cores = plan.cores

    def scores(product):
        plgpu.barrier_wait(memory.k_ready.at[0])
        add_product(product, memory.q.at[here.me], memory.k.at[0], transpose=True)
        return read(product)

    product = cores.scratch(scores, (ROWS, plan.block))
    seen = mask(jnp.int32(0), here.walk.block(jnp.int32(0)))
    plgpu.barrier_arrive(memory.k_free.at[0])
    top, total = cores.full((ROWS,), NOTHING, PER_ROW), cores.full((ROWS,), 0.0, PER_ROW)
    top, total, _, weights = _softmax(plan, product, top, total, seen)
    return top, total, weights.astype(plan.dtype)


def _attend(plan: Plan, here: Here, memory: Any, mask: Mask) -> tuple:
    """Weights times values [ROWS, dim], the highest score (in powers of two) and the sum of weights [ROWS].

    Step i begins the scores of block i, then the weighted values of block i - 1, and does the softmax of
    block i while the second runs.
    """
    cores, shape, stages, me = plan.cores, (ROWS, plan.block), jnp.int32(plan.stages), here.me
    pl.when(me == 1)(functools.partial(plgpu.barrier_arrive, memory.turn.at[0]))
    top, total, weights = _first_block(plan, here, memory, mask)

    def step(i, carry, masked):
        acc, top, total, weights = carry
        slot, last = lax.rem(i, stages), lax.rem(i - 1, stages)

        def both(acc_ref, product_ref):
            add_product(product_ref, memory.q.at[me], memory.k.at[slot], transpose=True)
            plgpu.barrier_wait(memory.v_ready.at[last])
            add_product(acc_ref, weights, memory.v.at[last])
            plgpu.barrier_arrive(memory.turn.at[1 - me])
            return read(product_ref, unfinished=1)

        def overlap(acc_ref, *softmax_refs):
            plgpu.barrier_wait(memory.k_ready.at[slot])
            plgpu.barrier_wait(memory.turn.at[me])
            product = cores.scratch(functools.partial(both, acc_ref), shape)
            seen = mask(slot, here.walk.block(i)) if masked else None
            plgpu.barrier_arrive(memory.k_free.at[slot])
            for ref, new in zip(softmax_refs, _softmax(plan, product, top, total, seen), strict=True):
                ref[...] = new

        others = [top, total, total, cores.full(shape, 0.0)]
        acc, top, total, decay, later = cores.accumulate(overlap, [acc], others)
        plgpu.barrier_arrive(memory.v_free.at[last])
        # Not packed before the product of those in use is done: it would make ptxas run products in turn.
        weights = lax.optimization_barrier(later).astype(plan.dtype)
        return acc * over_columns(decay, acc.shape), top, total, weights

    carry = cores.full((ROWS, plan.dim), 0.0), top, total, weights
    acc, top, total, weights = over_blocks(step, carry, 1, here.walk.masked, here.walk.count)
    last = lax.rem(here.walk.count - 1, stages)
    plgpu.barrier_wait(memory.v_ready.at[last])
    (acc,) = cores.accumulate(lambda ref: add_product(ref, weights, memory.v.at[last]), [acc])
    plgpu.barrier_arrive(memory.v_free.at[last])
    return acc, top, total


def forward(
    spec: Spec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_segments: Int[Array, "B Tk"],
    place: Place,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B H Tq"]]:
    """Attention and the log-sum-exp of its scores; see `spec` for what is visible.

    Args:
        blocks: other than `default_blocks`.
        interpret: run on the CPU, to test.

    Raises:
        ValueError: a type or head dim that the kernels do not take, or blocks that do not fit.
    """
    inputs = padded_inputs(q, k, v, q_segments, kv_segments, place)
    plan = plan_for(spec, inputs, "forward", blocks, interpret)
    batch, length, heads, _ = inputs.q.shape
    scratch = {
        "q": plan.matrix(COMPUTE, ROWS),
        "k": plan.matrix(plan.stages, plan.block),
        "v": plan.matrix(plan.stages, plan.block),
        **plan.numbers(jnp.int32, "q_ids"),
        **plan.numbers(jnp.float32, "lse"),
        **plan.numbers(jnp.int32, "k_ids", ring=True),
        "tile_ready": plgpu.Barrier(num_arrivals=2 * COMPUTE),
        **plan.barriers(k_ready=2, v_ready=1, k_free=COMPUTE, v_free=COMPUTE),
        "turn": plgpu.Barrier(num_barriers=COMPUTE),
    }
    lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    shapes = jax.ShapeDtypeStruct(inputs.q.shape, plan.dtype), lse
    grid = {"head": heads, "tile": length // TILE, "batch": batch}
    ways = walks(spec, place, inputs.q_segments, inputs.kv_segments, TILE, plan.block, of_keys=False)
    kernel = launch(functools.partial(_kernel, plan), shapes, scratch, grid, COMPUTE, interpret)
    out, lse = kernel(*inputs._replace(walks=ways)[:7])
    return out[:, : q.shape[1], :, : q.shape[3]], lse[:, :, : q.shape[1]]


def backward(
    spec: Spec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_segments: Int[Array, "B Tk"],
    place: Place,
    out: Float[Array, "B Tq H E"],
    lse: Float[Array, "B H Tq"],
    d_out: Float[Array, "B Tq H E"],
    d_lse: Float[Array, "B H Tq"] | None = None,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B Tk K E"], Float[Array, "B Tk K E"]]:
    """The gradients of q, k and v, in their type; `blocks`, `interpret` and what is raised as in `forward`.

    `out` and `lse` may be those of a longer sequence of keys of which k and v are a part.
    """
    delta = jnp.einsum("bthe,bthe->bht", d_out, out, preferred_element_type=jnp.float32)
    delta = delta if d_lse is None else delta - d_lse
    inputs = padded_inputs(q, k, v, q_segments, kv_segments, place)._replace(
        d_out=pad_to(d_out.astype(q.dtype), {1: TILE, 3: 32}),
        lse=pad_to(lse * LOG2E, {2: TILE}),
        delta=pad_to(delta, {2: TILE}),
    )
    d_q = dq(plan_for(spec, inputs, "dq", blocks, interpret), inputs, place)
    plan = plan_for(spec, inputs, "dkv", blocks, interpret)
    d_k, d_v = (x for wanted in passes(plan.dim) for x in dkv(plan, wanted, inputs, place))
    return d_q[:, : q.shape[1], :, : q.shape[3]], *(x[:, : k.shape[1], :, : k.shape[3]] for x in (d_k, d_v))
