"""Attention of a few tokens a slot over a paged KV cache, plain JAX: online softmax over blocks of pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxrl_kernels.chunks import map_rows
from jaxrl_kernels.decode_attention.reference import gather_pages
from jaxrl_kernels.dispatch import device
from jaxrl_kernels.flash_attention.reference import dense_attention, merge_keys
from jaxrl_kernels.flash_attention.spec import MASKED_LSE, NO_WINDOW, AttentionSpec

BLOCK = 256
"""Tokens of a block of keys at least, unless a page is larger."""


def chunk_attention(
    q: Float[Array, "S T H E"],
    k_pages: Num[Array, "P K page E"],
    v_pages: Num[Array, "P K page E"],
    page_table: Int[Array, "S N"],
    positions: Int[Array, "S T"],
    *,
    scale: float,
    window: int | Int[Array, ""] = NO_WINDOW,
    softcap: float | None = None,
    k_scales: Float[Array, "P K page"] | None = None,
    v_scales: Float[Array, "P K page"] | None = None,
) -> tuple[Float[Array, "S T H E"], Float[Array, "S H T"]]:
    """Compute attention of each token to the keys of its slot up to its own key, which are in the pages
    already. Reads only the pages that hold a visible key of some slot.

    Args:
        positions: of the tokens in their sequences; -1 = padding, whose result is 0.
        the others: see `api.decode_attention`.

    Returns: (out, lse) as `flash_attention.reference.forward`.
    """
    page = k_pages.shape[2]
    columns = -(-BLOCK // page)
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % columns)))
    spec = AttentionSpec(scale, softcap=softcap)

    # Attend to one block of pages at a time, and merge the results by their log-sum-exp.
    def attend(q, table, positions):
        last = positions[..., None]

        def add(block, carry):
            pages = jax.lax.dynamic_slice_in_dim(table, block * columns, columns, axis=1)
            k = gather_pages(k_pages, k_scales, pages).astype(q.dtype)
            v = gather_pages(v_pages, v_scales, pages).astype(q.dtype)
            at = block * k.shape[1] + jnp.arange(k.shape[1])
            more = dense_attention(spec, q, k, v, (at <= last) & (last - at < window))
            return merge_keys(carry, more)

        oldest = jnp.min(jnp.where(positions < 0, jnp.max(positions), positions)) - window + 1
        first, end = (jnp.maximum(at, 0) // (columns * page) for at in (oldest, jnp.max(positions)))
        rows, length, heads, _ = q.shape
        empty = jnp.zeros(q.shape, jnp.float32), jnp.full((rows, heads, length), MASKED_LSE, jnp.float32)
        out, lse = jax.lax.fori_loop(first, end + 1, add, empty)
        return out.astype(q.dtype), lse

    scores_of_slot = q.shape[1] * q.shape[2] * columns * page
    return map_rows(attend, max_scores() // scores_of_slot, q, table, positions)


def max_scores() -> int:
    """Return the scores in memory at once: 4 MiB, for the cache of a CPU, or enough for an accelerator."""
    return 2**20 if device()[0] == "cpu" else 2**24
