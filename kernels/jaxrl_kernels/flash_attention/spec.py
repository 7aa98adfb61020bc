"""Arguments and mask of attention. Every implementation has `forward` and `backward` of one signature."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED_LSE = -1e30
"""The log-sum-exp of a fully masked query: finite, so that combining two of them makes no NaN."""
NO_WINDOW = 2**30
"""The sliding window of a layer that has none."""


class AttentionSpec(NamedTuple):
    """Static arguments, known when compiling."""

    scale: float
    causal: bool = True
    softcap: float | None = None
    windows: tuple[int, ...] | None = None
    """All values that the window of `DynamicMask` may have, for kernels that compile it; None = any."""


class DynamicMask(NamedTuple):
    """The part of the mask known when running: a scanned stack of layers has a window a layer, ring attention
    an offset a step.

    The query at row index i attends to the key at row index j of the same segment if
    kv_offset + j <= q_offset + i (where causal) and (q_offset + i) - (kv_offset + j) < window.
    """

    q_offset: int | Int[Array, ""] = 0
    kv_offset: int | Int[Array, ""] = 0
    window: int | Int[Array, ""] = NO_WINDOW

    def array(self) -> Int[Array, "3"]:
        """Return the three as one array, as kernels take them."""
        return jnp.stack([jnp.asarray(x, jnp.int32) for x in self])


def visible(
    spec: AttentionSpec,
    mask: DynamicMask,
    rows: Int[Array, "..."],
    columns: Int[Array, "..."],
    q_segments: Int[Array, "..."],
    kv_segments: Int[Array, "..."],
) -> Bool[Array, "..."]:
    """Return whether queries of these row indices and segments attend to the keys of these columns."""
    distance = (mask.q_offset + rows) - (mask.kv_offset + columns)
    attends = (q_segments == kv_segments) & (q_segments > 0) & (distance < mask.window)
    return attends & (distance >= 0) if spec.causal else attends


def capped_scores(spec: AttentionSpec, products: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the scores of products q k: scaled, then softcap * tanh(score / softcap) if it is set."""
    scores = products * spec.scale
    return scores if spec.softcap is None else spec.softcap * jnp.tanh(scores / spec.softcap)


def d_products(
    spec: AttentionSpec, scores: Float[Array, "..."], d_scores: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return the gradient of the products q k from that of their `capped_scores`."""
    if spec.softcap is not None:
        d_scores = d_scores * (1 - (scores / spec.softcap) ** 2)
    return d_scores * spec.scale
