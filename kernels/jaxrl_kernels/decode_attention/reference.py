"""The definition of attention over a paged KV cache: gather the pages, then dense attention."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxrl_kernels.flash_attention.reference import dense_attention
from jaxrl_kernels.flash_attention.spec import NO_WINDOW, AttentionSpec

Pages = TypeVar("Pages")
"""A tree of arrays: keys, values, and for 8-bit pages their scales."""
ArrayOrShape = Array | jax.ShapeDtypeStruct


def decode_attention(
    q: Float[Array, "S H E"],
    k_pages: Num[Array, "P K page E"],
    v_pages: Num[Array, "P K page E"],
    page_table: Int[Array, "S N"],
    lengths: Int[Array, "S"],
    *,
    scale: float,
    window: int | Int[Array, ""] = NO_WINDOW,
    softcap: float | None = None,
    k_scales: Float[Array, "P K page"] | None = None,
    v_scales: Float[Array, "P K page"] | None = None,
    splits: int | None = None,
) -> tuple[Float[Array, "S H E"], Float[Array, "S H"]]:
    """Compute `api.decode_attention` and its log-sum-exp, MASKED_LSE for an empty slot.

    Reads whole rows of the page table, however short a slot.
    """
    k = gather_pages(k_pages, k_scales, page_table).astype(q.dtype)
    v = gather_pages(v_pages, v_scales, page_table).astype(q.dtype)
    position = jnp.arange(k.shape[1])
    last = lengths[:, None] - 1
    visible = (position <= last) & (last - position < window)
    spec = AttentionSpec(scale, softcap=softcap)
    out, lse = dense_attention(spec, q[:, None], k, v, visible[:, None])
    return out[:, 0], lse[..., 0]


def write_token(pages: Pages, new: Pages, numbers: Int[Array, "S"], offsets: Int[Array, "S"]) -> Pages:
    """Compute `api.write_token` by scatter."""
    return jax.tree.map(lambda x, token: x.at[numbers, :, offsets].set(token), pages, new)


def gather_pages(
    pages: Num[Array, "P K page E"],
    scales: Float[Array, "P K page"] | None,
    page_table: Int[Array, "S N"],
) -> Num[Array, "S C K E"]:
    """Return the slots' keys or values, C = N page of each in order, with their scales applied."""
    slots, count = page_table.shape
    _, heads, size, dim = pages.shape
    x = pages[page_table]
    if scales is not None:
        x = x.astype(jnp.float32) * scales[page_table][..., None]
    return jnp.moveaxis(x, 2, 3).reshape(slots, count * size, heads, dim)


def merge_splits(
    out: Float[Array, "N *R E"], lse: Float[Array, "N *R 1"]
) -> tuple[Float[Array, "*R E"], Float[Array, "*R"]]:
    """Merge (out, lse) of attention over N splits of the keys."""
    if len(out) == 1:
        return out[0], lse[0, ..., 0]
    weights = jax.nn.softmax(lse, axis=0)
    return jnp.sum(weights * out.astype(jnp.float32), axis=0), jax.nn.logsumexp(lse[..., 0], axis=0)
