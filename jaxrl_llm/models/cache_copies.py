"""Copies of a slot's keys and values between the ring cache and pages.

A copy takes time for the slot's size, not the cache's: the loops run once for each copied slot or page, and
update the cache in place. Copies keep every bit.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Num

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.decode import RingCache
from jaxrl_llm.models.paged import PagedCache
from jaxrl_llm.sharding.rules import ROLLOUT, current_spec


def read_pages(
    c: TransformerConfig,
    ring: RingCache,
    pages: PagedCache,
    table: Int[Array, "S N"],
    lengths: Int[Array, "S"],
    chosen: Bool[Array, "S"],
) -> RingCache:
    """Copy the pages of the chosen slots into the ring, the newest token right before the cursor.

    Args:
        table: pages of each slot, in order, counted within its shard.
        lengths: tokens of each slot; at most the length of the ring.
    """
    return _shard_mapped(partial(_read, c), 0, ring, pages, table, lengths, chosen)


def write_pages(
    c: TransformerConfig,
    ring: RingCache,
    pages: PagedCache,
    start: Int[Array, ""],
    copies: Int[Array, "X 3"],
    counts: Int[Array, " num_shards"],
) -> PagedCache:
    """Copy columns of the ring into pages, one page after the other.

    Args:
        start: the ring's cursor before its last chunk.
        copies: (slot within its shard, page, first column relative to `start`), with equally many rows for
            each shard, the first shard's first.
        counts: copies of each shard; its other rows are not read.
    """
    return _shard_mapped(partial(_write, c), 1, ring, pages, start, copies, counts)


def _read(c, ring: RingCache, pages: PagedCache, table, lengths, chosen) -> RingCache:
    order, length = jnp.argsort(~chosen, stable=True), ring.length

    def one(i, ring):
        slot = order[i]

        def copy(source: Num[Array, "X K page R"], arrays, last):
            size = arrays[0].shape[-2 if last else -1]
            x = source.reshape(c.num_kv_layers, -1, *source.shape[1:])
            x = jnp.take(x, table[slot], axis=1, mode="clip")[..., :size]
            x = jnp.moveaxis(x, 1, 2).reshape(c.num_kv_layers, x.shape[2], -1, size)[:, :, :length]
            x = jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))
            x = jnp.roll(x, ring.cursor - lengths[slot], axis=2)
            x = (jnp.swapaxes(x, 2, 3) if last else x)[:, None]
            put = lambda array, x: jax.lax.dynamic_update_slice_in_dim(array, x, slot, axis=-4)
            return tuple(map(put, arrays, x if arrays[0].ndim == 4 else x[None]))

        k, v = copy(pages.k, ring.k, last=True), ring.v and copy(pages.v, ring.v, last=False)
        return ring._replace(k=k, v=v)

    return jax.lax.fori_loop(0, jnp.sum(chosen), one, ring)


def _write(c, ring: RingCache, pages: PagedCache, start, copies, counts) -> PagedCache:
    size = pages.k.shape[2]

    def one(i, pages):
        slot, page, first = copies[i]
        columns = jnp.mod(start + first + jnp.arange(size), ring.length)

        def copy(target: Num[Array, "L P K page R"], arrays, last):
            rows = [jax.lax.dynamic_index_in_dim(x, slot, axis=-4, keepdims=False) for x in arrays]
            rows = [jnp.take(x, columns, axis=-1 if last else -2, mode="clip") for x in rows]
            x = jnp.concatenate([x.reshape(-1, *x.shape[-3:]) for x in rows])
            x = jnp.swapaxes(x, 2, 3) if last else x
            x = jnp.pad(x, ((0, 0),) * 3 + ((0, target.shape[-1] - x.shape[-1]),))
            return jax.lax.dynamic_update_slice_in_dim(target, x[:, None], page, axis=1)

        k, v = copy(pages.k, ring.k, last=True), pages.v
        return pages._replace(k=k, v=v if v is None else copy(v, ring.v, last=False))

    layers = jax.tree.map(lambda x: x.reshape(c.num_kv_layers, -1, *x.shape[1:]), pages)
    layers = jax.lax.fori_loop(0, counts[0], one, layers)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), layers, pages)


def _shard_mapped(copy, result: int, ring: RingCache, pages: PagedCache, *rest):
    """Call `copy(ring, pages, *rest)` on each device with the device's slots, pages and heads.

    Args:
        result: 0 = `copy` returns a ring, 1 = pages.
    """
    spec = current_spec(("batch", "kv_heads"), pages.k.shape[:2], ROLLOUT)
    if spec is None:
        return copy(ring, pages, *rest)
    slots = lambda x: PartitionSpec(*(None,) * (x.ndim - 4), *spec) if x.ndim else PartitionSpec()
    caches = jax.tree.map(slots, ring), jax.tree.map(lambda _: PartitionSpec(*spec), pages)
    rows = (PartitionSpec(spec[0]) if jnp.ndim(x) else PartitionSpec() for x in rest)
    run = jax.shard_map(copy, in_specs=(*caches, *rows), out_specs=caches[result], check_vma=False)
    return run(ring, pages, *rest)


def roll(x: ArrayLike, shift: ArrayLike, axis: int) -> jax.Array:
    """Return `jnp.roll(x, shift, axis)` for shifts of 0 to its length, without the array of twice that."""
    length = x.shape[axis]
    part = lambda before, after: jax.lax.dynamic_slice_in_dim(
        jnp.pad(x, pad_widths(x, axis, (before, after))), length - shift, length, axis % x.ndim
    )
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis % x.ndim)
    return jnp.where(index < shift, part(0, length), part(length, 0))


def pad_widths(x: ArrayLike, axis: int, widths: tuple[int, int]) -> list[tuple[int, int]]:
    """Return pad widths that pad one axis."""
    return [widths if i == axis % x.ndim else (0, 0) for i in range(x.ndim)]
