"""Which blocks of queries need which blocks of keys: what every blockwise implementation here skips by."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrl_kernels.flash_attention.spec import Place, Spec


class Segments(NamedTuple):
    """The segments in each block of a side."""

    low: Int[Array, "B N"]  # the least that is no padding; of a block of padding more than any `high`
    high: Int[Array, "B N"]
    only: Int[Array, "B N"]  # the one segment of all its tokens; 0 where there are several, or padding


def segments_of(segments: Int[Array, "B T"], block: int) -> Segments:
    """What each block of `block` tokens holds, T being a multiple of it."""
    s = segments.reshape(segments.shape[0], -1, block)
    high = s.max(-1)
    low = jnp.where(s > 0, s, jnp.iinfo(jnp.int32).max).min(-1)
    return Segments(low, high, jnp.where(s.min(-1) == high, high, 0))


def needed(
    spec: Spec, place: Place, q: Segments, kv: Segments, blocks: tuple[int, int]
) -> Bool[Array, "B Nq Nk"]:
    """Whether any query of a block may see any key of a block; `blocks` are their lengths (query, key).

    Exact for order and window. Segments are compared by their range, so it may be true for nothing where a
    block of several segments leaves one out that the other has.
    """
    first = place.q_start + blocks[0] * jnp.arange(q.low.shape[1])[:, None]
    kv_first = place.kv_start + blocks[1] * jnp.arange(kv.low.shape[1])
    near = first - (kv_first + blocks[1] - 1) < place.window
    if spec.causal:
        near &= first + blocks[0] - 1 >= kv_first
    shared = (q.low[:, :, None] <= kv.high[:, None]) & (kv.low[:, None] <= q.high[:, :, None])
    return near & shared


def bounds(need: Bool[Array, "B Ni Nj"]) -> tuple[Int[Array, "B Ni"], Int[Array, "B Ni"]]:
    """(first, end) of the blocks j that block i needs; (0, 0) where it needs none."""
    some = need.any(-1)
    end = need.shape[-1] - jnp.argmax(need[..., ::-1], axis=-1)
    first = jnp.argmax(need, axis=-1)
    return first.astype(jnp.int32), jnp.where(some, end, 0).astype(jnp.int32)
