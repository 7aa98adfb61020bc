"""The definition of the grouped matrix product: a loop over the groups, each with its matrix.

Every implementation has

    grouped_matmul(lhs, rhs, sizes, dtype) -> [M, N], and its gradients with respect to lhs and rhs

The groups follow each other without alignment, and some may be empty. Rows after the last group belong to
none: they are not read, and their results and gradients are 0.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def grouped_matmul(
    lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], sizes: Int[Array, "G"], dtype: Any = None
) -> Float[Array, "M N"]:
    """Compute `api.grouped_matmul`."""
    out = jnp.zeros((lhs.shape[0], rhs.shape[2]), dtype or lhs.dtype)
    row, end = jnp.arange(lhs.shape[0])[:, None], jnp.cumsum(sizes)
    for group in range(rhs.shape[0]):
        inside = (row >= end[group] - sizes[group]) & (row < end[group])
        product = jnp.dot(jnp.where(inside, lhs, 0), rhs[group], preferred_element_type=jnp.float32)
        out = jnp.where(inside, product.astype(out.dtype), out)
    return out


def in_groups(rows: int, sizes: Int[Array, "G"]) -> Bool[Array, "M 1"]:
    """Return which rows belong to a group."""
    return (jnp.arange(rows) < jnp.sum(sizes))[:, None]
