"""What the kernels of `pallas_gpu` share: tiles and blocks, which blocks a tile reads, what they hide."""

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

from jaxrl_kernels.flash_attention.blocks import bounds, needed, segments_of
from jaxrl_kernels.flash_attention.spec import Place, Spec
from jaxrl_kernels.hopper import (
    COMPUTE,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    Cores,
    matrix_memory,
    registers_divided,
    stages_that_fit,
)

TILE = COMPUTE * ROWS
"""Queries (keys, for their gradients) of a block of threads; what lengths are padded to."""
LOG2E, LN2 = math.log2(math.e), math.log(2)
LARGEST_DIM = 256


class Blocks(NamedTuple):
    """Rows of the blocks that pass through the ring of each kernel: 32, 64 or 128."""

    forward: int
    dq: int
    dkv: int


def default_blocks(dim: int) -> Blocks:
    """What the registers hold: 64 x block scores beside 64 x dim sums."""
    return Blocks(128 if registers_divided() else 64, 64, 64) if dim <= 128 else Blocks(64, 32, 32)


def passes(dim: int) -> list[tuple[str, ...]]:
    """dk and dv in one pass where a warpgroup's registers hold the sums of both, else in one each."""
    return [("dk", "dv")] if dim <= (128 if registers_divided() else 64) else [("dk",), ("dv",)]


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

    def weights(self, scores: jax.Array, lse: jax.Array, seen: jax.Array | None) -> jax.Array:
        """The softmax, of what its log-sum-exp in powers of two was."""
        scores = scores if seen is None else jnp.where(seen, scores, -jnp.inf)
        return jnp.exp2(scores * self.unit - lse)

    def matrix(self, count: int, rows: int) -> Any:
        # What a product sums over, dim or block, is whole stripes of the swizzle.
        return matrix_memory((count, rows, self.dim), self.dtype, math.gcd(self.dim, self.block))

    def numbers(self, dtype: Any, *names: str, ring: bool = False) -> dict:
        """Shared memory of that name for one number a row, of the tile or of the blocks in the ring."""
        shape = (self.stages, self.block) if ring else (COMPUTE, ROWS)
        return {name: plgpu.SMEM(shape, dtype) for name in names}

    def barriers(self, **arrivals: int) -> dict:
        """A ring of barriers each, by how often it is arrived at."""
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
    q, kv = segments_of(q_segments, q_block), segments_of(kv_segments, kv_block)
    some = needed(spec, place, q, kv, (q_block, kv_block))
    q_first = place.q_start + jnp.arange(some.shape[1])[:, None] * q_block
    kv_first = place.kv_start + jnp.arange(some.shape[2]) * kv_block
    full = (q.only[:, :, None] == kv.only[:, None]) & (q.only > 0)[:, :, None]
    full &= q_first + q_block - 1 - kv_first < place.window
    if spec.causal:
        full &= kv_first + kv_block - 1 <= q_first
    if of_keys:
        some, full = jnp.swapaxes(some, 1, 2), jnp.swapaxes(full, 1, 2)
    first, end = bounds(some)
    first_full = jnp.argmax(full, axis=-1)
    run = full | (jnp.arange(full.shape[-1]) < first_full[..., None])
    end_full = jnp.where(run.all(-1), full.shape[-1], jnp.argmin(run, axis=-1))
    none = ~full.any(-1)
    first_full, end_full = jnp.where(none, first, first_full), jnp.where(none, first, end_full)
    return jnp.stack([first, first_full, end_full, jnp.maximum(end, 1)], axis=-1).astype(jnp.int32)


class Inputs(NamedTuple):
    """Of every kernel, in this order: arrays, or references to them. The last three are of the backward."""

    q: Any
    k: Any
    v: Any
    q_segments: Any
    kv_segments: Any
    place: Any
    walks: Any = None
    d_out: Any = None
    lse: Any = None
    """In powers of two."""
    delta: Any = None


class Here(NamedTuple):
    """Which part of the work this warpgroup has."""

    batch: jax.Array
    head: jax.Array
    tile: jax.Array
    me: jax.Array
    walk: Walk

    @staticmethod
    def of(inputs: Inputs, longest_first: bool = False) -> Here:
        """From the grid. Of causal query tiles the last reads most: `longest_first` begins with it."""
        batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        tile = inputs.walks.shape[1] - 1 - tile if longest_first else tile
        walk = Walk(*(inputs.walks[batch, tile, i] for i in range(4)))
        return Here(batch, head, tile, lax.axis_index("group"), walk)

    @property
    def first(self) -> jax.Array:
        """The row that this warpgroup begins with."""
        return self.tile * TILE + self.me * ROWS


class Mask(NamedTuple):
    """What a warpgroup's rows see of a block, from shared memory: rows are queries, or keys."""

    plan: Plan
    row_segments: jax.Array
    """[ROWS], -1 for padding."""
    segments: Any
    """Of the blocks in the ring."""
    start: jax.Array
    """Index of the first row's token, less where columns begin: both may be parts of longer sequences."""
    window: jax.Array
    of_keys: bool

    @staticmethod
    def of(plan: Plan, here: Here, inputs: Inputs, rows: Any, segments: Any, of_keys: bool = False) -> Mask:
        ids = plan.cores.layout(rows[here.me], PER_ROW)
        start = (inputs.place[1] - inputs.place[0]) if of_keys else (inputs.place[0] - inputs.place[1])
        return Mask(plan, jnp.where(ids > 0, ids, -1), segments, start + here.first, inputs.place[2], of_keys)

    def __call__(self, slot: jax.Array, block: jax.Array) -> jax.Array:
        """Of the [ROWS, block] pairs, which are visible."""
        cores, shape = self.plan.cores, (ROWS, self.plan.block)
        columns = cores.layout(self.segments[slot], PER_COLUMN)
        plgpu.commit_smem()  # has been read, before TMA writes there again
        ahead = cores.iota(shape, 0) - cores.iota(shape, 1) + (self.start - block * self.plan.block)
        back = -ahead if self.of_keys else ahead
        seen = (over_columns(self.row_segments, shape) == over_rows(columns, shape)) & (back < self.window)
        return seen & (back >= 0) if self.plan.spec.causal else seen


def over_columns(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A number a row, as a matrix."""
    return lax.broadcast_in_dim(x, shape, [0])


def over_rows(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A number a column, as a matrix."""
    return lax.broadcast_in_dim(x, shape, [1])


def copy_blocks(plan: Plan, count: jax.Array, rings: tuple) -> None:
    """By the copying warpgroup: `count` blocks into rings (ready, free, ((where one is, buffer), ...))."""

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


def over_blocks(step: Callable, carry: Any, first: int, masked: jax.Array, count: jax.Array) -> Any:
    """step(i, carry, masked): `masked` blocks with the mask, those after them up to `count` without."""
    carry = lax.fori_loop(jnp.int32(first), masked, functools.partial(step, masked=True), carry)
    rest = jnp.maximum(masked, first)
    return lax.fori_loop(rest, count, functools.partial(step, masked=False), carry)


def pad_to(x: jax.Array, multiples: dict[int, int]) -> jax.Array:
    widths = [(0, -x.shape[dim] % multiples.get(dim, 1)) for dim in range(x.ndim)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def padded_inputs(
    q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, kv_segments: jax.Array, place: Place
) -> Inputs:
    """Lengths to whole tiles, of segment 0; the head dim to what TMA swizzles, of zeros.

    Raises: ValueError for what the kernels do not take.
    """
    if why := unsupported(q.shape[3], q.dtype):
        raise ValueError(f"flash attention on Hopper: {why}; take another implementation")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads: it is no multiple")
    q, k, v = (pad_to(x, {1: TILE, 3: 32}) for x in (q, k, v))
    segments = (pad_to(x.astype(jnp.int32), {1: TILE}) for x in (q_segments, kv_segments))
    return Inputs(q, k, v, *segments, place.array())


def plan_for(spec: Spec, inputs: Inputs, what: str, blocks: Blocks | None, interpret: bool) -> Plan:
    """How the kernel `what` (a field of `Blocks`) is cut."""
    q, k = inputs.q, inputs.k
    dim, size = q.shape[-1], q.dtype.itemsize
    block = getattr(blocks or default_blocks(dim), what)
    resident, statistics = (1, 2) if what == "forward" else (2, 3)
    fixed = TILE * (resident * dim * size + 4 * statistics)
    stages = stages_that_fit(f"{what} at head_dim {dim}", block, fixed, 2 * dim * size + 4 * statistics)
    return Plan(spec, dim, q.dtype, q.shape[2] // k.shape[2], block, stages, interpret)


def copy_tile(here: Here, barrier: Any, *pieces: tuple[Callable, Any]) -> None:
    """By the copying warpgroup: the rows of the tile, each piece (where some rows are, buffer)."""
    for g in range(COMPUTE):
        rows = pl.ds(here.tile * TILE + g * ROWS, ROWS)
        for source, buffer in pieces:
            plgpu.copy_gmem_to_smem(source(rows), buffer.at[g], barrier)


def key_rings(plan: Plan, here: Here, inputs: Inputs, memory: Any) -> tuple:
    """The keys and the values that a query tile reads, for `copy_blocks`."""
    head = lax.div(here.head, jnp.int32(plan.group))

    def block(ref: Any, *then: jax.Array) -> Callable:
        return lambda i: ref.at[(here.batch, pl.ds(here.walk.block(i) * plan.block, plan.block), *then)]

    keys = (block(inputs.k, head), memory.k), (block(inputs.kv_segments), memory.k_ids)
    values = ((block(inputs.v, head), memory.v),)
    return (memory.k_ready, memory.k_free, keys), (memory.v_ready, memory.v_free, values)


def store_tile(values: jax.Array, buffer: Any, out: Any) -> None:
    """From registers by way of shared memory; begun, not waited for."""
    buffer[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, out)
