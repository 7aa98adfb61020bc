"""What every implementation of attention here is told. Each has `forward` and `backward` of one signature."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NOTHING = -1e30
"""The log-sum-exp of a query that sees no key: finite, so that combining two of them makes no NaN."""
EVERYTHING = 2**30
"""The window of a layer that has none."""


class Spec(NamedTuple):
    """Known when compiling."""

    scale: float
    causal: bool = True
    softcap: float | None = None


class Place(NamedTuple):
    """Known when running: a scanned stack of layers has a window each, a ring a place each.

    The query at row index i sees the key at row index j of the same segment if
    kv_start + j <= q_start + i (where causal) and (q_start + i) - (kv_start + j) < window.
    """

    q_start: int | Int[Array, ""] = 0
    kv_start: int | Int[Array, ""] = 0
    window: int | Int[Array, ""] = EVERYTHING

    def array(self) -> Int[Array, "3"]:
        """The three as one array, as kernels take them."""
        return jnp.stack([jnp.asarray(x, jnp.int32) for x in self])


def visible(
    spec: Spec,
    place: Place,
    rows: Int[Array, "..."],
    columns: Int[Array, "..."],
    q_segments: Int[Array, "..."],
    kv_segments: Int[Array, "..."],
) -> Bool[Array, "..."]:
    """Whether the queries of these row indices and segments see the keys of these columns."""
    distance = (place.q_start + rows) - (place.kv_start + columns)
    seen = (q_segments == kv_segments) & (q_segments > 0) & (distance < place.window)
    return seen & (distance >= 0) if spec.causal else seen


def cap(spec: Spec, products: Float[Array, "..."]) -> Float[Array, "..."]:
    """The scores of products q k: scaled, then softcap * tanh(score / softcap) where there is one."""
    scores = products * spec.scale
    return scores if spec.softcap is None else spec.softcap * jnp.tanh(scores / spec.softcap)


def uncap(spec: Spec, scores: Float[Array, "..."], d_scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """The gradient of the products, of that of the scores that `cap` made of them."""
    if spec.softcap is not None:
        d_scores = d_scores * (1 - (scores / spec.softcap) ** 2)
    return d_scores * spec.scale
