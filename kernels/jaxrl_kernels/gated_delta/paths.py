"""The paths of the tokens of a chunk: which tokens and which states before the chunk each token continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class ChunkPaths(NamedTuple):
    """The paths of the C tokens of a chunk, and of the D states after it: C + D ends of paths."""

    inside: Bool[Array, "B C+D C"]
    """True = the token of the chunk is on the path."""
    before: Bool[Array, "B C+D D"]
    """The state in the stack with which the path starts; none = zeros."""
    last: Int[Array, "B D"]
    """Of the stack after the chunk."""
    fit: Bool[Array, "B"]
    """False = the last token's path has more than D levels."""


def clear_padding(
    segments: Int[Array, "B T"], last: Int[Array, "B T"], arrays: Sequence[Float[Array, "B T ..."]]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], list[Float[Array, "B T ..."]]]:
    """Return (segments, last, arrays) with which states pass through padding.

    Padding gets the segment of the token before it, or after it at the start of a row, and 0 in the arrays.
    """
    valid, column = segments > 0, jnp.arange(segments.shape[1])
    first = jnp.argmax(valid, axis=1, keepdims=True)
    near = jax.lax.cummax(jnp.where(valid, column, first), axis=1)
    segments, last = (jnp.maximum(jnp.take_along_axis(x, near, axis=1), 1) for x in (segments, last))
    clear = lambda x: jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, 0)
    return segments, last, [clear(x) for x in arrays]


def follow_paths(
    before: Int[Array, "B D"], segments: Int[Array, "B C"], last: Int[Array, "B C"]
) -> ChunkPaths:
    """Find the paths of a chunk's tokens, and of its last token up to each level.

    Args:
        before: `last` of each level of the stack before the chunk, 0 = the path has fewer levels.
    """
    # A token sees earlier tokens and levels whose segments its own continues.
    size, levels = segments.shape[1], before.shape[1]
    tokens, level = jnp.arange(size), jnp.arange(levels)
    inside = (segments[:, :, None] <= last[:, None]) & (tokens[:, None] >= tokens)
    above = segments[:, :, None] <= before[:, None]

    # A level starts at a token whose `last` no token before it on the path has.
    equal = (last[:, :, None] == last[:, None]) & (tokens[:, None] > tokens)
    known = jnp.any(inside & equal, axis=2) | jnp.any(last[:, :, None] == before[:, None], axis=2)
    count = jnp.sum(above, axis=2) + jnp.sum(inside & ~known[:, None], axis=2)  # levels of a token's path
    at = inside[:, -1:] & (count[:, None] == level[:, None] + 1)
    new_last = jnp.max(jnp.where(at, last[:, None], 0), axis=2)
    new_last = jnp.maximum(new_last, jnp.where(above[:, -1], before, 0))

    # The states after the chunk are at the ends of the last token's path up to each level.
    up_to = count[:, None] <= level[:, None] + 1
    inside = jnp.concatenate([inside, inside[:, -1:] & up_to], axis=1)
    above = jnp.concatenate([above, above[:, -1:] & (level <= level[:, None])], axis=1)
    deepest = above & ~jnp.pad(above[..., 1:], ((0, 0), (0, 0), (0, 1)))
    return ChunkPaths(inside, deepest, new_last, count[:, -1] <= levels)


def all_chunk_paths(
    segments: Int[Array, "B T"], last: Int[Array, "B T"] | None, *, chunk: int, levels: int
) -> ChunkPaths:
    """Find the paths of all N chunks of rows without padding at once; arrays are [B, N, ...].

    The stack before a chunk has the distinct `last` of the tokens on the path of the token before the chunk.
    Before the row it has the level of the first token.

    Args:
        last: None = no segment continues another; levels is 1.
    """
    batch, length = segments.shape
    ends = jnp.arange(0, length, chunk)  # tokens before each chunk
    newest = jnp.take_along_axis(segments, jnp.maximum(ends - 1, 0)[None], axis=1)
    found = [newest]
    if last is not None:
        earlier = jnp.arange(length) < jnp.maximum(ends, 1)[:, None]
        on_path, found = (newest[..., None] <= last[:, None]) & earlier, []
        for _ in range(levels):
            below = found[-1][..., None] if found else jnp.iinfo(jnp.int32).max
            found.append(jnp.max(jnp.where(on_path & (last[:, None] < below), last[:, None], 0), axis=2))

    # Each chunk is a row of `follow_paths`.
    rows = lambda x: x.reshape(-1, *x.shape[2:])
    chunks = (rows(x.reshape(batch, -1, chunk)) for x in (segments, segments if last is None else last))
    paths = follow_paths(rows(jnp.stack(found, axis=-1)), *chunks)
    return ChunkPaths(*(x.reshape(batch, -1, *x.shape[1:]) for x in paths))
