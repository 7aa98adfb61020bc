"""The paged cache of rollout: memory for the tokens that there are, prompts shared by their samples.

A page holds `page` consecutive tokens of one layer. Slots say in a page table which pages are theirs, the
host hands pages out (`rollout.paged_memory`). All layers lie in one array, so that a scan over layers
writes and reads it in place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl_kernels.chips import LANES
from jaxrl_kernels.decode_attention.api import decode_attention
from jaxrl_kernels.decode_attention.api import write as write_token
from jaxrl_kernels.dispatch import choose, device
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.decode import DecodeWeights, through_layers
from jaxrl_llm.models.rope import rope_tables
from jaxrl_llm.models.transformer import block, final_norm_fn
from jaxrl_llm.sharding.rules import ROLLOUT, constrain, current_spec

NOBODYS = 0
"""The page of each layer that slots write to when they have none; never read."""


class PagedCache(NamedTuple):
    """X = ways L P: each device share of the slots has P pages a layer, page n of layer l at l P + n.

    R is head_dim, on TPU rounded up to LANES: memory has that room anyway, and without it the compiler would
    now and then lay out the pages with other dims last, and copy them all for the kernels.
    """

    k: Num[Array, "X K page R"]
    v: Num[Array, "X K page R"]
    k_scales: Float[Array, "X K page"] | None  # of pages in 8 bits
    v_scales: Float[Array, "X K page"] | None


def paged_cache(c: TransformerConfig, pages: int, page: int, dtype: DTypeLike) -> PagedCache:
    """Room for `pages` pages of `page` tokens, of all device shares together."""
    lanes = LANES if device()[0] == "tpu" else 1
    shape = (c.num_layers * pages, c.num_kv_heads, page, -(-c.head_dim // lanes) * lanes)
    narrow = jnp.dtype(dtype).itemsize == 1
    scales = lambda: jnp.zeros(shape[:3], jnp.float32) if narrow else None
    return PagedCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), scales(), scales())


def decode(
    c: TransformerConfig,
    weights: DecodeWeights,
    cache: PagedCache,
    table: Int[Array, "S N"],
    tokens: Int[Array, "S"],
    positions: Int[Array, "S"],
    active: Bool[Array, "S"],
) -> tuple[Float[Array, "S D"], PagedCache]:
    """Read one token a slot. Returns (hidden after the final norm, cache with the token in it)."""
    tables = rope_tables(c, positions[:, None])
    lengths = jnp.where(active, positions + 1, 0)

    def layer(carry, w, window, array, place):
        x, cache = carry
        number = place[0] if place else array

        def attend(q, k, v):
            out, new = _on_devices(
                c, _attend, cache, (q[:, 0], k[:, 0], v[:, 0]), table, lengths, number, window
            )
            return out[:, None], new

        return block(c, w, x, tables, attend), None

    x = constrain(weights.embed[tokens][:, None], "batch", "sequence", "hidden")
    (x, cache), _ = through_layers(c, weights.layers, layer, (x, cache))
    return final_norm_fn(c)(weights.norm, x)[:, 0], cache


def write(
    c: TransformerConfig,
    cache: PagedCache,
    prompts: tuple[tuple[Array, ...], tuple[Array, ...]],
    lengths: Int[Array, "B"],
    numbers: Int[Array, "R N"],
) -> PagedCache:
    """Put the keys and values of `decode.prefill` into pages.

    Args:
        numbers: R = ways B rows; row w B + b has the pages that device share w gives prompt b, in order;
            NOBODYS = it does not want them.
    """
    page = cache.k.shape[2]

    def to_pages(arrays, last):
        x = jnp.stack(arrays) if arrays[0].ndim == 4 else arrays[0]  # [L, B, K, ., .]
        x = jnp.moveaxis(x, last, 3)  # [L, B, K, T, E]
        at = jnp.arange(numbers.shape[1] * page) + (x.shape[3] - lengths)[:, None]
        at = jnp.minimum(at, x.shape[3] - 1)[None, :, None, :, None]
        x = jnp.take_along_axis(x, at, axis=3)
        return jnp.moveaxis(x.reshape(*x.shape[:3], -1, page, x.shape[4]), 2, 3)  # [L, B, N, K, page, E]

    new = to_pages(prompts[0], 4), to_pages(prompts[1], 3)
    return _on_devices(c, _write, cache, new, numbers)


def copy(
    c: TransformerConfig, cache: PagedCache, sources: Int[Array, "S"], targets: Int[Array, "S"]
) -> PagedCache:
    """Pages `sources` copied to `targets`, in every layer; both counted within the device share of a slot."""
    return _on_devices(c, _copy, cache, (), sources, targets)


def _attend(c, cache: PagedCache, new, table, lengths, layer, window):
    """Write the new keys and values, look at the slots' own pages."""
    q, k, v = new
    start, page = layer * _pages(c, cache), cache.k.shape[2]
    at = lengths - 1
    number = jnp.take_along_axis(table, at[:, None] // page, axis=1, mode="fill", fill_value=NOBODYS)[:, 0]
    number = start + jnp.where(lengths > 0, number, NOBODYS)
    implementation, _ = choose("decode_attention", q, cache.k, table)
    cache = write_token(cache, _stored(cache, (k, v)), number, at % page, implementation)
    out = decode_attention(
        _widened(q, cache),
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
    )
    return out[..., : c.head_dim], cache


def _write(c, cache: PagedCache, new, numbers):
    layers = jnp.arange(c.num_layers)[:, None, None] * _pages(c, cache)
    return jax.tree.map(lambda x, y: x.at[layers + numbers].set(y), cache, _stored(cache, new))


def _copy(c, cache: PagedCache, _, sources, targets):
    layers = jnp.arange(c.num_layers)[:, None] * _pages(c, cache)
    return jax.tree.map(lambda x: x.at[layers + targets].set(x[layers + sources]), cache)


def _pages(c: TransformerConfig, cache: PagedCache) -> int:
    """Pages a layer of one device share."""
    return cache.k.shape[0] // c.num_layers


def _stored(cache: PagedCache, new: tuple[Array, Array]) -> PagedCache:
    """Keys and values as the cache holds them."""
    new = [_widened(x, cache) for x in new]
    if cache.k_scales is None:
        return PagedCache(*(x.astype(cache.k.dtype) for x in new), None, None)
    (k, k_scales), (v, v_scales) = (quantize(x, cache.k.dtype) for x in new)
    return PagedCache(k, v, k_scales, v_scales)


def _widened(x: Float[Array, "*B E"], cache: PagedCache) -> Float[Array, "*B R"]:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, cache.k.shape[3] - x.shape[-1])])


def quantize(x: Float[Array, "*R E"], dtype: DTypeLike) -> tuple[Num[Array, "*R E"], Float[Array, "*R"]]:
    """(x in 8 bits, its scale): the largest of each row becomes the largest of the type."""
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / most, jnp.finfo(jnp.float32).tiny)
    x = x / scale[..., None]
    return (jnp.round(x) if whole else x).astype(dtype), scale


def _on_devices(c, fn, cache: PagedCache, new: tuple, *rest):
    """`fn(c, cache, new, *rest)` on each device with its own pages, slots and heads."""
    found = current_spec(("batch", "kv_heads"), cache.k.shape[:2], ROLLOUT)
    if found is None:
        return fn(c, cache, new, *rest)
    batch, heads = found
    pages = jax.tree.map(lambda x: PartitionSpec(batch, heads), cache)
    rows = lambda x: PartitionSpec(batch) if jnp.ndim(x) else PartitionSpec()
    if fn is _attend:  # q, k, v [S, heads, E]
        mine, out = PartitionSpec(batch, heads), (PartitionSpec(batch, heads), pages)
    else:  # of prompts [L, B, N, K, page, E], for every share
        mine, out = PartitionSpec(None, None, None, heads), pages
    specs = pages, tuple(mine for _ in new), *map(rows, rest)
    run = jax.shard_map(lambda *args: fn(c, *args), in_specs=specs, out_specs=out, check_vma=False)
    return run(cache, new, *rest)
