"""Tiling of the Hopper attention kernels: tiles and blocks, which blocks a tile reads, their masks."""

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
from jaxtyping import Array, Int

from jaxrl_kernels.flash_attention.blocks import (
    PADDING,
    block_range,
    key_blocks,
    query_blocks,
    visible_blocks,
)
from jaxrl_kernels.flash_attention.spec import AttentionSpec, DynamicMask
from jaxrl_kernels.hopper import (
    CONSUMERS,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    TILE_ROWS,
    WarpgroupOps,
    has_register_reallocation,
    matrix_memory,
    stages_that_fit,
)

TILE = CONSUMERS * ROWS
"""Queries (keys, for their gradients) of a thread block; lengths are padded to a multiple."""
LOG2E, LN2 = math.log2(math.e), math.log(2)
MAX_HEAD_DIM = 256


class RingBlocks(NamedTuple):
    """Rows of the blocks that pass through the ring of each kernel: 32, 64 or 128."""

    forward: int
    dq: int
    dkv: int


def default_blocks(dim: int) -> RingBlocks:
    """Return the blocks that registers hold: 64 x block scores beside 64 x dim sums."""
    if dim > 128:
        return RingBlocks(64, 32, 32)
    return RingBlocks(128 if has_register_reallocation() else 64, 64, 64)


def passes(dim: int) -> list[tuple[str, ...]]:
    """Return the passes over queries: dk and dv together if registers hold both sums, else one pass each."""
    return [("dk", "dv")] if dim <= (128 if has_register_reallocation() else 64) else [("dk",), ("dv",)]


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Static parameters of a kernel."""

    spec: AttentionSpec
    dim: int
    dtype: Any
    group: int
    block: int
    stages: int
    interpret: bool

    @property
    def ops(self) -> WarpgroupOps:
        return WarpgroupOps(self.interpret)

    @property
    def log2_scale(self) -> float:
        """Factor from `scores` to exponents of 2."""
        return (self.spec.softcap or self.spec.scale) * LOG2E

    def scores(self, product: jax.Array) -> jax.Array:
        """Return the scores of q k^T, divided by the scale or the soft-cap."""
        return jnp.tanh(product * (self.spec.scale / self.spec.softcap)) if self.spec.softcap else product

    def score_gradient(self, gradient: jax.Array, scores: jax.Array) -> jax.Array:
        """Return the gradient of q k^T, without the factor `scale`, from the gradient of the softmax's
        input."""
        return gradient * (1.0 - scores * scores) if self.spec.softcap else gradient

    def weights(self, scores: jax.Array, lse: jax.Array, visible: jax.Array | None) -> jax.Array:
        """Return the softmax weights from the log-sum-exp in base 2."""
        scores = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
        return jnp.exp2(scores * self.log2_scale - lse)

    def matrix(self, count: int, rows: int) -> Any:
        # The contracted dim of a product, head dim or block, is a multiple of the swizzle.
        return matrix_memory((count, rows, self.dim), self.dtype, math.gcd(self.dim, self.block))

    def numbers(self, dtype: Any, *names: str, ring: bool = False) -> dict:
        """Return shared memory for one number a row, of the tile or of the blocks in the ring."""
        shape = (self.stages, self.block) if ring else (CONSUMERS, ROWS)
        return {name: plgpu.SMEM(shape, dtype) for name in names}

    def barriers(self, **arrivals: int) -> dict:
        """Return a ring of barriers for each name, by the number of arrivals."""
        return {name: plgpu.Barrier(num_arrivals=n, num_barriers=self.stages) for name, n in arrivals.items()}


class BlockRange(NamedTuple):
    """The blocks that a tile reads: first the blocks with masked pairs, then [first_full, end_full)."""

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


class BlockList(NamedTuple):
    """The blocks that a tile reads if segments have branches; blocks with masked pairs come first."""

    masked: jax.Array
    count: jax.Array
    block: Callable

    @staticmethod
    def read(numbers: Any, *tile: jax.Array) -> BlockList:
        """Read a tile's list from memory: `masked`, `count` and the blocks."""
        return BlockList(numbers[*tile, 0], numbers[*tile, 1], lambda i: numbers[*tile, 2 + i])


def blocks_to_read(
    spec: AttentionSpec,
    mask: DynamicMask,
    inputs: Inputs,
    q_block: int,
    kv_block: int,
    of_keys: bool,
) -> Int[Array, "B tiles numbers"]:
    """Return each query tile's blocks of keys, or each key tile's blocks of queries: a `BlockRange`, with
    branches a `BlockList`.

    A fully masked tile reads one block.
    """
    q = query_blocks(mask, inputs.q_segments, inputs.q_windows, q_block)
    some, full = visible_blocks(mask, q, key_blocks(inputs.kv_last, kv_block), (q_block, kv_block))
    if of_keys:
        some, full = jnp.swapaxes(some, 1, 2), jnp.swapaxes(full, 1, 2)
    if spec.branches:
        order = jnp.argsort(jnp.where(full, 1, jnp.where(some, 0, 2)), axis=-1, stable=True)
        masked, count = (some & ~full).sum(-1), some.sum(-1)
        masked, count = jnp.where(count == 0, 1, jnp.stack([masked, count]))
        return jnp.concatenate([masked[..., None], count[..., None], order], axis=-1).astype(jnp.int32)
    first, end = block_range(some)
    first_full = jnp.argmax(full, axis=-1)
    run = full | (jnp.arange(full.shape[-1]) < first_full[..., None])
    end_full = jnp.where(run.all(-1), full.shape[-1], jnp.argmin(run, axis=-1))
    none = ~full.any(-1)
    first_full, end_full = jnp.where(none, first, first_full), jnp.where(none, first, end_full)
    return jnp.stack([first, first_full, end_full, jnp.maximum(end, 1)], axis=-1).astype(jnp.int32)


class Inputs(NamedTuple):
    """Inputs of every kernel, in order: arrays or references to them; the last three of the backward pass."""

    q: Any
    k: Any
    v: Any
    q_segments: Any
    """`PADDING` for padding."""
    q_windows: Any
    kv_last: Any
    offsets: Any
    ranges: Any = None
    d_out: Any = None
    lse: Any = None
    """Log-sum-exp in base 2."""
    delta: Any = None


class Work(NamedTuple):
    """The tile of this thread block, and the rows of it of this warpgroup."""

    batch: jax.Array
    head: jax.Array
    tile: jax.Array
    warpgroup: jax.Array
    blocks: BlockRange | BlockList

    @staticmethod
    def from_grid(plan: TilePlan, inputs: Inputs, longest_first: bool = False) -> Work:
        """Return this program's work; of query tiles `longest_first` starts with the last."""
        batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        tile = inputs.ranges.shape[1] - 1 - tile if longest_first else tile
        if plan.spec.branches:
            blocks = BlockList.read(inputs.ranges, batch, tile)
        else:
            blocks = BlockRange(*(inputs.ranges[batch, tile, i] for i in range(4)))
        return Work(batch, head, tile, lax.axis_index("group"), blocks)

    @property
    def first_row(self) -> jax.Array:
        """The first row of this warpgroup."""
        return self.tile * TILE + self.warpgroup * ROWS


class BlockMask(NamedTuple):
    """The mask of a warpgroup's rows (queries, or keys) and a block, from numbers in shared memory."""

    plan: TilePlan
    memory: Any
    """Shared memory with `q_ids`, `q_windows` and `k_ids`; the numbers of the columns are in the ring."""
    rows: tuple[jax.Array, ...]
    """[ROWS] segments and windows of queries; `kv_last` of keys."""
    start: jax.Array
    """Position of the first row's token relative to the first column's token."""
    of_keys: bool

    @staticmethod
    def of_rows(plan: TilePlan, work: Work, inputs: Inputs, memory: Any, of_keys: bool = False) -> BlockMask:
        """Return the mask of this warpgroup's rows."""
        arrays = (memory.k_ids,) if of_keys else (memory.q_ids, memory.q_windows)
        rows = tuple(plan.ops.layout(array[work.warpgroup], PER_ROW) for array in arrays)
        ahead = inputs.offsets[0] - inputs.offsets[1]
        start = -ahead if of_keys else ahead
        return BlockMask(plan, memory, rows, start + work.first_row, of_keys)

    def __call__(self, slot: jax.Array, block: jax.Array) -> jax.Array:
        """Return which of the [ROWS, block] pairs are visible."""
        ops, shape = self.plan.ops, (ROWS, self.plan.block)
        arrays = (self.memory.q_ids, self.memory.q_windows) if self.of_keys else (self.memory.k_ids,)
        columns = [over_rows(ops.layout(array[slot], PER_COLUMN), shape) for array in arrays]
        plgpu.commit_smem()  # reads end before TMA writes there again
        ahead = ops.iota(shape, 0) - ops.iota(shape, 1) + (self.start - block * self.plan.block)
        back = -ahead if self.of_keys else ahead
        rows = [over_columns(x, shape) for x in self.rows]
        (segments, windows), (last,) = (columns, rows) if self.of_keys else (rows, columns)
        return (segments <= last) & (back >= 0) & (back < windows)


def over_columns(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcast one number per row to a matrix."""
    return lax.broadcast_in_dim(x, shape, [0])


def over_rows(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcast one number per column to a matrix."""
    return lax.broadcast_in_dim(x, shape, [1])


def copy_blocks(plan: TilePlan, count: jax.Array, rings: tuple) -> None:
    """Copy `count` blocks into rings (ready, free, ((source of block i, buffer), ...)); by the producer."""

    @pl.loop(0, count)
    def _(i):
        slot = lax.rem(i, jnp.int32(plan.stages))
        for ready, free, pieces in rings:
            pl.when(i >= plan.stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
            for source, buffer in pieces:
                plgpu.copy_gmem_to_smem(source(i), buffer.at[slot], ready.at[slot])

    @pl.loop(jnp.maximum(count - plan.stages, 0), count)  # wait for every phase of a barrier
    def _(i):
        for _, free, _ in rings:
            plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(plan.stages))])


def over_blocks(step: Callable, carry: Any, first: int, masked: jax.Array, count: jax.Array) -> Any:
    """Run step(i, carry, masked) with the mask for `masked` blocks, without for the rest up to `count`."""
    carry = lax.fori_loop(jnp.int32(first), masked, functools.partial(step, masked=True), carry)
    unmasked = jnp.maximum(masked, first)
    return lax.fori_loop(unmasked, count, functools.partial(step, masked=False), carry)


def pad_to(x: jax.Array, multiples: dict[int, int]) -> jax.Array:
    widths = [(0, -x.shape[dim] % multiples.get(dim, 1)) for dim in range(x.ndim)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def pad_matrix(x: jax.Array, interpret: bool) -> jax.Array:
    """Pad q, k, v or a gradient with zeros: tokens to TILE_ROWS (to whole tiles in the interpreter and for
    short rows), the head dim to a size that TMA swizzles."""
    return pad_to(x, {1: TILE if interpret or x.shape[1] < TILE else TILE_ROWS, 3: 32})


def padded_inputs(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_last: jax.Array,
    mask: DynamicMask,
    interpret: bool,
) -> Inputs:
    """Pad arrays of one number per token to whole tiles, and matrices with `pad_matrix`."""
    q, k, v = (pad_matrix(x, interpret) for x in (q, k, v))
    queries = q_segments, mask.windows(q_segments)
    q_segments, windows, kv_last = (pad_to(x.astype(jnp.int32), {1: TILE}) for x in (*queries, kv_last))
    segments = jnp.where(q_segments > 0, q_segments, PADDING)
    return Inputs(q, k, v, segments, windows, kv_last, mask.offsets())


def plan_for(
    spec: AttentionSpec, inputs: Inputs, kernel: str, blocks: RingBlocks | None, interpret: bool
) -> TilePlan:
    """Return the tiling of a kernel (a field of `RingBlocks`)."""
    q, k = inputs.q, inputs.k
    dim, size = q.shape[-1], q.dtype.itemsize
    block = getattr(blocks or default_blocks(dim), kernel)
    resident, statistics = (1, 3) if kernel == "forward" else (2, 4)
    fixed = TILE * (resident * dim * size + 4 * statistics)
    stages = stages_that_fit(f"{kernel} at head_dim {dim}", block, fixed, 2 * dim * size + 4 * statistics)
    return TilePlan(spec, dim, q.dtype, q.shape[2] // k.shape[2], block, stages, interpret)


def copy_tile(work: Work, barrier: Any, *pieces: tuple[Callable, Any]) -> None:
    """Copy the rows of the tile, each piece (source of some rows, buffer); by the producer."""
    for g in range(CONSUMERS):
        rows = pl.ds(work.tile * TILE + g * ROWS, ROWS)
        for source, buffer in pieces:
            plgpu.copy_gmem_to_smem(source(rows), buffer.at[g], barrier)


def key_rings(plan: TilePlan, work: Work, inputs: Inputs, memory: Any) -> tuple:
    """Return the keys and values that a query tile reads, for `copy_blocks`."""
    head = lax.div(work.head, jnp.int32(plan.group))

    def block(ref: Any, *then: jax.Array) -> Callable:
        return lambda i: ref.at[(work.batch, pl.ds(work.blocks.block(i) * plan.block, plan.block), *then)]

    keys = (block(inputs.k, head), memory.k), (block(inputs.kv_last), memory.k_ids)
    values = ((block(inputs.v, head), memory.v),)
    return (memory.k_ready, memory.k_free, keys), (memory.v_ready, memory.v_free, values)


def store_tile(values: jax.Array, buffer: Any, out: Any) -> None:
    """Start storing registers by way of shared memory; the caller waits."""
    buffer[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, out)
