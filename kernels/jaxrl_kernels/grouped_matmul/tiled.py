"""Grouped matrix product in plain JAX, a loop over tiles of rows: each row by its own matrix alone.

For CPUs, where XLA computes `jax.lax.ragged_dot` as the product of every row and every matrix. A visit
multiplies a tile of rows, which begins at its group's first row or a multiple of the tile behind it, with the
group's matrix. A group's last tile may reach into the next groups: their visits come later and overwrite it.
The number of visits is static, so that `plan` can count them; those that there are not are skipped.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_kernels.grouped_matmul.reference import in_groups

MIN_TILE, MAX_TILE = 8, 256
"""Rows of a tile: about those of a group, a power of two between these."""


class _Visits(NamedTuple):
    """Visits in the order of the rows, int32 [V]; those that there are not lie behind all rows."""

    groups: Int[Array, " V"]
    starts: Int[Array, " V"]
    """First row of the tile."""
    ends: Int[Array, " V"]
    """Row behind the group's last one."""


def grouped_matmul(
    lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], sizes: Int[Array, "G"], dtype: Any = None
) -> Float[Array, "M N"]:
    """Compute `reference.grouped_matmul`, sums in float32."""
    lhs = jnp.where(in_groups(lhs.shape[0], sizes), lhs, 0)
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
    tile = _tile(lhs, sizes)
    visits = _visits(sizes, len(lhs), tile)
    padded = jnp.pad(lhs, ((0, tile), (0, 0)))

    def multiply(i, out):
        rows = jax.lax.dynamic_slice_in_dim(padded, visits.starts[i], tile)
        new = product(rows, rhs[visits.groups[i]]).astype(dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, new, visits.starts[i], 0)

    def visit(i, out):
        return jax.lax.cond(visits.ends[i] > 0, functools.partial(multiply, i), lambda out: out, out)

    out = jnp.zeros((len(padded), columns), dtype)
    out = jax.lax.fori_loop(0, len(visits.groups), visit, out)[: len(lhs)]
    return jnp.where(in_groups(len(lhs), sizes), out, 0)


def _groups_product(lhs, d_out, sizes) -> Float[Array, "G K N"]:
    """Return the sum of lhs[m]^T d_out[m] over the rows of each group, float32."""
    tile = _tile(lhs, sizes)
    visits = _visits(sizes, len(lhs), tile)
    padded = [jnp.pad(x, ((0, tile), (0, 0))) for x in (lhs, d_out)]

    def visit(i, sums):
        start, group = visits.starts[i], visits.groups[i]
        inside = (start + jnp.arange(tile) < visits.ends[i])[:, None]
        left, right = (jax.lax.dynamic_slice_in_dim(x, start, tile) for x in padded)
        new = jnp.dot(left.T, jnp.where(inside, right, 0), preferred_element_type=jnp.float32)
        return sums.at[group].add(new)

    sums = jnp.zeros((len(sizes), lhs.shape[1], d_out.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, len(visits.groups), visit, sums)


def _tile(lhs, sizes) -> int:
    per_group = max(len(lhs) // len(sizes), 1)
    return min(max(1 << (per_group.bit_length() - 1), MIN_TILE), MAX_TILE)


def _visits(sizes: Int[Array, "G"], rows: int, tile: int) -> _Visits:
    """Return the visits of tiles of so many rows, as many as any sizes can need."""
    ends, tiles = jnp.cumsum(sizes), -(-sizes // tile)
    last = jnp.cumsum(tiles)
    number = jnp.arange(rows // tile + min(rows, len(sizes)))
    groups = jnp.minimum(jnp.searchsorted(last, number, side="right"), len(sizes) - 1)
    starts = ends[groups] - sizes[groups] + (number - last[groups] + tiles[groups]) * tile
    real = number < last[-1]
    return _Visits(groups, jnp.where(real, starts, rows), jnp.where(real, ends[groups], 0))
