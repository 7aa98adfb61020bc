"""Grouped matrix product in plain JAX: a loop over tiles of rows, which multiplies each row by one matrix
only.

For CPUs, where XLA computes `jax.lax.ragged_dot` as the product of every row and every matrix. The outer loop
reads each group's matrix once; the inner loop multiplies tiles of rows. The last tile may extend past its
group: the extra rows are masked in the tile, since masking in a separate pass over all rows would take a
sixth of the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MIN_TILE, MAX_TILE = 8, 128
"""Smallest and largest tile, in rows; the tile is about the size of a group, a power of two."""


class GroupRows(NamedTuple):
    """The rows of a group, int32."""

    number: Int[Array, ""]
    start: Int[Array, ""]
    size: Int[Array, ""]

    def for_each_tile(
        self, tile: int, visit: Callable[[Array, Bool[Array, " T"], Any], Any], carry: Any
    ) -> Any:
        """Apply `visit(first row of the tile, which of its rows are the group's, carry)` to tiles in order.

        The last tile may extend up to `tile` - 1 rows past the group, and past the last row of the array.
        """

        def apply(i, carry):
            inside = jnp.arange(tile) < self.size - i * tile
            return visit(self.start + i * tile, inside, carry)

        return jax.lax.fori_loop(0, -(-self.size // tile), apply, carry)


def for_each_group(sizes: Int[Array, "G"], step: Callable[[GroupRows, Any], Any], carry: Any) -> Any:
    """Apply `step(group, carry)` to the non-empty groups of sorted rows in order."""
    ends = jnp.cumsum(sizes)

    def apply(g, carry):
        group = GroupRows(g, ends[g] - sizes[g], sizes[g])
        return jax.lax.cond(group.size > 0, functools.partial(step, group), lambda carry: carry, carry)

    return jax.lax.fori_loop(0, len(sizes), apply, carry)


def rows_of_tile(rows: int, groups: int) -> int:
    """Return the rows of a tile."""
    per_group = max(rows // groups, 1)
    return min(max(1 << (per_group.bit_length() - 1), MIN_TILE), MAX_TILE)


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
    tile = rows_of_tile(len(lhs), len(rhs))
    padded = jnp.pad(lhs, ((0, tile), (0, 0)))

    def step(group, out):
        matrix = rhs[group.number]

        def multiply(row, inside, out):
            rows = jnp.where(inside[:, None], jax.lax.dynamic_slice_in_dim(padded, row, tile), 0)
            product = jax.lax.dot_general(
                rows, matrix, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32
            )
            return jax.lax.dynamic_update_slice_in_dim(out, product.astype(dtype), row, 0)

        return group.for_each_tile(tile, multiply, out)

    return for_each_group(sizes, step, jnp.zeros((len(padded), columns), dtype))[: len(lhs)]


def _groups_product(lhs, d_out, sizes) -> Float[Array, "G K N"]:
    """Return the sum of lhs[m]^T d_out[m] over the rows of each group, float32."""
    tile = rows_of_tile(len(lhs), len(sizes))
    padded = [jnp.pad(x, ((0, tile), (0, 0))) for x in (lhs, d_out)]

    def step(group, sums):
        def add(row, inside, total):
            tiles = (jax.lax.dynamic_slice_in_dim(x, row, tile) for x in padded)
            left, right = (jnp.where(inside[:, None], x, 0) for x in tiles)
            return total + jnp.dot(left.T, right, preferred_element_type=jnp.float32)

        return sums.at[group.number].set(group.for_each_tile(tile, add, jnp.zeros(sums.shape[1:])))

    sums = jnp.zeros((len(sizes), lhs.shape[1], d_out.shape[1]), jnp.float32)
    return for_each_group(sizes, step, sums)
