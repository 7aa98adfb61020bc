"""Computation in parts of a sequence or a batch, so that intermediate values of one part are in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


def split(x: Shaped[Array, "B T ..."], chunk: int) -> Shaped[Array, "S B C ..."]:
    """Split into S chunks of C tokens, the last padded with zeros."""
    batch, length = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -length % chunk), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)


def join(x: Shaped[Array, "S B C ..."], length: int) -> Shaped[Array, "B T ..."]:
    """Invert `split`: join the first `length` tokens."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]


def map_chunks(one: Callable[..., Any], chunk: int, *inputs: Shaped[Array, "B T ..."]) -> Any:
    """Apply `one` to each chunk of the inputs, sequentially; returns a tree of arrays [B, T, ...]."""
    length = inputs[0].shape[1]
    if chunk >= length:
        return one(*inputs)
    chunks = tuple(split(x, chunk) for x in inputs)
    outputs = jax.lax.map(lambda xs: one(*xs), chunks)
    return jax.tree.map(lambda x: join(x, length), outputs)


def map_rows(one: Callable[..., Any], rows: int, *inputs: Shaped[Array, "B ..."]) -> Any:
    """Apply `one` to equal parts of a batch, at most `rows` (at least 1) rows each, sequentially."""
    batch = inputs[0].shape[0]
    splits = next(n for n in range(1, batch + 1) if batch % n == 0 and batch // n <= max(rows, 1))
    if splits == 1:
        return one(*inputs)
    parts = tuple(x.reshape(splits, -1, *x.shape[1:]) for x in inputs)
    outputs = jax.lax.map(lambda xs: one(*xs), parts)
    return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), outputs)
