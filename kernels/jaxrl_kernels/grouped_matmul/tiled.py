"""Grouped matrix product in plain JAX, a loop over tiles of rows: each row by its own matrix alone.

For CPUs, where XLA computes `jax.lax.ragged_dot` as the product of every row and every matrix. A visit
multiplies a tile of rows, which begins at its group's first row or a multiple of the tile behind it, with the
group's matrix; rows of the tile that are not the group's are masked, in the tile: a pass over all rows would
take a sixth of a product's time. The number of visits is static, so that `plan` can count them; those that
there are not are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MIN_TILE, MAX_TILE = 8, 128
"""Rows of a tile: about those of a group, a power of two between these."""


class _Visits(NamedTuple):
    """Visits in the order of the rows, int32 [V]; those that there are not have no rows."""

    groups: Int[Array, " V"]
    starts: Int[Array, " V"]
    """First row of the tile, which ends with the last of all rows at most."""
    begins: Int[Array, " V"]
    """First row of the visit."""
    ends: Int[Array, " V"]
    """Row behind the group's last one; 0 = no visit."""


def grouped_matmul(
    lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], sizes: Int[Array, "G"], dtype: Any = None
) -> Float[Array, "M N"]:
    """Compute `reference.grouped_matmul`, sums in float32."""
    return _grouped_matmul(lhs, rhs, sizes, jnp.dtype(dtype or lhs.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(lhs, rhs, sizes, dtype):
    return _rows_product(lhs, rhs, sizes, dtype)


def _forward(lhs, rhs, sizes, dtype):
    return _grouped_matmul(lhs, rhs, sizes, dtype), (lhs, rhs, sizes)


def _backward(_, residuals, d_out):
    lhs, rhs, sizes = residuals
    d_out = d_out.astype(lhs.dtype)
    d_lhs = _rows_product(d_out, rhs, sizes, lhs.dtype, transpose=True)
    return d_lhs, _groups_product(lhs, d_out, sizes).astype(rhs.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def _rows_product(lhs, rhs, sizes, dtype, transpose: bool = False) -> Float[Array, "M N"]:
    """Return each row times the matrix of its group, or its transpose; rows after the last group are 0."""
    contracted, columns = (1, rhs.shape[1]) if transpose else (0, rhs.shape[2])
    product = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (contracted,)), ((), ())),
        preferred_element_type=jnp.float32,
    )

    def multiply(out, group, start, inside):
        rows, old = (jax.lax.dynamic_slice_in_dim(x, start, len(inside)) for x in (lhs, out))
        new = jnp.where(inside, product(rows, rhs[group]).astype(dtype), old)
        return jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)

    return _visit_tiles(multiply, jnp.zeros((len(lhs), columns), dtype), sizes, len(lhs))


def _groups_product(lhs, d_out, sizes) -> Float[Array, "G K N"]:
    """Return the sum of lhs[m]^T d_out[m] over the rows of each group, float32."""

    def add(sums, group, start, inside):
        tiles = (jax.lax.dynamic_slice_in_dim(x, start, len(inside)) for x in (lhs, d_out))
        left, right = (jnp.where(inside, tile, 0) for tile in tiles)
        return sums.at[group].add(jnp.dot(left.T, right, preferred_element_type=jnp.float32))

    sums = jnp.zeros((len(sizes), lhs.shape[1], d_out.shape[1]), jnp.float32)
    return _visit_tiles(add, sums, sizes, len(lhs))


def _visit_tiles(
    step: Callable[[Array, Array, Array, Bool[Array, "T 1"]], Array],
    carry: Array,
    sizes: Int[Array, "G"],
    rows: int,
) -> Array:
    """Apply `step(carry, group, first row of the tile, which of its rows are the visit's)` to all visits."""
    tile = _tile(rows, len(sizes))
    visits = _visits(sizes, rows, tile)

    def apply(i, carry):
        row = visits.starts[i] + jnp.arange(tile)
        inside = (row >= visits.begins[i]) & (row < visits.ends[i])
        return step(carry, visits.groups[i], visits.starts[i], inside[:, None])

    def visit(i, carry):
        return jax.lax.cond(visits.ends[i] > 0, functools.partial(apply, i), lambda carry: carry, carry)

    return jax.lax.fori_loop(0, len(visits.groups), visit, carry)


def _tile(rows: int, groups: int) -> int:
    per_group = max(rows // groups, 1)
    return min(max(1 << (per_group.bit_length() - 1), MIN_TILE), MAX_TILE, rows)


def _visits(sizes: Int[Array, "G"], rows: int, tile: int) -> _Visits:
    """Return the visits of tiles of so many rows, as many as any sizes can need."""
    ends, tiles = jnp.cumsum(sizes), -(-sizes // tile)
    last = jnp.cumsum(tiles)
    number = jnp.arange(rows // tile + min(rows, len(sizes)))
    groups = jnp.minimum(jnp.searchsorted(last, number, side="right"), len(sizes) - 1)
    begins = ends[groups] - sizes[groups] + (number - last[groups] + tiles[groups]) * tile
    ends = jnp.where(number < last[-1], ends[groups], 0)
    return _Visits(groups, jnp.minimum(begins, rows - tile), begins, ends)
