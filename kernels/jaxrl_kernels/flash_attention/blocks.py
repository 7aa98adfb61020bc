"""Block sparsity: which blocks of queries attend to which blocks of keys."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrl_kernels.flash_attention.spec import AttentionSpec, DynamicMask


class BlockSegments(NamedTuple):
    """The segments in each block of queries, or of keys."""

    low: Int[Array, "B N"]  # the least that is no padding; of a block of padding more than any `high`
    high: Int[Array, "B N"]
    only: Int[Array, "B N"]  # the one segment of all its tokens; 0 where there are several, or padding


def block_segments(segments: Int[Array, "B T"], block: int) -> BlockSegments:
    """Return the segments in each block of `block` tokens, T being a multiple of it."""
    s = segments.reshape(segments.shape[0], -1, block)
    high = s.max(-1)
    low = jnp.where(s > 0, s, jnp.iinfo(jnp.int32).max).min(-1)
    return BlockSegments(low, high, jnp.where(s.min(-1) == high, high, 0))


def visible_blocks(
    spec: AttentionSpec, mask: DynamicMask, q: BlockSegments, kv: BlockSegments, blocks: tuple[int, int]
) -> Bool[Array, "B Nq Nk"]:
    """Return whether any query of a block may attend to any key of a block.

    Exact for order and window. Segments are compared by their range, so it may be true for nothing where a
    block of several segments leaves one out that the other has.

    Args:
        blocks: lengths of a block of queries and of keys.
    """
    first = mask.q_offset + blocks[0] * jnp.arange(q.low.shape[1])[:, None]
    kv_first = mask.kv_offset + blocks[1] * jnp.arange(kv.low.shape[1])
    near = first - (kv_first + blocks[1] - 1) < mask.window
    if spec.causal:
        near &= first + blocks[0] - 1 >= kv_first
    shared = (q.low[:, :, None] <= kv.high[:, None]) & (kv.low[:, None] <= q.high[:, :, None])
    return near & shared


def block_range(needed: Bool[Array, "B Ni Nj"]) -> tuple[Int[Array, "B Ni"], Int[Array, "B Ni"]]:
    """Return (first, end) of the blocks j that block i needs; (0, 0) where it needs none."""
    some = needed.any(-1)
    end = needed.shape[-1] - jnp.argmax(needed[..., ::-1], axis=-1)
    first = jnp.argmax(needed, axis=-1)
    return first.astype(jnp.int32), jnp.where(some, end, 0).astype(jnp.int32)
