"""Blockwise attention in plain JAX: online softmax over blocks of keys, fully masked blocks skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_kernels.chunks import map_rows
from jaxrl_kernels.dispatch import device
from jaxrl_kernels.flash_attention.blocks import key_blocks, query_blocks, visible_blocks
from jaxrl_kernels.flash_attention.spec import (
    MASKED_LSE,
    AttentionSpec,
    DynamicMask,
    capped_scores,
    d_products,
    visible,
)

BLOCK = 256
"""Maximum tokens of a block of queries or keys on accelerators, where many small blocks cost launch
overhead."""
CPU_BLOCKS = 64, 320
"""Maximum tokens of a block on a CPU: small blocks skip more; XLA splits products of large ones over the
cores."""
CPU_ROW, CPU_ROW_DIM = 192, 64
"""Maximum tokens of a row that is one block on a CPU, and the minimum dims of a head for it: smaller blocks
skip little of a short row, and their backward pass takes 1.3 to 1.5 times as long."""
MIN_LARGE = 512
"""Minimum tokens of a row for the larger CPU blocks."""
LARGE_SCORES = 1.4
"""Use the larger blocks if they compute at most this many times the scores: each score takes 0.6 to 0.7 of
the time."""
ALIGNMENT = 8
"""Divides the tokens of a block, which the vector units of a CPU process 8 or 16 at a time."""
MAX_SCORES, MAX_ROW_SCORES = 2**18, 2**20
"""Scores in memory at once, 1 MiB of float32, and 4 MiB if a row is one block, which skips nothing. They set
how many rows of the batch are computed together."""


def forward(
    spec: AttentionSpec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_last: Int[Array, "B Tk"],
    mask: DynamicMask,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B H Tq"]]:
    """Compute `reference.forward`."""
    out, lse = _in_batches(
        partial(_forward, spec), mask, q, k, v, mask.windows(q_segments), q_segments, kv_last
    )
    return out, jnp.moveaxis(lse[..., 0], 1, 2)


def backward(
    spec: AttentionSpec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_last: Int[Array, "B Tk"],
    mask: DynamicMask,
    out: Float[Array, "B Tq H E"],
    lse: Float[Array, "B H Tq"],
    d_out: Float[Array, "B Tq H E"],
    d_lse: Float[Array, "B H Tq"] | None = None,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B Tk K E"], Float[Array, "B Tk K E"]]:
    """Compute `reference.backward`."""
    # Statistics of each query as columns; a gradient of lse joins delta.
    lse = jnp.moveaxis(lse, 1, 2)[..., None]
    delta = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1, keepdims=True)
    if d_lse is not None:
        delta -= jnp.moveaxis(d_lse, 1, 2)[..., None]
    return _in_batches(
        partial(_backward, spec),
        mask,
        q,
        k,
        v,
        mask.windows(q_segments),
        q_segments,
        kv_last,
        lse,
        d_out,
        delta,
    )


def _in_batches(one: Callable, mask: DynamicMask, q: Array, k: Array, v: Array, *inputs: Array):
    """Apply `one(mask, block, q, k, v, *inputs)` to as many rows of the batch at once as MAX_SCORES, or
    MAX_ROW_SCORES, allows, sequentially, with the blocks that suit lengths and mask.

    Fewer rows at once also skip more: a block is skipped only if none of the rows needs it.
    """
    lengths = q.shape[1], k.shape[1]

    def in_blocks(block, max_scores=MAX_SCORES):
        scores_of_row = q.shape[2] * min(lengths[0], block) * min(lengths[1], block)
        return partial(map_rows, partial(one, mask, block), max_scores // scores_of_row)

    if device()[0] != "cpu":
        return in_blocks(BLOCK)(q, k, v, *inputs)
    if max(lengths) <= CPU_ROW and q.shape[3] >= CPU_ROW_DIM:
        return in_blocks(CPU_ROW, MAX_ROW_SCORES)(q, k, v, *inputs)
    small, large = map(in_blocks, CPU_BLOCKS)
    if min(lengths) < MIN_LARGE:
        return small(q, k, v, *inputs)
    return jax.lax.cond(_is_dense(mask, *inputs[:3]), large, small, q, k, v, *inputs)


def _is_dense(
    mask: DynamicMask, windows: Int[Array, "B Tq"], segments: Int[Array, "B Tq"], kv_last: Int[Array, "B Tk"]
) -> Bool[Array, ""]:
    """Return whether the larger blocks of CPU_BLOCKS are faster: short sequences fill few of their scores."""

    def num_scores(block):
        needed = _needed_blocks(mask, windows, segments, kv_last, block)
        lengths = (_block_length(x.shape[1], block) for x in (segments, kv_last))
        return needed.sum().astype(jnp.float32) * math.prod(lengths)

    small, large = map(num_scores, CPU_BLOCKS)
    return large <= LARGE_SCORES * small


def _forward(spec: AttentionSpec, mask: DynamicMask, block: int, q, k, v, windows, q_segments, kv_last):
    length, kv_heads = q.shape[1], k.shape[2]
    queries, kv_last, needed = _needed_keys(mask, windows, q_segments, kv_last, block)
    scores_of = partial(_scores, spec, mask, q.shape[2] // kv_heads)
    q, k, v = (_split(x, kv_heads, block) for x in (q, k, v))

    def one(inputs):
        i, needed, q, queries = inputs

        def add(j, carry):
            top, total, out = carry
            scores = jnp.where(*scores_of(i, j, q, k[j], queries, kv_last[j]), -jnp.inf)
            new = jnp.maximum(top, scores.max(-1, keepdims=True))
            weights, kept = jnp.exp(scores - new), jnp.exp(top - new)
            more = _product("bkxc,bkce->bkxe", weights.astype(v.dtype), v[j])
            return new, kept * total + weights.sum(-1, keepdims=True), kept * out + more

        empty = jnp.zeros((*q.shape[:-1], 1))
        top, total, out = _loop(needed, len(k), add, (empty + MASKED_LSE, empty, jnp.zeros(q.shape)))
        attends = total > 0
        total = jnp.where(attends, total, 1)
        return (out / total).astype(q.dtype), jnp.where(attends, top + jnp.log(total), MASKED_LSE)

    out, lse = jax.lax.map(one, (jnp.arange(len(q)), needed, q, queries))
    return _join(out, length, block), _join(lse, length, block)


def _backward(spec, mask: DynamicMask, block: int, q, k, v, windows, q_segments, kv_last, lse, d_out, delta):
    length, keys, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    queries, kv_last, needed = _needed_keys(mask, windows, q_segments, kv_last, block)
    scores_of = partial(_scores, spec, mask, q.shape[2] // kv_heads)
    q, k, v, lse, d_out, delta = (_split(x, kv_heads, block) for x in (q, k, v, lse, d_out, delta))

    def one(d_kv, inputs):
        i, needed, q, queries, lse, d_out, delta = inputs

        def add(j, carry):
            dq, dk, dv = carry
            allowed, scores = scores_of(i, j, q, k[j], queries, kv_last[j])
            weights = jnp.where(allowed, jnp.exp(scores - lse), 0)
            d_weights = _product("bkxe,bkce->bkxc", d_out, v[j])
            d_scores = d_products(spec, scores, weights * (d_weights - delta)).astype(q.dtype)
            dq += _product("bkxc,bkce->bkxe", d_scores, k[j])
            dk = dk.at[j].add(_product("bkxe,bkxc->bkec", q, d_scores))
            dv = dv.at[j].add(_product("bkxe,bkxc->bkec", d_out, weights.astype(v.dtype)))
            return dq, dk, dv

        dq, *d_kv = _loop(needed, len(k), add, (jnp.zeros(q.shape), *d_kv))
        return tuple(d_kv), dq.astype(q.dtype)

    # [.. E C]: XLA's CPU backend takes 1.4 times as long for the product with the scores transposed.
    zeros = jnp.zeros((*k.shape[:-2], k.shape[-1], k.shape[-2]))
    d_kv, dq = jax.lax.scan(one, (zeros, zeros), (jnp.arange(len(q)), needed, q, queries, lse, d_out, delta))
    dk, dv = (_join(x.swapaxes(-1, -2).astype(k.dtype), keys, block) for x in d_kv)
    return _join(dq, length, block), dk, dv


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _loop(needed: tuple[Int[Array, "N"], Int[Array, ""]], blocks: int, body: Callable, carry):
    """Run `body(j, carry)` for each needed block j of `blocks` (see `_needed_keys`); one block needs no
    loop."""
    order, count = needed
    step = lambda n, carry: body(order[n], carry)
    return body(0, carry) if blocks == 1 else jax.lax.fori_loop(0, count, step, carry)


def _needed_keys(mask: DynamicMask, windows, segments, kv_last, block: int):
    """Return (windows, segments) and kv_last in blocks [N B C], and for each block of queries the blocks of
    keys with the needed ones first, in order [Nq Nk], and the number of needed blocks [Nq]."""
    split = lambda x: _split(x[..., None, None], 1, block)[..., 0, :, 0]
    needed = _needed_blocks(mask, windows, segments, kv_last, block).any(0)
    order = jnp.argsort(~needed, axis=1, stable=True), needed.sum(axis=1)
    return (split(windows), split(segments)), split(kv_last), order


def _needed_blocks(
    mask: DynamicMask,
    windows: Int[Array, "B Tq"],
    segments: Int[Array, "B Tq"],
    kv_last: Int[Array, "B Tk"],
    block: int,
) -> Bool[Array, "B Nq Nk"]:
    """Return whether each block of queries of a row needs each block of keys."""
    of_queries, of_keys = lengths = tuple(_block_length(x.shape[1], block) for x in (segments, kv_last))
    pad = lambda x, length: jnp.pad(x, ((0, 0), (0, -x.shape[1] % length)))
    queries = query_blocks(mask, pad(segments, of_queries), pad(windows, of_queries), of_queries)
    return visible_blocks(mask, queries, key_blocks(pad(kv_last, of_keys), of_keys), lengths)[0]


def _split(x: Shaped[Array, "B T H E"], kv_heads: int, block: int) -> Shaped[Array, "N B K X E"]:
    """Return N blocks of equal length, at most `block`; X = tokens of a block times the query heads of a key
    head, for plain batched matrix products."""
    batch, length, heads, dim = x.shape
    block = _block_length(length, block)
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    x = x.reshape(batch, -1, block, kv_heads, heads // kv_heads, dim)
    x = x.transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(*x.shape[:3], -1, dim)


def _block_length(length: int, block: int) -> int:
    """Return the block length that cuts `length` tokens into equal blocks of at most `block`."""
    blocks = -(-length // block)
    return -(-length // (blocks * ALIGNMENT)) * ALIGNMENT


def _join(x: Shaped[Array, "N B K X E"], length: int, block: int) -> Shaped[Array, "B T H E"]:
    """Invert `_split`."""
    blocks, batch, kv_heads, _, dim = x.shape
    x = x.reshape(blocks, batch, kv_heads, _block_length(length, block), -1, dim)
    x = x.transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(batch, -1, kv_heads * x.shape[4], dim)[:, :length]


def _scores(spec: AttentionSpec, mask: DynamicMask, group: int, i, j, q, k, queries, kv_last):
    """Return (visible, scores) [B K X C] of block i of queries and j of keys, float32."""
    scores = capped_scores(spec, _product("bkxe,bkce->bkxc", q, k))
    windows, segments = (x[:, :, None] for x in queries)
    length, keys = segments.shape[1], kv_last.shape[1]
    rows, columns = i * length + jnp.arange(length)[:, None], j * keys + jnp.arange(keys)
    allowed = visible(mask, rows, columns, windows, segments, kv_last[:, None])
    return jnp.repeat(allowed, group, axis=1)[:, None], scores
