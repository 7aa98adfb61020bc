"""Arguments and mask of attention. Every implementation has `forward` and `backward` of one signature."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels.chunks import map_chunks

MASKED_LSE = -1e30
"""The log-sum-exp of a fully masked query: finite, so that merging two of them gives no NaN."""
NO_WINDOW = 2**30
"""The sliding window of a layer without one."""
MAX_PAIRS = 2**22
"""Pairs of tokens that `row_windows` compares at once: 16 MiB if the compiler does not fuse the
comparison."""


class AttentionSpec(NamedTuple):
    """Static arguments, known when compiling."""

    scale: float
    softcap: float | None = None
    windows: tuple[int, ...] | None = None
    """All possible windows of `DynamicMask`, for kernels that compile each; None = any."""
    branches: bool = False
    """True = several segments may continue one: kernels skip masked blocks between visible ones, too."""


class DynamicMask(NamedTuple):
    """The part of the mask known at run time: a window for each layer of a scanned stack, an offset for each
    step of ring attention.

    With distance = (q_offset + i) - (kv_offset + j), the query at row index i attends to the key at row index
    j if 0 <= distance < window and 0 < q_segments[i] <= kv_last[j]; `window` is one number, or one for each
    query.

    Segments are numbered in the order of the row, depth first: a segment comes before its continuations, and
    they come before the next unrelated segment. So the continuations of a key's segment are numbered from
    that segment to `kv_last`. Without branches, `kv_last` is the key's segment. Padding has 0 in both.
    """

    q_offset: int | Int[Array, ""] = 0
    kv_offset: int | Int[Array, ""] = 0
    window: int | Int[Array, ""] | Int[Array, "B Tq"] = NO_WINDOW

    def offsets(self) -> Int[Array, "2"]:
        """Return both offsets as one array, as kernels take them."""
        return jnp.stack([jnp.asarray(x, jnp.int32) for x in (self.q_offset, self.kv_offset)])

    def windows(self, q_segments: Int[Array, "B Tq"]) -> Int[Array, "B Tq"]:
        """Return the window of each of these queries."""
        return jnp.broadcast_to(jnp.asarray(self.window, jnp.int32), q_segments.shape)


def visible(
    mask: DynamicMask,
    rows: Int[Array, "..."],
    columns: Int[Array, "..."],
    windows: int | Int[Array, "..."],
    q_segments: Int[Array, "..."],
    kv_last: Int[Array, "..."],
) -> Bool[Array, "..."]:
    """Return whether queries of these row indices, windows and segments attend to the keys of these columns.
    Reads only the mask's offsets.
    """
    distance = (mask.q_offset + rows) - (mask.kv_offset + columns)
    continues = (q_segments > 0) & (q_segments <= kv_last)
    return continues & (distance >= 0) & (distance < windows)


def row_windows(
    segments: Int[Array, "B T"], last: Int[Array, "B T"], positions: Int[Array, "B T"], window: int
) -> Int[Array, "B T"]:
    """Return how many tokens of the row each token's sliding window spans, including itself, if segments
    continue others: the span includes tokens of other branches in between, the window does not.

    Args:
        segments, last: of `flash_attention`.
        positions: in the sequence of each token.
        window: tokens of the sequence that a token attends to, itself included.
    """
    columns = jnp.arange(segments.shape[1])

    def of_queries(rows, of_rows, at):
        rows, of_rows, at = (x[:, :, None] for x in (rows, of_rows, at))
        near = visible(DynamicMask(), rows, columns, NO_WINDOW, of_rows, last[:, None])
        near &= at - positions[:, None] < window
        return (rows - jnp.min(jnp.where(near, columns, rows), axis=-1, keepdims=True) + 1)[..., 0]

    rows = jnp.broadcast_to(columns, segments.shape)
    return map_chunks(of_queries, max(MAX_PAIRS // segments.size, 1), rows, segments, positions)


def capped_scores(spec: AttentionSpec, products: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the scores of products q k: scaled, then softcap * tanh(score / softcap) if it is set."""
    scores = products * spec.scale
    return scores if spec.softcap is None else spec.softcap * jnp.tanh(scores / spec.softcap)


def d_products(
    spec: AttentionSpec, scores: Float[Array, "..."], d_scores: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return the gradient of the products q k from the gradient of their `capped_scores`."""
    if spec.softcap is not None:
        d_scores = d_scores * (1 - (scores / spec.softcap) ** 2)
    return d_scores * spec.scale
