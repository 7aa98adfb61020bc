"""Attention on Hopper GPUs (H100, H200): Pallas Mosaic GPU kernels with TMA, wgmma and specialised warpgroups.

The ways are those of FlashAttention-3 (arXiv 2407.08608, section 3): a warpgroup does nothing but copy blocks
into a ring in shared memory; two others compute 64 rows each and take turns, so that the softmax of one runs
beside the products of the other; within one, the product of weights and values runs beside the next softmax.
The backward is two kernels, one a query tile for dq, one a key tile for dk and dv, which sums the heads that
share keys: nothing is added atomically, so the same inputs give the same bits.

bfloat16 and float16 only: wgmma multiplies float32 as TF32, which is no float32. `api.choose` takes another
implementation for float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxrl_kernels.flash_attention.mosaic import (
    PER_COLUMN,
    PER_ROW,
    ROWS,
    Cores,
    add_product,
    launch,
    matrix_memory,
    read,
    stages_that_fit,
)
from jaxrl_kernels.flash_attention.spec import NOTHING, Place, Spec

COMPUTE = 2
"""Warpgroups that compute."""
TILE = COMPUTE * ROWS
"""Queries (keys, for their gradients) of a block of threads; what lengths are padded to."""
LOG2E, LN2 = math.log2(math.e), math.log(2)
LARGEST_DIM = 256
JOINT_DIM = 128
"""To this head dim a warpgroup's registers hold the sums of both dk and dv; above, each has a pass."""
FEW_REGISTERS, MANY_REGISTERS = 40, 232
"""Of the warpgroup that copies and of those that compute: 40 + 2 * 232 = 504, of 512 a lane of each has."""


class Blocks(NamedTuple):
    """Rows of the blocks that pass through the ring of each kernel: 32, 64 or 128."""

    forward: int
    dq: int
    dkv: int


def default_blocks(dim: int) -> Blocks:
    """What the registers hold: 64 x block scores beside 64 x dim sums."""
    return Blocks(128, 64, 64) if dim <= JOINT_DIM else Blocks(64, 32, 32)


def unsupported(dim: int, dtype: Any) -> str | None:
    """Why these kernels do not take q, k and v of such a head dim and type, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"wgmma multiplies bfloat16 and float16, not {jnp.dtype(dtype).name}"
    return f"head_dim {dim} is over {LARGEST_DIM}" if dim > LARGEST_DIM else None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel knows when it is compiled."""

    spec: Spec
    dim: int
    dtype: Any
    group: int
    block: int
    stages: int
    interpret: bool

    @property
    def cores(self) -> Cores:
        return Cores(self.interpret)

    @property
    def unit(self) -> float:
        """Scores times this are in powers of two."""
        return (self.spec.softcap or self.spec.scale) * LOG2E

    def scores(self, product: jax.Array) -> jax.Array:
        """Of q k^T, in units of `unit`."""
        return jnp.tanh(product * (self.spec.scale / self.spec.softcap)) if self.spec.softcap else product

    def score_gradient(self, gradient: jax.Array, scores: jax.Array) -> jax.Array:
        """From that of the softmax's input to that of q k^T, but for the factor `scale`."""
        return gradient * (1.0 - scores * scores) if self.spec.softcap else gradient

    def matrix(self, count: int, rows: int) -> Any:
        return matrix_memory((count, rows, self.dim), self.dtype)

    def barriers(self, **arrivals: int) -> dict:
        """A ring of barriers each."""
        return {name: plgpu.Barrier(num_arrivals=n, num_barriers=self.stages) for name, n in arrivals.items()}


class Walk(NamedTuple):
    """The blocks that a tile reads: those with hidden pairs in them first, then [first_full, end_full)."""

    first: jax.Array
    first_full: jax.Array
    end_full: jax.Array
    end: jax.Array

    @property
    def masked(self) -> jax.Array:
        return self.first_full - self.first + self.end - self.end_full

    @property
    def count(self) -> jax.Array:
        return self.end - self.first

    def block(self, i: jax.Array) -> jax.Array:
        before = self.first_full - self.first
        late = jnp.where(i < self.masked, self.end_full + i - before, self.first_full + i - self.masked)
        return jnp.where(i < before, self.first + i, late)


def walks(
    spec: Spec,
    place: Place,
    q_segments: Int[Array, "B Tq"],
    kv_segments: Int[Array, "B Tk"],
    q_block: int,
    kv_block: int,
    of_keys: bool,
) -> Int[Array, "B tiles 4"]:
    """The `Walk` of each query tile over blocks of keys, or of each key tile over blocks of queries.

    Segments need not be in order: blocks between the first and the last visible one are read. A tile that
    sees nothing reads one block.
    """
    q_low, q_high, q_whole = _ids(q_segments, q_block)
    k_low, k_high, k_whole = _ids(kv_segments, kv_block)
    q_low, q_high, q_whole = q_low[:, :, None], q_high[:, :, None], q_whole[:, :, None]
    k_low, k_high, k_whole = k_low[:, None], k_high[:, None], k_whole[:, None]
    q_first = place.q_start + jnp.arange(q_low.shape[1])[:, None] * q_block
    k_first = place.kv_start + jnp.arange(k_low.shape[2]) * kv_block
    q_last, k_last = q_first + q_block - 1, k_first + kv_block - 1
    some = (q_high >= k_low) & (k_high >= q_low) & (q_first - k_last < place.window)
    full = q_whole & k_whole & (q_low == k_low) & (q_last - k_first < place.window)
    if spec.causal:
        some, full = some & (k_first <= q_last), full & (k_last <= q_first)
    if of_keys:
        some, full = jnp.swapaxes(some, 1, 2), jnp.swapaxes(full, 1, 2)
    return _ranges(some, full)


def _ids(segments: Int[Array, "B T"], block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of every block the lowest and highest id that is not padding, and whether all are one such id."""
    ids = segments.reshape(segments.shape[0], -1, block)
    low = jnp.min(jnp.where(ids > 0, ids, jnp.iinfo(jnp.int32).max), axis=-1)
    high = jnp.max(ids, axis=-1)
    return low, high, (low == high) & (jnp.min(ids, axis=-1) > 0)


def _ranges(some: jax.Array, full: jax.Array) -> Int[Array, "B tiles 4"]:
    """From the first to the last that is true in `some`, [0, 1) if none is; the first run of `full` within."""
    count = some.shape[-1]
    index = jnp.arange(count)
    first = jnp.min(jnp.where(some, index, count), axis=-1)
    end = jnp.max(jnp.where(some, index + 1, 0), axis=-1)
    first, end = jnp.where(end == 0, 0, first), jnp.maximum(end, 1)
    first_full = jnp.min(jnp.where(full, index, count), axis=-1)
    end_full = jnp.min(jnp.where(full | (index < first_full[..., None]), count, index), axis=-1)
    none = first_full == count
    first_full, end_full = jnp.where(none, first, first_full), jnp.where(none, first, end_full)
    return jnp.stack([first, first_full, end_full, end], axis=-1).astype(jnp.int32)


def _walk(walks_ref: Any, batch: jax.Array, tile: jax.Array) -> Walk:
    return Walk(*(walks_ref[batch, tile, i] for i in range(4)))


def _visible(
    plan: Plan, rows: jax.Array, columns: jax.Array, window: Any, offset: Any, keys_first: bool
) -> jax.Array:
    """Which of the [ROWS, block] pairs are. `offset`: index of the first query less that of the first key."""
    shape = (rows.shape[0], columns.shape[0])
    back = (
        plan.cores.iota(shape, 1 if keys_first else 0)
        - plan.cores.iota(shape, 0 if keys_first else 1)
        + offset
    )
    same = lax.broadcast_in_dim(rows, shape, [0]) == lax.broadcast_in_dim(columns, shape, [1])
    seen = same & (back < window)
    return seen & (back >= 0) if plan.spec.causal else seen


def _row_segments(plan: Plan, segments: Any) -> jax.Array:
    """Those of padding are equal to no other."""
    ids = plan.cores.layout(segments[...], PER_ROW)
    return jnp.where(ids > 0, ids, -1)


def _over_columns(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _over_rows(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [1])


def _feed(plan: Plan, count: jax.Array, rings: tuple) -> None:
    """Copies `count` blocks into rings, each (ready, free, ((where block i is, buffer), ...))."""

    @pl.loop(0, count)
    def _(i):
        slot = lax.rem(i, jnp.int32(plan.stages))
        for ready, free, pieces in rings:
            pl.when(i >= plan.stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
            for source, buffer in pieces:
                plgpu.copy_gmem_to_smem(source(i), buffer.at[slot], ready.at[slot])

    @pl.loop(jnp.maximum(count - plan.stages, 0), count)  # every phase of a barrier is waited for
    def _(i):
        for _, free, _ in rings:
            plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(plan.stages))])


def _loop(step: Callable, carry: Any, first: int, masked: jax.Array, count: jax.Array) -> Any:
    """step(i, carry, masked): `masked` blocks with the mask, those after them up to `count` without."""
    carry = lax.fori_loop(jnp.int32(first), masked, functools.partial(step, masked=True), carry)
    rest = jnp.maximum(masked, first)
    return lax.fori_loop(rest, count, functools.partial(step, masked=False), carry)


def _forward_kernel(
    plan: Plan, q, k, v, q_segments, kv_segments, walks_ref, place, out, lse,
    *, q_smem, q_ids, lse_smem, k_smem, v_smem, k_ids, q_ready, k_ready, v_ready, k_free, v_free, turn,
):  # fmt: skip
    head, tile, batch = lax.axis_index("head"), lax.axis_index("tile"), lax.axis_index("batch")
    tile = walks_ref.shape[1] - 1 - tile  # the long ones of a causal row first
    me = lax.axis_index("group")
    walk = _walk(walks_ref, batch, tile)

    @pl.when(me == COMPUTE)
    def _copy():
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        kv_head = lax.div(head, jnp.int32(plan.group))
        for g in range(COMPUTE):
            rows = pl.ds(tile * TILE + g * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_smem.at[g], q_ready)
            plgpu.copy_gmem_to_smem(q_segments.at[batch, rows], q_ids.at[g], q_ready)

        def rows(i):
            return pl.ds(walk.block(i) * plan.block, plan.block)

        keys = (
            (lambda i: k.at[batch, rows(i), kv_head], k_smem),
            (lambda i: kv_segments.at[batch, rows(i)], k_ids),
        )
        values = ((lambda i: v.at[batch, rows(i), kv_head], v_smem),)
        _feed(plan, walk.count, ((k_ready, k_free, keys), (v_ready, v_free, values)))

    @pl.when(me < COMPUTE)
    def _compute():
        plgpu.set_max_registers(MANY_REGISTERS, action="increase")
        first = tile * TILE + me * ROWS
        plgpu.barrier_wait(q_ready)
        segments = _row_segments(plan, q_ids.at[me])
        start, window = place[0] - place[1] + first, place[2]

        def visible(i, slot):
            columns = plan.cores.layout(k_ids[slot], PER_COLUMN)
            return _visible(plan, segments, columns, window, start - walk.block(i) * plan.block, False)

        refs = _ForwardRefs(q_smem.at[me], k_smem, v_smem, k_ready, v_ready, k_free, v_free, turn)
        acc, top, total = _attend(plan, refs, me, walk, visible)
        seen = total > 0.0
        inverse = jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0)
        q_smem[me] = (acc * _over_columns(inverse, acc.shape)).astype(plan.dtype)
        lse_smem[me] = jnp.where(seen, top * LN2 + jnp.log(jnp.where(seen, total, 1.0)), NOTHING)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[me], out.at[batch, pl.ds(first, ROWS), head])
        plgpu.copy_smem_to_gmem(lse_smem.at[me], lse.at[batch, head, pl.ds(first, ROWS)])
        plgpu.wait_smem_to_gmem(0)
        pl.when(me == 0)(functools.partial(plgpu.barrier_wait, turn.at[0]))


class _ForwardRefs(NamedTuple):
    q: Any
    k: Any
    v: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    turn: Any


def _attend(plan: Plan, refs: _ForwardRefs, me: jax.Array, walk: Walk, visible: Callable) -> tuple:
    """Weights times values [ROWS, dim], the highest score (in powers of two) and the sum of weights [ROWS].

    Step i begins the scores of block i, then the weighted values of block i - 1, and does the softmax of
    block i while the second runs.
    """
    cores, shape, stages = plan.cores, (ROWS, plan.block), jnp.int32(plan.stages)

    def softmax(product, top, total, i, slot, masked):
        scores = plan.scores(product)
        scores = jnp.where(visible(i, slot), scores, -jnp.inf) if masked else scores
        new = jnp.maximum(top, jnp.max(scores, axis=1) * plan.unit)
        weights = jnp.exp2(scores * plan.unit - _over_columns(new, shape))
        decay = jnp.exp2(top - new)
        return new, total * decay + jnp.sum(weights, axis=1), decay, weights.astype(plan.dtype)

    def first(product):
        plgpu.barrier_wait(refs.k_ready.at[0])
        add_product(product, refs.q, refs.k.at[0], transpose=True)
        return read(product)

    pl.when(me == 1)(functools.partial(plgpu.barrier_arrive, refs.turn.at[0]))
    product = cores.scratch(first, shape)
    top, total = cores.full((ROWS,), NOTHING, PER_ROW), cores.full((ROWS,), 0.0, PER_ROW)
    top, total, _, weights = softmax(product, top, total, jnp.int32(0), jnp.int32(0), True)
    plgpu.barrier_arrive(refs.k_free.at[0])

    def step(i, carry, masked):
        acc, top, total, weights = carry
        slot, last = lax.rem(i, stages), lax.rem(i - 1, stages)

        def overlap(acc_ref, top_ref, total_ref, decay_ref, weights_ref):
            def both(product_ref):
                add_product(product_ref, refs.q, refs.k.at[slot], transpose=True)
                plgpu.barrier_wait(refs.v_ready.at[last])
                add_product(acc_ref, weights, refs.v.at[last])
                plgpu.barrier_arrive(refs.turn.at[1 - me])
                return read(product_ref, unfinished=1)

            plgpu.barrier_wait(refs.k_ready.at[slot])
            plgpu.barrier_wait(refs.turn.at[me])
            product = cores.scratch(both, shape)
            new = softmax(product, top, total, i, slot, masked)
            plgpu.barrier_arrive(refs.k_free.at[slot])
            top_ref[...], total_ref[...], decay_ref[...], weights_ref[...] = new

        acc, top, total, decay, weights = cores.accumulate(overlap, [acc], [top, total, total, weights])
        plgpu.barrier_arrive(refs.v_free.at[last])
        return acc * _over_columns(decay, acc.shape), top, total, weights

    carry = cores.full((ROWS, plan.dim), 0.0), top, total, weights
    acc, top, total, weights = _loop(step, carry, 1, walk.masked, walk.count)
    last = lax.rem(walk.count - 1, stages)
    plgpu.barrier_wait(refs.v_ready.at[last])
    (acc,) = cores.accumulate(lambda ref: add_product(ref, weights, refs.v.at[last]), [acc])
    plgpu.barrier_arrive(refs.v_free.at[last])
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
    padded = _pad(q, k, v, q_segments, kv_segments)
    plan = _plan(spec, padded.q, padded.k, "forward", blocks, interpret)
    batch, length, heads, _ = padded.q.shape
    scratch = {
        "q_smem": plan.matrix(COMPUTE, ROWS),
        "q_ids": plgpu.SMEM((COMPUTE, ROWS), jnp.int32),
        "lse_smem": plgpu.SMEM((COMPUTE, ROWS), jnp.float32),
        "k_smem": plan.matrix(plan.stages, plan.block),
        "v_smem": plan.matrix(plan.stages, plan.block),
        "k_ids": plgpu.SMEM((plan.stages, plan.block), jnp.int32),
        "q_ready": plgpu.Barrier(num_arrivals=2 * COMPUTE),
        **plan.barriers(k_ready=2, v_ready=1, k_free=COMPUTE, v_free=COMPUTE),
        "turn": plgpu.Barrier(num_barriers=COMPUTE),
    }
    shapes = (
        jax.ShapeDtypeStruct(padded.q.shape, plan.dtype),
        jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
    )
    grid = {"head": heads, "tile": length // TILE, "batch": batch}
    ways = walks(spec, place, padded.q_segments, padded.kv_segments, TILE, plan.block, of_keys=False)
    kernel = launch(functools.partial(_forward_kernel, plan), shapes, scratch, grid, COMPUTE, interpret)
    out, lse = kernel(*padded, ways, place.array())
    return out[:, : q.shape[1], :, : q.shape[3]], lse[:, :, : q.shape[1]]


class _Padded(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_segments: jax.Array
    kv_segments: jax.Array


def _pad_to(x: jax.Array, multiples: dict[int, int]) -> jax.Array:
    widths = [(0, -x.shape[dim] % multiples.get(dim, 1)) for dim in range(x.ndim)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def _pad(q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, kv_segments: jax.Array) -> _Padded:
    """Lengths to whole tiles, of segment 0; the head dim to what TMA swizzles, of zeros."""
    q, k, v = (_pad_to(x, {1: TILE, 3: 32}) for x in (q, k, v))
    return _Padded(q, k, v, *(_pad_to(x.astype(jnp.int32), {1: TILE}) for x in (q_segments, kv_segments)))


def _plan(spec: Spec, q: jax.Array, k: jax.Array, what: str, blocks: Blocks | None, interpret: bool) -> Plan:
    """How the kernel `what` (a field of `Blocks`) is cut."""
    dim, size = q.shape[-1], q.dtype.itemsize
    if why := unsupported(dim, q.dtype):
        raise ValueError(f"flash_attention on Hopper: {why}; take another implementation")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads evenly")
    block = getattr(blocks or default_blocks(dim), what)
    resident, statistics = (1, 2) if what == "forward" else (2, 3)
    fixed = TILE * (resident * dim * size + 4 * statistics)
    stages = stages_that_fit(f"{what} at head_dim {dim}", block, fixed, 2 * dim * size + 4 * statistics)
    return Plan(spec, dim, q.dtype, q.shape[2] // k.shape[2], block, stages, interpret)
