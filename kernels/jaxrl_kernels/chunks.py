"""Work over a sequence in chunks, so that logits of a few tokens exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


def split(x: Shaped[Array, "B T ..."], chunk: int) -> Shaped[Array, "S B C ..."]:
    """S chunks of C tokens, the last filled up with zeros."""
    batch, length = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -length % chunk), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)


def join(x: Shaped[Array, "S B C"], length: int) -> Shaped[Array, "B T"]:
    """The first `length` tokens of what was `split`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length]


def map_chunks(one: Callable[..., Any], chunk: int, *inputs: Shaped[Array, "B T ..."]) -> Any:
    """`one` of each chunk of the inputs, one chunk after the other: a tree of arrays [B, T]."""
    length = inputs[0].shape[1]
    if chunk >= length:
        return one(*inputs)
    pieces = tuple(split(x, chunk) for x in inputs)
    found = jax.lax.map(lambda xs: one(*xs), pieces)
    return jax.tree.map(lambda x: join(x, length), found)
