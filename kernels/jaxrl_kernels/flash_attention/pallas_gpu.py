"""Attention on Hopper GPUs (H100, H200): Pallas Mosaic GPU kernels with TMA, wgmma, specialised warpgroups.

As in FlashAttention-3 (arXiv 2407.08608, section 3): a producer warpgroup copies blocks into a ring in shared
memory; two consumers compute 64 rows each in ping-pong, so that the softmax of one overlaps with the products
of the other; within one, the product of weights and values overlaps with the next softmax. The backward pass
has two kernels: one per query tile for dq, and one per key tile for dk and dv, which sums the heads that
share keys. Neither uses atomic additions, so the same inputs give the same bits.

bfloat16 and float16 only: wgmma multiplies float32 as TF32. `dispatch.choose` takes another implementation
for float32.

On an H200 with jax 0.11.2 the forward pass of whole rows reaches the 578 TFLOP/s of FlashAttention-3's paper,
the backward pass 385 of its 450 (benchmarks/results/gpu_h200.json).

Blocks are as large as registers allow (`hopper.has_register_reallocation`): to head_dim 128 no kernel spills
more than 76 bytes a lane, with a soft-cap 264, and no products are serialised; MOSAIC_GPU_DUMP_PTXAS=1 prints
it. Above, without register reallocation, products are serialised.
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
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels.flash_attention.gpu_backward import dkv, dq
from jaxrl_kernels.flash_attention.gpu_plan import (
    LN2,
    LOG2E,
    MAX_HEAD_DIM,
    TILE,
    BlockMask,
    Inputs,
    RingBlocks,
    TilePlan,
    Work,
    blocks_to_read,
    copy_blocks,
    copy_tile,
    key_rings,
    over_blocks,
    over_columns,
    pad_matrix,
    pad_to,
    padded_inputs,
    passes,
    plan_for,
    store_tile,
)
from jaxrl_kernels.flash_attention.spec import MASKED_LSE, AttentionSpec, DynamicMask
from jaxrl_kernels.hopper import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PER_ROW,
    PRODUCER_REGISTERS,
    ROWS,
    add_product,
    launch,
    read_accumulator,
    unsupported_dtype,
)


def unsupported(head_dim: int, dtype: DTypeLike, softcap: float | None = None) -> str | None:
    """Return why the kernels do not support this head dim and type of q, k and v, or None."""
    if problem := unsupported_dtype(dtype):
        return problem
    return f"head_dim {head_dim} is over {MAX_HEAD_DIM}" if head_dim > MAX_HEAD_DIM else None


def _kernel(plan: TilePlan, *refs: Any, **memory: Any) -> None:
    """Compute the output and log-sum-exp of a query tile."""
    inputs, (out, lse), memory = Inputs(*refs[:-2]), refs[-2:], SimpleNamespace(**memory)
    # The producer warpgroup loads the query tile, then streams keys and values; consumers compute.
    work = Work.from_grid(plan, inputs, longest_first=True)

    @pl.when(work.warpgroup == CONSUMERS)
    def _copy():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        queries = lambda rows: inputs.q.at[work.batch, rows, work.head]
        ids = lambda rows: inputs.q_segments.at[work.batch, rows]
        windows = lambda rows: inputs.q_windows.at[work.batch, rows]
        copy_tile(
            work, memory.tile_ready, (queries, memory.q), (ids, memory.q_ids), (windows, memory.q_windows)
        )
        copy_blocks(plan, work.blocks.count, key_rings(plan, work, inputs, memory))

    # Attend to the blocks, then normalise and store.
    @pl.when(work.warpgroup < CONSUMERS)
    def _compute():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        plgpu.barrier_wait(memory.tile_ready)
        mask = BlockMask.of_rows(plan, work, inputs, memory)
        acc, top, total = _attend(plan, work, memory, mask)
        attends = total > 0.0
        total = jnp.where(attends, total, 1.0)
        acc *= over_columns(jnp.where(attends, 1.0 / total, 0.0), acc.shape)
        rows = pl.ds(work.first_row, ROWS)
        store_tile(acc.astype(plan.dtype), memory.q.at[work.warpgroup], out.at[work.batch, rows, work.head])
        lse_rows = jnp.where(attends, top * LN2 + jnp.log(total), MASKED_LSE)
        store_tile(lse_rows, memory.lse.at[work.warpgroup], lse.at[work.batch, work.head, rows])
        plgpu.wait_smem_to_gmem(0)
        pl.when(work.warpgroup == 0)(functools.partial(plgpu.barrier_wait, memory.turn.at[0]))


def _softmax(
    plan: TilePlan, product: jax.Array, top: jax.Array, total: jax.Array, visible: jax.Array | None
) -> tuple:
    """Return the running maximum (base 2) and sum, the decay of the sums so far, and the weights."""
    scores = plan.scores(product)
    scores = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
    new = jnp.maximum(top, jnp.max(scores, axis=1) * plan.log2_scale)
    weights = jnp.exp2(scores * plan.log2_scale - over_columns(new, scores.shape))
    decay = jnp.exp2(top - new)
    return new, total * decay + jnp.sum(weights, axis=1), decay, weights


def _first_block(plan: TilePlan, work: Work, memory: Any, mask: BlockMask) -> tuple:
    """Return the maxima, the sums and the weights of the first block of keys alone."""
    ops = plan.ops

    def scores(product):
        plgpu.barrier_wait(memory.k_ready.at[0])
        add_product(product, memory.q.at[work.warpgroup], memory.k.at[0], transpose=True)
        return read_accumulator(product)

    product = ops.scratch(scores, (ROWS, plan.block))
    visible = mask(jnp.int32(0), work.blocks.block(jnp.int32(0)))
    plgpu.barrier_arrive(memory.k_free.at[0])
    top, total = ops.full((ROWS,), MASKED_LSE, PER_ROW), ops.full((ROWS,), 0.0, PER_ROW)
    top, total, _, weights = _softmax(plan, product, top, total, visible)
    return top, total, weights.astype(plan.dtype)


def _attend(plan: TilePlan, work: Work, memory: Any, mask: BlockMask) -> tuple:
    """Return weights times values [ROWS, dim], the highest score (base 2) and the sum of weights [ROWS].

    Step i starts the scores of block i, then the weighted values of block i - 1, and computes the softmax of
    block i while the second runs.
    """
    ops, shape, stages, warpgroup = plan.ops, (ROWS, plan.block), jnp.int32(plan.stages), work.warpgroup
    pl.when(warpgroup == 1)(functools.partial(plgpu.barrier_arrive, memory.turn.at[0]))
    top, total, weights = _first_block(plan, work, memory, mask)

    def step(i, carry, masked):
        acc, top, total, weights = carry
        slot, last = lax.rem(i, stages), lax.rem(i - 1, stages)

        def both(acc_ref, product_ref):
            add_product(product_ref, memory.q.at[warpgroup], memory.k.at[slot], transpose=True)
            plgpu.barrier_wait(memory.v_ready.at[last])
            add_product(acc_ref, weights, memory.v.at[last])
            plgpu.barrier_arrive(memory.turn.at[1 - warpgroup])
            return read_accumulator(product_ref, in_flight=1)

        def overlap(acc_ref, *softmax_refs):
            plgpu.barrier_wait(memory.k_ready.at[slot])
            plgpu.barrier_wait(memory.turn.at[warpgroup])
            product = ops.scratch(functools.partial(both, acc_ref), shape)
            visible = mask(slot, work.blocks.block(i)) if masked else None
            plgpu.barrier_arrive(memory.k_free.at[slot])
            for ref, new in zip(softmax_refs, _softmax(plan, product, top, total, visible), strict=True):
                ref[...] = new

        others = [top, total, total, ops.full(shape, 0.0)]
        acc, top, total, decay, later = ops.accumulate(overlap, [acc], others)
        plgpu.barrier_arrive(memory.v_free.at[last])
        # Packing before the product of the last weights is done would make ptxas serialise products.
        weights = lax.optimization_barrier(later).astype(plan.dtype)
        return acc * over_columns(decay, acc.shape), top, total, weights

    carry = ops.full((ROWS, plan.dim), 0.0), top, total, weights
    acc, top, total, weights = over_blocks(step, carry, 1, work.blocks.masked, work.blocks.count)
    last = lax.rem(work.blocks.count - 1, stages)
    plgpu.barrier_wait(memory.v_ready.at[last])
    (acc,) = ops.accumulate(lambda ref: add_product(ref, weights, memory.v.at[last]), [acc])
    plgpu.barrier_arrive(memory.v_free.at[last])
    return acc, top, total


def forward(
    spec: AttentionSpec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_last: Int[Array, "B Tk"],
    mask: DynamicMask,
    *,
    blocks: RingBlocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B H Tq"]]:
    """Compute `reference.forward`.

    Args:
        blocks: other than `default_blocks`.
        interpret: run in the interpreter, to test.

    Raises:
        ValueError: blocks that do not fit into shared memory.
    """
    inputs = padded_inputs(q, k, v, q_segments, kv_last, mask, interpret)
    plan = plan_for(spec, inputs, "forward", blocks, interpret)
    (batch, length), heads = inputs.q_segments.shape, q.shape[2]
    # Shared memory: the query tile, a ring of keys and values, and their barriers.
    scratch = {
        "q": plan.matrix(CONSUMERS, ROWS),
        "k": plan.matrix(plan.stages, plan.block),
        "v": plan.matrix(plan.stages, plan.block),
        **plan.numbers(jnp.int32, "q_ids", "q_windows"),
        **plan.numbers(jnp.float32, "lse"),
        **plan.numbers(jnp.int32, "k_ids", ring=True),
        "tile_ready": plgpu.Barrier(num_arrivals=3 * CONSUMERS),
        **plan.barriers(k_ready=2, v_ready=1, k_free=CONSUMERS, v_free=CONSUMERS),
        "turn": plgpu.Barrier(num_barriers=CONSUMERS),
    }
    lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    shapes = jax.ShapeDtypeStruct(inputs.q.shape, plan.dtype), lse
    grid = {"head": heads, "tile": length // TILE, "batch": batch}
    inputs = inputs._replace(ranges=blocks_to_read(spec, mask, inputs, TILE, plan.block, of_keys=False))
    kernel = launch(functools.partial(_kernel, plan), shapes, scratch, grid, CONSUMERS, interpret)
    out, lse = kernel(*[x for x in inputs if x is not None])
    return out[:, : q.shape[1], :, : q.shape[3]], lse[:, :, : q.shape[1]]


def backward(
    spec: AttentionSpec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_last: Int[Array, "B Tk"],
    mask: DynamicMask,
    out: Float[Array, "B Tq H E"],
    lse: Float[Array, "B H Tq"],
    d_out: Float[Array, "B Tq H E"],
    d_lse: Float[Array, "B H Tq"] | None = None,
    *,
    blocks: RingBlocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B Tk K E"], Float[Array, "B Tk K E"]]:
    """Compute `reference.backward`; `blocks`, `interpret` and errors as in `forward`."""
    # delta = sum(d_out * out) is shared by dq and dk.
    delta = jnp.einsum("bthe,bthe->bht", d_out, out, preferred_element_type=jnp.float32)
    delta = delta if d_lse is None else delta - d_lse
    inputs = padded_inputs(q, k, v, q_segments, kv_last, mask, interpret)._replace(
        d_out=pad_matrix(d_out.astype(q.dtype), interpret),
        lse=pad_to(lse * LOG2E, {2: TILE}),
        delta=pad_to(delta, {2: TILE}),
    )
    # One kernel per query tile, and one or two per key tile.
    d_q = dq(plan_for(spec, inputs, "dq", blocks, interpret), inputs, mask)
    plan = plan_for(spec, inputs, "dkv", blocks, interpret)
    d_k, d_v = (x for names in passes(plan.dim) for x in dkv(plan, names, inputs, mask))
    return d_q[:, : q.shape[1], :, : q.shape[3]], *(x[:, : k.shape[1], :, : k.shape[3]] for x in (d_k, d_v))
