"""The paged KV cache on the device (PagedAttention, arXiv 2309.06180): layout, writes and decode attention.

A page holds `page_size` consecutive tokens of one layer. A page table maps each slot to its pages; the host
allocates them (`rollout/native/paged_cache.py`). All layers are stored in one array, so that a scan over
layers reads and writes it in place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, UInt

from jaxrl_kernels.chips import LANES
from jaxrl_kernels.decode_attention.api import decode_attention, write_token
from jaxrl_kernels.dispatch import choose, device
from jaxrl_kernels.flash_attention.sinks import add_sinks
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.decode import DecodeWeights, apply_layers
from jaxrl_llm.models.rope import rope_tables
from jaxrl_llm.models.transformer import block, final_norm_fn, sinks_of
from jaxrl_llm.sharding.rules import ROLLOUT, constrain_residual, current_spec

NULL_PAGE = 0
"""The page that inactive slots write to, and that pads page tables; never read."""


class PagedCache(NamedTuple):
    """Pages of all layers. X = num_shards L P: each shard of the slots has P pages per layer, page n of layer
    l at l P + n.

    R is head_dim, on TPU rounded up to LANES: memory is padded to that anyway, and without it the compiler
    would now and then lay out the pages with other dims last, and copy them all for the kernels.
    """

    k: Num[Array, "X K page R"]
    v: Num[Array, "X K page R"]
    k_scales: Float[Array, "X K page"] | None  # of 8-bit pages
    v_scales: Float[Array, "X K page"] | None


def init_paged_cache(c: TransformerConfig, num_pages: int, page_size: int, dtype: DTypeLike) -> PagedCache:
    """Return zeros for `num_pages` pages of `page_size` tokens, counted over all shards of the slots."""
    lanes = LANES if device()[0] == "tpu" else 1
    shape = (c.num_layers * num_pages, c.num_kv_heads, page_size, -(-c.head_dim // lanes) * lanes)
    quantized = jnp.dtype(dtype).itemsize == 1
    scales = lambda: jnp.zeros(shape[:3], jnp.float32) if quantized else None
    return PagedCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), scales(), scales())


def decode_paged(
    c: TransformerConfig,
    weights: DecodeWeights,
    cache: PagedCache,
    table: Int[Array, "S N"],
    tokens: Int[Array, "S"],
    positions: Int[Array, "S"],
    active: Bool[Array, "S"],
) -> tuple[Float[Array, "S D"], PagedCache, UInt[Array, "S 1 sparse chosen"] | None]:
    """Feed one token per slot through the model, with the paged cache.

    Args:
        table: pages of each slot, in order, counted within its shard.
        tokens: the token of each slot.
        positions: its position in the sequence, 0, 1, ...
        active: inactive slots write to NULL_PAGE.

    Returns: (hidden state after the final norm, cache with the token's keys and values, its routes).
    """
    model, tables = c, rope_tables(c, positions[:, None])
    lengths = jnp.where(active, positions + 1, 0)

    def layer(c, carry, w, window, array, index):
        x, cache = carry
        layer_index = index[0] if index else array

        def attend(q, k, v):
            (out, lse), new = _shard_mapped(
                model, _attend, cache, (q[:, 0], k[:, 0], v[:, 0]), table, lengths, layer_index, window
            )
            out, sinks = out[:, None], sinks_of(w)
            return out if sinks is None else add_sinks(out, lse[..., None], sinks)[0], new

        x, cache, routing = block(c, w, x, tables, attend, valid=active[:, None], rules=ROLLOUT)
        return (x, cache), None, routing

    x = constrain_residual(weights.embed[tokens][:, None])
    (x, cache), _, routes = apply_layers(c, weights.layers, layer, (x, cache))
    return final_norm_fn(c)(weights.norm, x)[:, 0], cache, routes


def write_prompts(
    c: TransformerConfig,
    cache: PagedCache,
    prompts: tuple[tuple[Array, ...], tuple[Array, ...]],
    lengths: Int[Array, "B"],
    tables: Int[Array, "R N"],
) -> PagedCache:
    """Write the keys and values of `decode.prefill` into pages.

    Args:
        tables: page tables, R = num_shards B rows; row s B + b has the pages of prompt b in shard s, in
            order; NULL_PAGE = that shard has no slot with this prompt.
    """
    page_size = cache.k.shape[2]

    def to_pages(arrays, last):
        x = jnp.stack(arrays) if arrays[0].ndim == 4 else arrays[0]  # [L, B, K, ., .]
        x = jnp.moveaxis(x, last, 3)  # [L, B, K, T, E]
        at = jnp.arange(tables.shape[1] * page_size) + (x.shape[3] - lengths)[:, None]
        at = jnp.minimum(at, x.shape[3] - 1)[None, :, None, :, None]
        x = jnp.take_along_axis(x, at, axis=3)
        x = x.reshape(*x.shape[:3], -1, page_size, x.shape[4])
        return jnp.moveaxis(x, 2, 3)  # [L, B, N, K, page, E]

    new = to_pages(prompts[0], 4), to_pages(prompts[1], 3)
    return _shard_mapped(c, _write, cache, new, tables)


def copy_pages(
    c: TransformerConfig, cache: PagedCache, sources: Int[Array, "S"], targets: Int[Array, "S"]
) -> PagedCache:
    """Copy page sources[s] to targets[s] in every layer; both are counted within the shard of slot s."""
    return _shard_mapped(c, _copy, cache, (), sources, targets)


def _attend(c, cache: PagedCache, new, table, lengths, layer, window):
    """Write the new keys and values, then attend to the pages of each slot; returns ((out, lse), cache)."""
    q, k, v = new
    start, page_size = layer * _pages_per_layer(c, cache), cache.k.shape[2]
    at = lengths - 1
    pages = jnp.take_along_axis(table, at[:, None] // page_size, axis=1, mode="fill", fill_value=NULL_PAGE)[
        :, 0
    ]
    pages = start + jnp.where(lengths > 0, pages, NULL_PAGE)
    implementation, _ = choose("decode_attention", q, cache.k, table)
    cache = write_token(cache, _to_storage(cache, (k, v)), pages, at % page_size, implementation)
    out, lse = decode_attention(
        _pad_head_dim(q, cache),
        cache.k,
        cache.v,
        table + start,
        lengths,
        scale=1 / math.sqrt(c.head_dim),
        window=window,
        softcap=c.attention_softcap,
        k_scales=cache.k_scales,
        v_scales=cache.v_scales,
        implementation=implementation,
        return_lse=True,
    )
    return (out[..., : c.head_dim], lse), cache


def _write(c, cache: PagedCache, new, tables):
    layers = jnp.arange(c.num_layers)[:, None, None] * _pages_per_layer(c, cache)
    return jax.tree.map(lambda x, y: x.at[layers + tables].set(y), cache, _to_storage(cache, new))


def _copy(c, cache: PagedCache, _, sources, targets):
    layers = jnp.arange(c.num_layers)[:, None] * _pages_per_layer(c, cache)
    return jax.tree.map(lambda x: x.at[layers + targets].set(x[layers + sources]), cache)


def _pages_per_layer(c: TransformerConfig, cache: PagedCache) -> int:
    """Return the pages of one layer in one shard."""
    return cache.k.shape[0] // c.num_layers


def _to_storage(cache: PagedCache, new: tuple[Array, Array]) -> PagedCache:
    """Pad and cast or quantize keys and values to the storage format of the cache."""
    new = [_pad_head_dim(x, cache) for x in new]
    if cache.k_scales is None:
        return PagedCache(*(x.astype(cache.k.dtype) for x in new), None, None)
    (k, k_scales), (v, v_scales) = (quantize(x, cache.k.dtype) for x in new)
    return PagedCache(k, v, k_scales, v_scales)


def _pad_head_dim(x: Float[Array, "*B E"], cache: PagedCache) -> Float[Array, "*B R"]:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, cache.k.shape[3] - x.shape[-1])])


def quantize(x: Float[Array, "*R E"], dtype: DTypeLike) -> tuple[Num[Array, "*R E"], Float[Array, "*R"]]:
    """Quantize each row to 8 bits with a scale of its own, absmax / largest value of the type.

    Returns: (x in `dtype`, float32 scales): x is about quantized * scale.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    max_value = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / max_value, jnp.finfo(jnp.float32).tiny)
    x = x / scale[..., None]
    return (jnp.round(x) if is_integer else x).astype(dtype), scale


def _shard_mapped(c, fn, cache: PagedCache, new: tuple, *rest):
    """Call `fn(c, cache, new, *rest)` on each device with its own pages, slots and heads."""
    spec = current_spec(("batch", "kv_heads"), cache.k.shape[:2], ROLLOUT)
    if spec is None:
        return fn(c, cache, new, *rest)
    batch, heads = spec
    pages = jax.tree.map(lambda x: PartitionSpec(batch, heads), cache)
    rows = lambda x: PartitionSpec(batch) if jnp.ndim(x) else PartitionSpec()
    if fn is _attend:  # q, k, v [S, heads, E]
        new_spec = PartitionSpec(batch, heads)
        out = ((new_spec, new_spec), pages)
    else:  # prompts [L, B, N, K, page, E], replicated over shards
        new_spec, out = PartitionSpec(None, None, None, heads), pages
    specs = pages, tuple(new_spec for _ in new), *map(rows, rest)
    run = jax.shard_map(lambda *args: fn(c, *args), in_specs=specs, out_specs=out, check_vma=False)
    return run(cache, new, *rest)
