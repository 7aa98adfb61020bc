"""Block sparsity: which blocks of queries attend to which blocks of keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrl_kernels.flash_attention.spec import DynamicMask

PADDING = jnp.iinfo(jnp.int32).max
"""The segment number of padding queries: above every segment, so that padding continues none."""


class KeyBlocks(NamedTuple):
    """The lowest and the highest `kv_last` of the keys in each block."""

    low: Int[Array, "B N"]
    high: Int[Array, "B N"]


class QueryBlocks(NamedTuple):
    """The segments in each block of queries, and the first tokens of their windows.

    In causal order, some query attends to some key only if q.low <= kv.high and q.first is not after the last
    key; every query attends to every key if q.high <= kv.low and no key is before q.inner.
    """

    low: Int[Array, "B N"]
    high: Int[Array, "B N"]
    first: Int[Array, "B N"]
    """The first token of the row in the window of any query of the block."""
    inner: Int[Array, "B N"]
    """The first token of the row in the windows of all queries of the block."""


def query_blocks(
    mask: DynamicMask, segments: Int[Array, "B T"], windows: Int[Array, "B T"], block: int
) -> QueryBlocks:
    """Summarize blocks of `block` queries (T must be a multiple). Reads only the mask's offsets."""
    cut = lambda x: x.reshape(x.shape[0], -1, block)
    segments = cut(jnp.where(segments > 0, segments, PADDING))
    first = cut(mask.q_offset + jnp.arange(windows.shape[1]) - windows + 1)
    return QueryBlocks(segments.min(-1), segments.max(-1), first.min(-1), first.max(-1))


def key_blocks(last: Int[Array, "B T"], block: int) -> KeyBlocks:
    """Summarize blocks of `block` keys (T must be a multiple)."""
    last = last.reshape(last.shape[0], -1, block)
    return KeyBlocks(last.min(-1), last.max(-1))


def visible_blocks(
    mask: DynamicMask, q: QueryBlocks, kv: KeyBlocks, blocks: tuple[int, int]
) -> tuple[Bool[Array, "B Nq Nk"], Bool[Array, "B Nq Nk"]]:
    """Return whether any query of a block attends to any key of a block, and whether every query attends to
    every key.

    Args:
        blocks: lengths of a block of queries and of keys.
    """
    rows = mask.q_offset + blocks[0] * jnp.arange(q.low.shape[1])[:, None]
    keys = mask.kv_offset + blocks[1] * jnp.arange(kv.low.shape[1])
    of_queries, of_keys = QueryBlocks(*(x[:, :, None] for x in q)), KeyBlocks(*(x[:, None] for x in kv))
    return compare_blocks(of_queries, of_keys, (rows, keys), blocks)


def compare_blocks(
    q: QueryBlocks, kv: KeyBlocks, first: tuple[Array, Array], blocks: tuple[int, int]
) -> tuple[Array, Array]:
    """Return `visible_blocks` of blocks of queries and of keys whose fields broadcast: arrays, or scalars.

    Args:
        first: the first token of each query block and of each key block, including offsets.
    """
    rows, keys = first
    rows_end, keys_end = rows + blocks[0] - 1, keys + blocks[1] - 1
    some = (q.low <= kv.high) & (keys <= rows_end) & (q.first <= keys_end)
    full = (q.high <= kv.low) & (keys_end <= rows) & (q.inner <= keys)
    return some, full


def nearest_blocks(needed: Bool[Array, "B Ni Nj"]) -> Int[Array, "B Ni Nj"]:
    """Return j if block i needs block j, else the last needed block before j, or else the first needed
    one."""
    j = jnp.where(needed, jnp.arange(needed.shape[-1], dtype=jnp.int32), -1)
    before = jax.lax.cummax(j, axis=2)
    return jnp.where(before < 0, jnp.argmax(needed, axis=-1, keepdims=True).astype(jnp.int32), before)


def block_range(needed: Bool[Array, "B Ni Nj"]) -> tuple[Int[Array, "B Ni"], Int[Array, "B Ni"]]:
    """Return (first, end) of the blocks j that block i needs; (0, 0) if it needs none."""
    some = needed.any(-1)
    end = needed.shape[-1] - jnp.argmax(needed[..., ::-1], axis=-1)
    first = jnp.argmax(needed, axis=-1)
    return first.astype(jnp.int32), jnp.where(some, end, 0).astype(jnp.int32)
