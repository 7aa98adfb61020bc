"""The sparse indexer of latent attention (DeepSeek-V3.2, arXiv 2512.02556, equation 1; GLM-5).

A token t attends to the `topk` tokens s, of its trajectory up to t, with the highest scores sum_j w_tj
relu(q_tj k_s), over index heads j. Of equal scores the earlier token is chosen. A choice has no gradient, so
the indexer is frozen: DeepSeek trains it by a separate loss, the KL divergence between attention's weights
and softmax of the scores, with its inputs detached.

Whole rows compute scores of blocks of queries against all keys, and attention with the choice as its mask:
time is that of dense attention, and memory that of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.chunks import map_chunks
from jaxrl_kernels.flash_attention.reference import dense_attention
from jaxrl_kernels.flash_attention.spec import NO_WINDOW, AttentionSpec, DynamicMask, visible
from jaxrl_llm.models.attention import RopeTables, apply_rope, attention_scale
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.linear import Initializer, multiply
from jaxrl_llm.models.rows import Packing

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers

KEY_EPS = 1e-6
"""Added to the variance in the norm of index keys (transformers)."""
MAX_SCORES = 2**25
"""Numbers of a block of queries, for all heads and keys of a row: 128 MiB in float32."""
MIN_BLOCK = 8
"""Queries of a block, at least."""


class IndexInputs(NamedTuple):
    """Index queries, index keys and weights of index heads, without gradient."""

    q: Float[Array, "B T I E"]
    k: Float[Array, "B T E"]
    weights: Float[Array, "B T I"]
    """Of the index heads, float32, with the scale of the scores."""


def add_index_weights(layers: Layers, c: TransformerConfig, init: Initializer) -> None:
    """Add the projections of the indexer, and the norm of its keys. No mesh axis divides its heads."""
    index, d = c.index, c.hidden_size
    layers.index_q = init.normal(
        (c.mla.q_rank, index.heads, index.head_dim), ("latent", "compressed", "head_dim")
    )
    layers.index_k = init.normal((d, index.head_dim), ("embed", "compressed"))
    layers.index_k_norm = init.ones((index.head_dim,), ("norm",))
    layers.index_k_norm_bias = init.zeros((index.head_dim,), ("norm",))
    layers.index_weights = init.normal((d, index.heads), ("embed", "compressed"))


def project_index(
    c: TransformerConfig,
    w: Layers,
    h: Float[Array, "B T D"],
    q_latent: Float[Array, "B T Q"],
    *,
    rope: RopeTables,
) -> IndexInputs:
    """Return index queries, keys and weights of tokens, without gradient.

    Args:
        h: input of attention.
        q_latent: normalised latent of the queries of attention.
    """
    index = c.index
    q, k = multiply(w, "index_q", q_latent), multiply(w, "index_k", h).astype(jnp.float32)
    k = k - jnp.mean(k, axis=-1, keepdims=True)
    k = k * jax.lax.rsqrt(jnp.mean(k * k, axis=-1, keepdims=True) + KEY_EPS)
    k = (k * w.index_k_norm[...] + w.index_k_norm_bias[...]).astype(q.dtype)
    k = apply_rope(k[:, :, None], rope, index.interleaved)[:, :, 0]
    weights = multiply(w, "index_weights", h.astype(jnp.float32))
    weights = weights * (index.heads * index.head_dim) ** -0.5
    return jax.lax.stop_gradient(IndexInputs(apply_rope(q, rope, index.interleaved), k, weights))


def index_scores(
    q: Float[Array, "B T I E"], weights: Float[Array, "B T I"], k: Float[Array, "B C E"]
) -> Float[Array, "B T C"]:
    """Compute sum_j w_tj relu(q_tj k_s) in float32."""
    products = jnp.einsum("btie,bce->btic", q, k, preferred_element_type=jnp.float32)
    return jnp.sum(jax.nn.relu(products) * weights[..., None], axis=2)


def select_keys(
    scores: Float[Array, "B T C"], seen: Bool[Array, "#B T C"], topk: int
) -> Bool[Array, "B T C"]:
    """Return the `topk` seen keys of each query with the highest scores, of equal ones the first."""
    if topk >= scores.shape[-1]:
        return jnp.broadcast_to(seen, scores.shape)
    scores = jnp.where(seen, scores, -jnp.inf)
    lowest = jax.lax.top_k(scores, topk)[0][..., -1:]
    above, equal = scores > lowest, (scores == lowest) & seen
    room = topk - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= room))


def choose_keys(
    c: TransformerConfig, index: IndexInputs, seen: Bool[Array, "S #T C"], start: int | Int[Array, ""] = 0
) -> Bool[Array, "S T C"]:
    """Return the keys of a cache that the queries choose.

    Args:
        index: its keys are those of the cache [S, C, E].
        start: column of the oldest key; the others follow, the last column before the first.
    """
    by_age = lambda x: jnp.roll(x, -start, axis=-1)
    scores = index_scores(index.q, index.weights, index.k)
    return jnp.roll(select_keys(by_age(scores), by_age(seen), c.index.topk), start, axis=-1)


def choose_exactly(
    c: TransformerConfig,
    index: IndexInputs,
    where: batch_invariant.RingKeys | batch_invariant.RowKeys,
    positions: Int[Array, "B T"],
) -> Bool[Array, "B T C"]:
    """Return the positions that each token chooses, with the same bits in every program (strict mode).

    Args:
        index: its keys are those of a cache, or of rows [B, C, E].
        where, positions: as of `batch_invariant.invariant_attention`.
    """
    scores = batch_invariant.invariant_scores(index_scores, index, where, positions)
    seen = jnp.arange(scores.shape[-1]) <= positions[..., None]
    return select_keys(scores, seen, c.index.topk)


def read_choice(
    c: TransformerConfig,
    x: Float[Array, "S C K R"],
    index: IndexInputs | None,
    chosen: Bool[Array, "S T C"] | None,
    *,
    choose: Callable[[IndexInputs], Bool[Array, "S T C"]],
) -> tuple[Float[Array, "S C K E"], Bool[Array, "S T C"]]:
    """Return (entries of a cache without index keys, the keys to read): `choose` of the layer's queries and
    the cache's index keys, or the choice of an earlier layer."""
    x, keys = unpack_keys(c, x)
    return x, chosen if index is None else choose(index._replace(k=keys))


def key_room(c: TransformerConfig, heads: int) -> int:
    """Return the numbers of an index key that each of `heads` heads of a cache stores; 0 = no indexer."""
    return -(-c.index.head_dim // heads) if c.index else 0


def pack_keys(
    c: TransformerConfig, x: Float[Array, "B T K E"], index: IndexInputs | None
) -> Float[Array, "B T K R"]:
    """Return keys, values or latents with parts of the token's index key, or with zeros."""
    heads = x.shape[2]
    room = key_room(c, heads)
    if index is None:
        return jnp.pad(x, ((0, 0),) * 3 + ((0, room),))
    parts = jnp.pad(index.k, ((0, 0), (0, 0), (0, heads * room - c.index.head_dim)))
    return jnp.concatenate([x, parts.reshape(*x.shape[:3], room)], axis=-1)


def unpack_keys(
    c: TransformerConfig, x: Float[Array, "B C K R"]
) -> tuple[Float[Array, "B C K E"], Float[Array, "B C I"]]:
    """Return (x without index keys, the index keys); inverse of `pack_keys`."""
    room = key_room(c, x.shape[2])
    x, parts = x[..., :-room], x[..., -room:]
    return x, parts.reshape(*x.shape[:2], -1)[..., : c.index.head_dim]


def no_choice(rows: int, length: int) -> UInt[Array, "B T W"]:
    """Return a choice of no keys for whole rows, for a scan to begin with."""
    return jnp.zeros((rows, length, -(-length // 8)), jnp.uint8)


def make_selected_fn(
    c: TransformerConfig, rows: Packing, *, strict: bool, chosen: UInt[Array, "B T W"] | None
):
    """Return the `attention_fn` (q, k, v, index) -> (out, (k, v, chosen)) of layers with an indexer.

    Args:
        chosen: choice of an earlier layer, for layers without an indexer: bits of the row's columns, in
            strict mode of positions.
    """

    def attend(q, k, v, index):
        if not strict:
            out, bits = attend_selected(c, rows, q, k, v, index=index, chosen=chosen)
            return out, (None, None, bits)
        bits = chosen
        if index is not None:
            bits = jnp.packbits(choose_exactly(c, index, _keys_of(rows), rows.positions), axis=-1)
        in_order = jnp.unpackbits(bits, axis=-1, count=q.shape[1]).astype(bool)

        def plain(q, k, v, rows, in_order):
            of_keys = jnp.broadcast_to(rows.positions[:, None], in_order.shape)
            columns = jnp.packbits(jnp.take_along_axis(in_order, of_keys, axis=-1), axis=-1)
            return attend_selected(c, rows, q, k, v, index=None, chosen=columns)[0]

        def exact(q, k, v, rows, in_order):
            return batch_invariant.invariant_attention(
                q, k, v, _keys_of(rows), rows.positions, NO_WINDOW, scale=attention_scale(c), chosen=in_order
            )

        out = batch_invariant.straight_through(plain, exact, q, k, v, rows, in_order)
        return out, (pack_keys(c, k, index), pack_keys(c, v, None), bits)

    return attend


def _keys_of(rows: Packing) -> batch_invariant.RingKeys | batch_invariant.RowKeys:
    """Return where the keys of each position are in packed rows."""
    if rows.last is not None:
        return batch_invariant.RowKeys(rows.segments, rows.last)
    return batch_invariant.RingKeys(jnp.arange(rows.positions.shape[1]) - rows.positions)


def attend_selected(
    c: TransformerConfig,
    rows: Packing,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T H E"],
    v: Float[Array, "B T H E"],
    *,
    index: IndexInputs | None,
    chosen: UInt[Array, "B T W"] | None,
) -> tuple[Float[Array, "B T H E"], UInt[Array, "B T W"]]:
    """Compute attention of packed rows to the chosen keys, a block of queries after the other.

    Args:
        chosen: bits of the columns that each token may read, if index is None.

    Returns: (out, bits of the chosen columns).
    """
    length, kv_last = q.shape[1], rows.segments if rows.last is None else rows.last
    columns, spec = jnp.arange(length), AttentionSpec(attention_scale(c))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(q, at, segments, *choice):
        seen = visible(
            DynamicMask(), at[..., None], columns, NO_WINDOW, segments[..., None], kv_last[:, None]
        )
        if index is None:
            seen &= jnp.unpackbits(*choice, axis=-1, count=length).astype(bool)
        else:
            seen = select_keys(index_scores(*choice, index.k), seen, c.index.topk)
        return dense_attention(spec, q, k, v, seen)[0], jnp.packbits(seen, axis=-1)

    choice = (chosen,) if index is None else (index.q, index.weights)
    at = jnp.broadcast_to(columns, rows.segments.shape)
    return map_chunks(block, block_of_queries(c, length), q, at, rows.segments, *choice)


def block_of_queries(c: TransformerConfig, num_keys: int) -> int:
    """Return the queries of a row that are computed together, so that their scores fit into memory."""
    return max(MAX_SCORES // (max(c.num_heads, c.index.heads) * num_keys), MIN_BLOCK)
