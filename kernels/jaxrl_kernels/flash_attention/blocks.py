"""Block sparsity: which blocks of queries attend to which blocks of keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrl_kernels.flash_attention.spec import DynamicMask

PADDING = jnp.iinfo(jnp.int32).max
"""The segment of padding among queries here: after every segment, so that it continues none."""


class BlockSegments(NamedTuple):
    """The segments in each block of queries; or the last segments that continue those of its keys.

    Of blocks of tokens in the order of the row, some query attends to some key if q.low <= kv.high, every
    query to every key if q.high <= kv.low.
    """

    low: Int[Array, "B N"]
    high: Int[Array, "B N"]


def query_segments(segments: Int[Array, "B T"], block: int) -> BlockSegments:
    """Return the segments in each block of `block` queries, T being a multiple of it."""
    return key_segments(jnp.where(segments > 0, segments, PADDING), block)


def key_segments(last: Int[Array, "B T"], block: int) -> BlockSegments:
    """Return the last segments that continue those in each block of `block` keys, as `query_segments`."""
    s = last.reshape(last.shape[0], -1, block)
    return BlockSegments(s.min(-1), s.max(-1))


def visible_blocks(
    mask: DynamicMask, q: BlockSegments, kv: BlockSegments, blocks: tuple[int, int]
) -> Bool[Array, "B Nq Nk"]:
    """Return whether any query of a block may attend to any key of a block.

    Args:
        blocks: lengths of a block of queries and of keys.
    """
    first = mask.q_offset + blocks[0] * jnp.arange(q.low.shape[1])[:, None]
    kv_first = mask.kv_offset + blocks[1] * jnp.arange(kv.low.shape[1])
    near = first - (kv_first + blocks[1] - 1) < mask.window
    near &= first + blocks[0] - 1 >= kv_first
    return near & (q.low[:, :, None] <= kv.high[:, None])


def nearest_blocks(needed: Bool[Array, "B Ni Nj"]) -> Int[Array, "B Ni Nj"]:
    """Return j where block i needs j, else the last block before j that it needs, or else the first."""
    j = jnp.where(needed, jnp.arange(needed.shape[-1], dtype=jnp.int32), -1)
    before = jax.lax.cummax(j, axis=2)
    return jnp.where(before < 0, jnp.argmax(needed, axis=-1, keepdims=True).astype(jnp.int32), before)


def block_range(needed: Bool[Array, "B Ni Nj"]) -> tuple[Int[Array, "B Ni"], Int[Array, "B Ni"]]:
    """Return (first, end) of the blocks j that block i needs; (0, 0) where it needs none."""
    some = needed.any(-1)
    end = needed.shape[-1] - jnp.argmax(needed[..., ::-1], axis=-1)
    first = jnp.argmax(needed, axis=-1)
    return first.astype(jnp.int32), jnp.where(some, end, 0).astype(jnp.int32)
