"""Grouped matrix products on Hopper GPUs (H100, H200): Pallas Mosaic GPU with TMA, wgmma, persistent blocks.

Rows are cut into tiles wherever groups begin. The kernel of the forward pass and of the gradient of lhs takes
visits: pairs of a tile of rows and a group that has some of them. It multiplies the whole tile with the
group's matrix and stores the group's rows. The kernel of the gradient of rhs sums over the rows of a group,
in blocks from its first row on, rounded down to TILE_ROWS; rows of other groups are cleared in shared memory.
In both, the producer warpgroup copies blocks into a ring through all the tiles of its multiprocessor and two
consumers multiply.

bfloat16 and float16 only: wgmma multiplies float32 as TF32.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxrl_kernels.grouped_matmul.reference import in_groups
from jaxrl_kernels.hopper import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    ROWS,
    TILE_ROWS,
    WarpgroupOps,
    add_product,
    launch,
    matrix_memory,
    num_multiprocessors,
    ring_product,
    share_tiles,
    store_rows,
    unsupported_dtype,
)

TILE = CONSUMERS * ROWS
"""Rows of a tile of the result."""
WIDTHS = (256, 192, 128, 64)
"""Columns of a tile: the first that divides the result. The sums of a consumer take 128 registers a lane at
most."""
DEPTH = 64
"""Contracted depth of a step, to multiples of which all sizes but the rows are padded."""
STAGES = 4
"""Steps in the ring: 4 * (128 + 256) * 64 * 2 bytes = 192 KiB of the 227 of a multiprocessor."""
STORED = 128
"""Bytes of a row that are stored at a time; a tile of either buffer takes 16 KiB."""
TOGETHER = 16
"""Tiles of rows that share a group's columns while the columns are in the L2 cache."""
RUNGS = (32, 16, 8, 4, 2, 1)
"""Rows that a copy can store, TMA's shapes being static: any number below 64 is a sum of some."""


def unsupported(dtype: Any) -> str | None:
    """Return why the kernels do not support operands of this type, or None."""
    return unsupported_dtype(dtype)


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"],
    sizes: Int[Array, "G"],
    dtype: Any = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """Compute `reference.grouped_matmul`, sums in float32."""
    out = _grouped_matmul(lhs, rhs, sizes, jnp.dtype(dtype or lhs.dtype), interpret)
    return jnp.where(in_groups(lhs.shape[0], sizes), out, 0)  # which also clears the gradient of out


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_matmul(lhs, rhs, sizes, dtype, interpret: bool):
    """Compute [M, N]; arbitrary after the last group, where cotangents must be 0."""
    return rows_product(lhs, rhs, sizes, dtype, interpret=interpret)


def _forward(lhs, rhs, sizes, dtype, interpret):
    return _grouped_matmul(lhs, rhs, sizes, dtype, interpret), (lhs, rhs, sizes)


def _backward(dtype, interpret, residuals, d_out):
    lhs, rhs, sizes = residuals
    d_out = d_out.astype(lhs.dtype)
    d_lhs = rows_product(d_out, rhs, sizes, lhs.dtype, transpose=True, interpret=interpret)
    d_lhs = jnp.where(in_groups(lhs.shape[0], sizes), d_lhs, 0)
    return d_lhs, groups_product(lhs, d_out, sizes, rhs.dtype, interpret), None


_grouped_matmul.defvjp(_forward, _backward)


class _Plan(NamedTuple):
    """Static parameters of a kernel."""

    depth: int
    """Contracted columns of lhs; of the gradient of rhs its rows, whose number no padding changes."""
    width: int
    columns: int
    transpose: bool
    interpret: bool

    @property
    def column_tiles(self) -> int:
        return self.columns // self.width


def rows_product(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G I J"],
    sizes: Int[Array, "G"],
    dtype: Any,
    transpose: bool = False,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """Compute lhs[m] @ rhs[g], sums in float32; rows after the last group are not written.

    Args:
        rhs: [G, K, N].
        transpose: multiply by rhs[g]^T: rhs is [G, N, K].
    """
    rows, columns = lhs.shape[0], rhs.shape[1 if transpose else 2]
    lhs, rhs = _padded(lhs, (TILE, DEPTH)), _padded(rhs, (1, DEPTH, DEPTH))
    plan = _plan(lhs.shape[1], rhs.shape[1 if transpose else 2], transpose, interpret)
    block = (plan.width, DEPTH) if transpose else (DEPTH, plan.width)
    scratch = {
        **_ring(matrix_memory((STAGES, TILE, DEPTH), lhs.dtype, DEPTH), block, lhs.dtype, num_copies=2),
        "tiled": _stored_tiles(dtype),
        "plain": plgpu.SMEM((CONSUMERS, ROWS, STORED // dtype.itemsize), dtype),
    }
    out = jax.ShapeDtypeStruct((lhs.shape[0], plan.columns), dtype)
    kernel = _launch(functools.partial(_rows_kernel, plan), out, scratch, interpret)
    return kernel(*_visits(sizes, lhs.shape[0] // TILE), lhs, rhs)[:rows, :columns]


def groups_product(
    lhs: Float[Array, "M K"],
    d_out: Float[Array, "M N"],
    sizes: Int[Array, "G"],
    dtype: Any,
    interpret: bool = False,
) -> Float[Array, "G K N"]:
    """Compute lhs^T @ d_out over the rows of each group, sums in float32; 0 for an empty group.

    Args:
        d_out: finite in every row, also after the last group.
    """
    inner, columns = lhs.shape[1], d_out.shape[1]
    lhs, d_out = _padded(lhs, (TILE, DEPTH)), _padded(d_out, (TILE, DEPTH))
    plan = _plan(lhs.shape[0], d_out.shape[1], False, interpret)
    a = matrix_memory((STAGES, CONSUMERS, DEPTH, ROWS), lhs.dtype, ROWS)
    scratch = {
        **_ring(a, (DEPTH, plan.width), lhs.dtype, num_copies=CONSUMERS + 1),
        "tiled": _stored_tiles(dtype),
    }
    out = jax.ShapeDtypeStruct((len(sizes), lhs.shape[1], plan.columns), dtype)
    kernel = _launch(functools.partial(_groups_kernel, plan), out, scratch, interpret)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return kernel(jnp.concatenate([jnp.zeros(1, jnp.int32), ends]), lhs, d_out)[:, :inner, :columns]


def _padded(x: Array, multiples: tuple[int, ...]) -> Array:
    """Pad with zeros to multiples of these sizes; an array with such sizes is not copied."""
    return jnp.pad(x, [(0, -size % to) for size, to in zip(x.shape, multiples, strict=True)])


def _plan(depth: int, columns: int, transpose: bool, interpret: bool) -> _Plan:
    width = next(width for width in WIDTHS if columns % width == 0)
    return _Plan(depth, width, columns, transpose, interpret)


def _ring(a: Any, block: tuple[int, int], dtype: Any, num_copies: int) -> dict[str, Any]:
    """Return the shared memory of the ring: lhs and the other factor, and the barriers of its stages."""
    return {
        "a": a,
        "b": matrix_memory((STAGES, *block), dtype, DEPTH),
        "ready": plgpu.Barrier(num_arrivals=num_copies, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
    }


def _stored_tiles(dtype: Any) -> Any:
    columns = STORED // dtype.itemsize
    return matrix_memory((CONSUMERS, ROWS, columns), dtype, columns)


def _launch(body: Any, out: Any, scratch: dict[str, Any], interpret: bool) -> Any:
    grid = {"sm": 1 if interpret else num_multiprocessors()}
    return launch(body, out, scratch, grid, CONSUMERS, interpret)


def _visits(sizes: Int[Array, "G"], row_tiles: int) -> tuple[Int[Array, "1"], Int[Array, "4 V"]]:
    """Return (number of visits, their groups, tiles of rows, and first and end row of the group)."""
    groups, ends = len(sizes), jnp.cumsum(sizes, dtype=jnp.int32)
    first = (ends - sizes) // TILE
    counts = jnp.where(sizes > 0, (ends - 1) // TILE - first + 1, 0)
    before = jnp.cumsum(counts) - counts
    visit = jnp.arange(row_tiles + groups - 1, dtype=jnp.int32)
    group = jnp.repeat(jnp.arange(groups), counts, total_repeat_length=len(visit))
    tile = jnp.minimum(first[group] + visit - before[group], row_tiles - 1)
    visits = jnp.stack([group, tile, (ends - sizes)[group], ends[group]])
    return jnp.sum(counts).astype(jnp.int32)[None], visits.astype(jnp.int32)


def _rows_kernel(plan: _Plan, count, visits, lhs, rhs, out, **memory: Any) -> None:
    """Store the rows of each visit."""
    # The producer warpgroup streams blocks of both factors; consumers multiply and store.
    memory, warpgroup, steps = SimpleNamespace(**memory), lax.axis_index("group"), plan.depth // DEPTH
    num_tiles, tile_at = share_tiles(count[0], plan.column_tiles, TOGETHER)

    @pl.when(warpgroup == CONSUMERS)
    def _copy():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        @pl.loop(0, num_tiles)
        def _(n):
            visit, column = tile_at(n)
            group, rows = visits[0, visit], pl.ds(visits[1, visit] * TILE, TILE)
            columns = pl.ds(column * plan.width, plan.width)

            @pl.loop(0, steps)
            def _(k):
                stage, depth = _next_stage(memory, n * steps + k), pl.ds(k * DEPTH, DEPTH)
                block = (columns, depth) if plan.transpose else (depth, columns)
                plgpu.copy_gmem_to_smem(lhs.at[rows, depth], memory.a.at[stage], memory.ready.at[stage])
                plgpu.copy_gmem_to_smem(rhs.at[group, *block], memory.b.at[stage], memory.ready.at[stage])

        _wait_for_consumers(memory, num_tiles * steps)

    # Multiply the blocks, and store the rows of each visit.
    @pl.when(warpgroup < CONSUMERS)
    def _compute():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        own = pl.ds(warpgroup * ROWS, ROWS)

        def multiply(acc, stage, _):
            add_product(acc, memory.a.at[stage, own], memory.b.at[stage], transpose=plan.transpose)

        @pl.loop(0, num_tiles)
        def _(n):
            visit, column = tile_at(n)
            shape = (ROWS, plan.width)
            product = ring_product(
                multiply, shape, memory.ready, memory.free, n * steps, steps, plan.interpret
            )
            first = visits[1, visit] * TILE + warpgroup * ROWS
            _store_rows_of(plan, product, memory, out, (first, visits[2, visit], visits[3, visit]), column)

        plgpu.wait_smem_to_gmem(0)


def _groups_kernel(plan: _Plan, offsets, lhs, d_out, out, **memory: Any) -> None:
    """Store the gradient of each group's matrix, in tiles of two slabs of ROWS of its rows."""
    memory, warpgroup, slabs = SimpleNamespace(**memory), lax.axis_index("group"), out.shape[1] // ROWS
    # The producer warpgroup streams the rows of each group; consumers sum over them.
    tiles = jnp.int32(pl.cdiv(slabs, CONSUMERS))
    num_tiles, tile_at = share_tiles(out.shape[0] * tiles, plan.column_tiles, TOGETHER)

    def rows_of(n):
        """Return (group, its rows, first slab, tile of columns) of this multiprocessor's n-th tile."""
        row, column = tile_at(n)
        group = lax.div(row, tiles)
        rows = _GroupRows(offsets[group], offsets[group + 1], plan.depth)
        return group, rows, lax.rem(row, tiles) * CONSUMERS, column

    @pl.when(warpgroup == CONSUMERS)
    def _copy():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def copy_tile(n, done):
            _, rows, slab, column = rows_of(n)
            columns = pl.ds(column * plan.width, plan.width)

            @pl.loop(0, rows.steps)
            def _(k):
                stage, block = _next_stage(memory, done + k), pl.ds(rows.block_start(k), DEPTH)
                ready = memory.ready.at[stage]
                for i in range(CONSUMERS):  # past the last slab, copy the last one again
                    own = pl.ds(jnp.minimum(slab + i, slabs - 1) * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(lhs.at[block, own], memory.a.at[stage, i], ready)
                plgpu.copy_gmem_to_smem(d_out.at[block, columns], memory.b.at[stage], ready)

            return done + rows.steps

        _wait_for_consumers(memory, lax.fori_loop(0, num_tiles, copy_tile, jnp.int32(0)))

    # Sum the products of each group's rows, and store the tile.
    @pl.when(warpgroup < CONSUMERS)
    def _compute():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

        def sum_tile(n, done):
            group, rows, slab, column = rows_of(n)
            product, own = _sum_rows(plan, memory, rows, done), slab + warpgroup

            @pl.when(own < slabs)
            def _():
                target = lambda columns: out.at[group, pl.ds(own * ROWS, ROWS), columns]
                _store(plan, product, memory.tiled.at[warpgroup], target, column)

            return done + rows.steps

        lax.fori_loop(0, num_tiles, sum_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


class _GroupRows(NamedTuple):
    """The rows of a group, in blocks of DEPTH."""

    begin: Any
    end: Any
    total: int
    """Rows of all groups, padded."""

    @property
    def steps(self):
        count = lax.div(self.end - self.first(0) + DEPTH - 1, jnp.int32(DEPTH))
        return jnp.where(self.end > self.begin, count, 0)

    def first(self, k):
        """Return the first row of a block, a multiple of TILE_ROWS."""
        return lax.div(self.begin, jnp.int32(TILE_ROWS)) * TILE_ROWS + k * DEPTH

    def block_start(self, k):
        """Return the first row to copy of a block: the very last block ends with the last row."""
        return jnp.minimum(self.first(k), self.total - DEPTH)

    def are_of(self, k, row):
        """Return whether the group's sum takes these rows from block k."""
        return (row >= jnp.maximum(self.first(k), self.begin)) & (row < self.end)


def _sum_rows(plan: _Plan, memory, rows: _GroupRows, done):
    """Return a consumer's tile of the gradient, after `done` steps of the ring."""
    ops, warpgroup = WarpgroupOps(plan.interpret), lax.axis_index("group")

    def multiply(acc, stage, k):
        a = memory.a.at[stage, warpgroup]

        @pl.when((rows.first(k) < rows.begin) | (rows.first(k + 1) > rows.end))
        def _():
            row = ops.iota((DEPTH, ROWS), 0) + rows.block_start(k)
            a[...] = jnp.where(rows.are_of(k, row), a[...], jnp.zeros((), a.dtype))
            plgpu.commit_smem()

        add_product(acc, a, memory.b.at[stage], transpose_a=True)

    shape = (ROWS, plan.width)
    return ring_product(multiply, shape, memory.ready, memory.free, done, rows.steps, plan.interpret)


def _next_stage(memory: Any, step):
    """Return the stage of a step of the ring once it may be written."""
    stage = lax.rem(step, jnp.int32(STAGES))
    pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, memory.free.at[stage]))
    return stage


def _wait_for_consumers(memory: Any, steps) -> None:
    """Wait for every phase of the barriers."""

    @pl.loop(jnp.maximum(steps - STAGES, 0), steps)
    def _(step):
        plgpu.barrier_wait(memory.free.at[lax.rem(step, jnp.int32(STAGES))])


def _slices(plan: _Plan, product, buffer, column):
    """Yield (columns of the result, their sums) for each slice of a tile, when the buffer may be written."""
    step = buffer.shape[1]
    for start in range(0, plan.width, step):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        yield pl.ds(column * plan.width + start, step), product[:, start : start + step].astype(buffer.dtype)


def _store(plan: _Plan, product, buffer, target, column) -> None:
    """Store all rows of a consumer's tile at target(columns)."""
    for columns, sums in _slices(plan, product, buffer, column):
        buffer[...] = sums
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, target(columns))


def _store_rows_of(plan: _Plan, product, memory, out, rows, column) -> None:
    """Store a group's rows of a consumer's tile: (first row of the tile, first and end row of the group)."""
    first, begin, end = rows
    begin = jnp.maximum(begin - first, 0)
    size = jnp.maximum(jnp.minimum(end - first, ROWS) - begin, 0)
    warpgroup = lax.axis_index("group")

    @pl.when(size == ROWS)
    def _():
        target = lambda columns: out.at[pl.ds(first, ROWS), columns]
        _store(plan, product, memory.tiled.at[warpgroup], target, column)

    @pl.when((size > 0) & (size < ROWS))
    def _():
        _store_some(plan, product, memory.plain.at[warpgroup], out, (first, begin, size), column)


def _store_some(plan: _Plan, product, buffer, out, rows, column) -> None:
    """Store some rows of a consumer's tile: (first row of the tile, first of these in it, their number)."""
    first, begin, size = rows
    for columns, sums in _slices(plan, product, buffer, column):
        store_rows(buffer, sums)
        plgpu.commit_smem()
        start = begin
        for rung in RUNGS:

            @pl.when((size & rung) != 0)
            def _(start=start, rung=rung):
                stored = out.at[pl.ds(first + start, rung), columns]  # noqa: B023
                plgpu.copy_smem_to_gmem(buffer.at[pl.ds(start, rung)], stored)

            start += size & rung
