"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1; DeepSeek-V3, arXiv 2412.19437, 2.1.1).

A token has one latent for the keys and values of all heads, and one rotated key that all heads share.
Training, prefill and strict mode expand both to keys and values of each head. Decoding caches both instead of
keys and values, and moves the expansion to queries and outputs, which gives the same sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_kernels.flash_attention.spec import NO_WINDOW
from jaxrl_llm.models.attention import RopeTables, apply_rope, grow_queries, key_dim
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.indexer import IndexInputs, add_index_weights, key_room, pack_keys, project_index
from jaxrl_llm.models.linear import Initializer, adapter_of, apply_linear, read_weight, rms_norm
from jaxrl_llm.models.mixer_config import has_indexer
from jaxrl_llm.sharding.rules import constrain

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers

LATENT_EPS = 1e-6
"""Added to the mean square in the norms of latents, whatever `norm_eps` is (transformers)."""


class DecodeLatents(NamedTuple):
    """The `attention_fn` of `block` that reads a cache of latents."""

    attend: Callable[..., tuple[Array, Any]]
    """(q [S, T, H, R + rope], latents [S, T, 1, R + rope]) -> (out [S, T, H, R + rope], cache). With an
    indexer (q, latents with index keys, IndexInputs or None)."""


def cache_dims(c: TransformerConfig, strict: bool = False) -> tuple[int, int]:
    """Return (heads, size) of a token's entry in the KV cache: its keys, or its latent and rotated key; then
    a part of its index key, if the model has an indexer."""
    if c.mla and not strict:
        return 1, c.mla.kv_rank + c.mla.rope_dim + key_room(c, 1)
    return c.num_kv_heads, key_dim(c) + key_room(c, c.num_kv_heads)


def ring_array(c: TransformerConfig, stack: TransformerConfig, strict: bool = False) -> tuple[int, int, int]:
    """Return (heads, size of a head, most columns) of the ring's arrays for the layers of a stack.

    Layers with a window have a stack of their own, and arrays as short as the window, if their heads differ
    from the other layers'. In strict mode they have all columns, which it reads in the order of scoring.
    """
    is_short = c.global_heads and stack.window_layers[0] and not strict
    return *cache_dims(stack, strict), c.sliding_window if is_short else NO_WINDOW


def add_latent_weights(layers: Layers, c: TransformerConfig, init: Initializer) -> None:
    """Add the projections of latent attention and their norms."""
    mla, d = c.mla, c.hidden_size
    heads = ("latent", "heads", "head_dim")
    if mla.q_rank:
        layers.q_a = init.normal((d, mla.q_rank), ("embed", "compressed"))
        layers.q_a_norm = init.norm(mla.q_rank)
        layers.q_b = init.normal((mla.q_rank, c.num_heads, c.head_dim), heads)
    else:
        layers.q = init.normal((d, c.num_heads, c.head_dim), ("embed", "heads", "head_dim"))
    layers.kv_a = init.normal((d, mla.kv_rank + mla.rope_dim), ("embed", "compressed"))
    layers.kv_a_norm = init.norm(mla.kv_rank)
    layers.kv_b = init.normal((mla.kv_rank, c.num_heads, mla.nope_dim + mla.value_dim), heads)
    layers.o = init.normal((c.num_heads, mla.value_dim, d), ("heads", "head_dim", "embed"), residual=True)
    if has_indexer(c):
        add_index_weights(layers, c, init)
    if c.qkv_bias:
        layers.kv_a_bias = init.zeros((mla.kv_rank + mla.rope_dim,), ("norm",))
        if mla.q_rank:
            layers.q_a_bias = init.zeros((mla.q_rank,), ("norm",))


def expand_latents(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"], rope: RopeTables) -> tuple:
    """Return (q, k, v, latents): queries, keys and values of each head [B, T, H, E], and the tokens' entries
    in a cache of latents [B, T, 1, C]; before the latents IndexInputs or None, if the model has an indexer.
    Values are padded with zeros to the size of keys, since kernels support only equal sizes.
    """
    mla = c.mla
    q, latent, rotated, index = _project(c, w, h, rope)
    k, v = jnp.split(apply_linear(c, w, "kv_b", latent), [mla.nope_dim], axis=-1)
    shared = jnp.broadcast_to(rotated, (*k.shape[:-1], mla.rope_dim))
    v = jnp.pad(v, ((0, 0),) * 3 + ((0, c.head_dim - mla.value_dim),))
    k = constrain(jnp.concatenate([k, shared], axis=-1), "batch", "sequence", "heads", "head_dim")
    latents = jnp.concatenate([latent[:, :, None], rotated], axis=-1)
    return (q, k, v, index, latents) if c.index else (q, k, v, latents)


def decode_latents(
    c: TransformerConfig,
    w: Layers,
    h: Float[Array, "S T D"],
    rope: RopeTables,
    *,
    attention_fn: DecodeLatents,
) -> tuple[Float[Array, "S T H V"], Any]:
    """Return (attention of new tokens over the cache of latents, cache with the new tokens).

    With keys W_k c and values W_v c of a latent c, q W_k c = (W_k^T q) c, and a sum of W_v c is W_v times the
    sum of c: neither keys nor values are computed. Both factors of an adapter of W are absorbed the same way.
    """
    mla = c.mla
    q, latent, rotated, index = _project(c, w, h, rope)
    absorbed = _absorb_keys(c, w, q[..., : mla.nope_dim])
    q = jnp.concatenate([absorbed, q[..., mla.nope_dim :]], axis=-1)
    token = jnp.concatenate([latent[:, :, None], rotated], axis=-1)
    indexed = (pack_keys(c, token, index), index) if c.index else (token,)
    out, cache = attention_fn.attend(q, *indexed)
    return _expand_values(c, w, out[..., : mla.kv_rank]), cache


def _absorb_keys(c: TransformerConfig, w: Layers, q: Float[Array, "S T H N"]) -> Float[Array, "S T H R"]:
    """Return (W_k + scale A B_k)^T q of each head without computing the sum in brackets."""
    out = jnp.einsum("sthn,rhn->sthr", q, read_weight(w, "kv_b", q)[..., : c.mla.nope_dim])
    if not (adapter := adapter_of(w, "kv_b")):
        return out
    a, b = adapter[0], adapter[1][..., : c.mla.nope_dim]
    return out + c.lora.scale * jnp.einsum("sthl,rl->sthr", jnp.einsum("sthn,lhn->sthl", q, b), a)


def _expand_values(
    c: TransformerConfig, w: Layers, latents: Float[Array, "S T H R"]
) -> Float[Array, "S T H V"]:
    """Return (W_v + scale A B_v) c of each head's sum c of latents without computing the sum in brackets."""
    out = jnp.einsum("sthr,rhv->sthv", latents, read_weight(w, "kv_b", latents)[..., c.mla.nope_dim :])
    if not (adapter := adapter_of(w, "kv_b")):
        return out
    a, b = adapter[0], adapter[1][..., c.mla.nope_dim :]
    return out + c.lora.scale * jnp.einsum("sthl,lhv->sthv", jnp.einsum("sthr,rl->sthl", latents, a), b)


def _project(
    c: TransformerConfig, w: Layers, h: Float[Array, "B T D"], rope: RopeTables
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T R"], Float[Array, "B T 1 rope"], IndexInputs | None]:
    """Return queries, the normalised latent of keys and values, the rotated key that all heads share, and
    the layer's `IndexInputs`, if it has an indexer."""
    mla, index = c.mla, None
    if mla.q_rank:
        q_latent = rms_norm(apply_linear(c, w, "q_a", h), w.q_a_norm[...], LATENT_EPS)
        q = apply_linear(c, w, "q_b", q_latent)
        index = project_index(c, w, h, q_latent, rope=rope) if has_indexer(c) else None
    else:
        q = apply_linear(c, w, "q", h)
    nope, q_rope = jnp.split(q, [mla.nope_dim], axis=-1)
    q = grow_queries(jnp.concatenate([nope, apply_rope(q_rope, rope, mla.interleaved)], axis=-1), rope)
    latent, k_rope = jnp.split(apply_linear(c, w, "kv_a", h), [mla.kv_rank], axis=-1)
    rotated = apply_rope(k_rope[:, :, None], rope, mla.interleaved)
    return q, rms_norm(latent, w.kv_a_norm[...], LATENT_EPS), rotated, index
