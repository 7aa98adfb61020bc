"""Blockwise attention in plain JAX: online softmax over blocks of keys, fully masked blocks skipped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_kernels.flash_attention.blocks import block_range, block_segments, visible_blocks
from jaxrl_kernels.flash_attention.spec import (
    MASKED_LSE,
    AttentionSpec,
    DynamicMask,
    capped_scores,
    d_products,
    visible,
)

BLOCK = 256
"""Maximum tokens of a block of queries or keys. Larger ones skip less and do not fit a CPU's cache."""
MAX_SCORES = 2**20
"""Scores in memory at once, about 4 MiB of float32: sets how many rows of the batch are computed together."""


def forward(
    spec: AttentionSpec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_segments: Int[Array, "B Tk"],
    mask: DynamicMask,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B H Tq"]]:
    """Compute `reference.forward`."""
    out, lse = _in_batches(partial(_forward, spec, mask), k, q, k, v, q_segments, kv_segments)
    return out, jnp.moveaxis(lse[..., 0], 1, 2)


def backward(
    spec: AttentionSpec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_segments: Int[Array, "B Tk"],
    mask: DynamicMask,
    out: Float[Array, "B Tq H E"],
    lse: Float[Array, "B H Tq"],
    d_out: Float[Array, "B Tq H E"],
    d_lse: Float[Array, "B H Tq"] | None = None,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B Tk K E"], Float[Array, "B Tk K E"]]:
    """Compute `reference.backward`."""
    lse = jnp.moveaxis(lse, 1, 2)[..., None]
    delta = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1, keepdims=True)
    if d_lse is not None:
        delta -= jnp.moveaxis(d_lse, 1, 2)[..., None]
    return _in_batches(partial(_backward, spec, mask), k, q, k, v, q_segments, kv_segments, lse, d_out, delta)


def _in_batches(one: Callable, k: Array, q: Array, *inputs: Array):
    """Apply `one` to as many rows of the batch at once as MAX_SCORES allows, sequentially.

    Fewer rows at once also skip more: a block is skipped if none of them needs it.
    """
    batch, length, heads = q.shape[:3]
    row = heads * min(length, BLOCK) * min(k.shape[1], BLOCK)
    splits = next(
        n for n in range(1, batch + 1) if batch % n == 0 and (batch // n * row <= MAX_SCORES or n == batch)
    )
    if splits == 1:
        return one(q, *inputs)
    outs = jax.lax.map(lambda xs: one(*xs), [x.reshape(splits, -1, *x.shape[1:]) for x in (q, *inputs)])
    return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), outs)


def _forward(spec: AttentionSpec, mask: DynamicMask, q, k, v, q_segments, kv_segments):
    length, kv_heads = q.shape[1], k.shape[2]
    q_segments, kv_segments, limits = _key_ranges(spec, mask, q_segments, kv_segments)
    scores_of = partial(_scores, spec, mask, q.shape[2] // kv_heads)
    q, k, v = (_split(x, kv_heads) for x in (q, k, v))

    def one(block):
        i, (first, end), q, q_segments = block

        def add(j, carry):
            top, total, out = carry
            scores = jnp.where(*scores_of(i, j, q, k[j], q_segments, kv_segments[j]), -jnp.inf)
            new = jnp.maximum(top, scores.max(-1, keepdims=True))
            weights, kept = jnp.exp(scores - new), jnp.exp(top - new)
            more = _product("bkxc,bkce->bkxe", weights.astype(v.dtype), v[j])
            return new, kept * total + weights.sum(-1, keepdims=True), kept * out + more

        empty = jnp.zeros((*q.shape[:-1], 1))
        top, total, out = _loop(first, end, len(k), add, (empty + MASKED_LSE, empty, jnp.zeros(q.shape)))
        attends = total > 0
        total = jnp.where(attends, total, 1)
        return (out / total).astype(q.dtype), jnp.where(attends, top + jnp.log(total), MASKED_LSE)

    out, lse = jax.lax.map(one, (jnp.arange(len(q)), limits, q, q_segments))
    return _join(out, length), _join(lse, length)


def _backward(spec: AttentionSpec, mask: DynamicMask, q, k, v, q_segments, kv_segments, lse, d_out, delta):
    length, keys, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    q_segments, kv_segments, limits = _key_ranges(spec, mask, q_segments, kv_segments)
    scores_of = partial(_scores, spec, mask, q.shape[2] // kv_heads)
    q, k, v, lse, d_out, delta = (_split(x, kv_heads) for x in (q, k, v, lse, d_out, delta))

    def one(d_kv, block):
        i, (first, end), q, q_segments, lse, d_out, delta = block

        def add(j, carry):
            dq, dk, dv = carry
            allowed, scores = scores_of(i, j, q, k[j], q_segments, kv_segments[j])
            weights = jnp.where(allowed, jnp.exp(scores - lse), 0)
            d_weights = _product("bkxe,bkce->bkxc", d_out, v[j])
            d_scores = d_products(spec, scores, weights * (d_weights - delta)).astype(q.dtype)
            dq += _product("bkxc,bkce->bkxe", d_scores, k[j])
            dk = dk.at[j].add(_product("bkxc,bkxe->bkce", d_scores, q))
            dv = dv.at[j].add(_product("bkxc,bkxe->bkce", weights.astype(v.dtype), d_out))
            return dq, dk, dv

        dq, *d_kv = _loop(first, end, len(k), add, (jnp.zeros(q.shape), *d_kv))
        return tuple(d_kv), dq.astype(q.dtype)

    (dk, dv), dq = jax.lax.scan(
        one,
        (jnp.zeros(k.shape), jnp.zeros(k.shape)),
        (jnp.arange(len(q)), limits, q, q_segments, lse, d_out, delta),
    )
    return _join(dq, length), _join(dk.astype(k.dtype), keys), _join(dv.astype(v.dtype), keys)


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _loop(first: Int[Array, ""], end: Int[Array, ""], blocks: int, body: Callable, carry):
    """Run `body(j, carry)` for j from `first` to `end`; a row of one block needs no loop."""
    return body(0, carry) if blocks == 1 else jax.lax.fori_loop(first, end, body, carry)


def _key_ranges(
    spec: AttentionSpec, mask: DynamicMask, q_segments: Int[Array, "B Tq"], kv_segments: Int[Array, "B Tk"]
):
    """Return both segments by blocks [N B C], and the (first, end) block of keys of each block of queries."""
    q, kv = (_split(x[..., None, None], 1)[..., 0, :, 0] for x in (q_segments, kv_segments))
    of = [block_segments(jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1), x.shape[2]) for x in (q, kv)]
    needed = visible_blocks(spec, mask, *of, (q.shape[2], kv.shape[2])).any(0, keepdims=True)
    first, end = block_range(needed)
    return q, kv, (first[0], end[0])


def _split(x: Shaped[Array, "B T H E"], kv_heads: int) -> Shaped[Array, "N B K X E"]:
    """Return N blocks of equal length; X = tokens of a block times the query heads of a key head, for plain
    batched matrix products."""
    batch, length, heads, dim = x.shape
    blocks = -(-length // BLOCK)
    x = jnp.pad(x, ((0, 0), (0, -length % blocks), (0, 0), (0, 0)))
    x = x.reshape(batch, blocks, -1, kv_heads, heads // kv_heads, dim)
    x = x.transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(*x.shape[:3], -1, dim)


def _join(x: Shaped[Array, "N B K X E"], length: int) -> Shaped[Array, "B T H E"]:
    """Invert `_split`."""
    blocks, batch, kv_heads, _, dim = x.shape
    x = x.reshape(blocks, batch, kv_heads, -(-length // blocks), -1, dim).transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(batch, -1, kv_heads * x.shape[4], dim)[:, :length]


def _scores(spec: AttentionSpec, mask: DynamicMask, group: int, i, j, q, k, q_segments, kv_segments):
    """Return (visible, scores) [B K X C] of block i of queries and j of keys, float32."""
    scores = capped_scores(spec, _product("bkxe,bkce->bkxc", q, k))
    length, keys = q_segments.shape[1], kv_segments.shape[1]
    rows, columns = i * length + jnp.arange(length)[:, None], j * keys + jnp.arange(keys)
    allowed = visible(spec, mask, rows, columns, q_segments[:, :, None], kv_segments[:, None])
    return jnp.repeat(allowed, group, axis=1)[:, None], scores
