"""Attention by blocks in plain JAX: no scores of a whole row in memory, no work that nobody sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_kernels.flash_attention.blocks import bounds, needed, segments_of
from jaxrl_kernels.flash_attention.spec import NOTHING, Place, Spec, cap, uncap, visible

BLOCK = 256
"""Tokens of a block at most, of queries and of keys. Larger ones skip less and leave a CPU's cache."""
SCORES = 2**20
"""Scores of a block at once, about: as many rows of the batch are taken together. 4 MiB of float32."""


def forward(
    spec: Spec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_segments: Int[Array, "B Tk"],
    place: Place,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B H Tq"]]:
    """(out, lse): see `reference.forward`."""
    out, lse = _by_rows(partial(_forward, spec, place), k, q, k, v, q_segments, kv_segments)
    return out, jnp.moveaxis(lse[..., 0], 1, 2)


def backward(
    spec: Spec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_segments: Int[Array, "B Tk"],
    place: Place,
    out: Float[Array, "B Tq H E"],
    lse: Float[Array, "B H Tq"],
    d_out: Float[Array, "B Tq H E"],
    d_lse: Float[Array, "B H Tq"] | None = None,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B Tk K E"], Float[Array, "B Tk K E"]]:
    """(dq, dk, dv): see `reference.backward`."""
    lse = jnp.moveaxis(lse, 1, 2)[..., None]
    delta = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1, keepdims=True)
    if d_lse is not None:
        delta -= jnp.moveaxis(d_lse, 1, 2)[..., None]
    return _by_rows(partial(_backward, spec, place), k, q, k, v, q_segments, kv_segments, lse, d_out, delta)


def _by_rows(one: Callable, k: Array, q: Array, *inputs: Array):
    """`one` of as many rows of the batch at once as SCORES allows, one lot after the other.

    Fewer rows at once also skip more: a block is left out that none of them needs.
    """
    batch, length, heads = q.shape[:3]
    row = heads * min(length, BLOCK) * min(k.shape[1], BLOCK)
    lots = next(
        n for n in range(1, batch + 1) if batch % n == 0 and (batch // n * row <= SCORES or n == batch)
    )
    if lots == 1:
        return one(q, *inputs)
    outs = jax.lax.map(lambda xs: one(*xs), [x.reshape(lots, -1, *x.shape[1:]) for x in (q, *inputs)])
    return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), outs)


def _forward(spec: Spec, place: Place, q, k, v, q_segments, kv_segments):
    length, kv_heads = q.shape[1], k.shape[2]
    q_segments, kv_segments, limits = _limits(spec, place, q_segments, kv_segments)
    scores_of = partial(_scores, spec, place, q.shape[2] // kv_heads)
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
        top, total, out = _loop(first, end, len(k), add, (empty + NOTHING, empty, jnp.zeros(q.shape)))
        sees = total > 0
        total = jnp.where(sees, total, 1)
        return (out / total).astype(q.dtype), jnp.where(sees, top + jnp.log(total), NOTHING)

    out, lse = jax.lax.map(one, (jnp.arange(len(q)), limits, q, q_segments))
    return _join(out, length), _join(lse, length)


def _backward(spec: Spec, place: Place, q, k, v, q_segments, kv_segments, lse, d_out, delta):
    length, keys, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    q_segments, kv_segments, limits = _limits(spec, place, q_segments, kv_segments)
    scores_of = partial(_scores, spec, place, q.shape[2] // kv_heads)
    q, k, v, lse, d_out, delta = (_split(x, kv_heads) for x in (q, k, v, lse, d_out, delta))

    def one(d_kv, block):
        i, (first, end), q, q_segments, lse, d_out, delta = block

        def add(j, carry):
            dq, dk, dv = carry
            seen, scores = scores_of(i, j, q, k[j], q_segments, kv_segments[j])
            weights = jnp.where(seen, jnp.exp(scores - lse), 0)
            d_weights = _product("bkxe,bkce->bkxc", d_out, v[j])
            d_scores = uncap(spec, scores, weights * (d_weights - delta)).astype(q.dtype)
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
    """`body(j, carry)` for j from `first` to `end`. A row of one block needs no loop."""
    return body(0, carry) if blocks == 1 else jax.lax.fori_loop(first, end, body, carry)


def _limits(spec: Spec, place: Place, q_segments: Int[Array, "B Tq"], kv_segments: Int[Array, "B Tk"]):
    """Both segments by blocks [N B C]; the (first, end) block of keys that each block of queries needs."""
    q, kv = (_split(x[..., None, None], 1)[..., 0, :, 0] for x in (q_segments, kv_segments))
    of = [segments_of(jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1), x.shape[2]) for x in (q, kv)]
    need = needed(spec, place, *of, (q.shape[2], kv.shape[2])).any(0, keepdims=True)
    first, end = bounds(need)
    return q, kv, (first[0], end[0])


def _split(x: Shaped[Array, "B T H E"], kv_heads: int) -> Shaped[Array, "N B K X E"]:
    """N blocks of equal length; X = tokens of a block times heads that share keys, so that plain batched
    matrix products take them."""
    batch, length, heads, dim = x.shape
    blocks = -(-length // BLOCK)
    x = jnp.pad(x, ((0, 0), (0, -length % blocks), (0, 0), (0, 0)))
    x = x.reshape(batch, blocks, -1, kv_heads, heads // kv_heads, dim)
    x = x.transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(*x.shape[:3], -1, dim)


def _join(x: Shaped[Array, "N B K X E"], length: int) -> Shaped[Array, "B T H E"]:
    """What was `_split`."""
    blocks, batch, kv_heads, _, dim = x.shape
    x = x.reshape(blocks, batch, kv_heads, -(-length // blocks), -1, dim).transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(batch, -1, kv_heads * x.shape[4], dim)[:, :length]


def _scores(spec: Spec, place: Place, group: int, i, j, q, k, q_segments, kv_segments):
    """(seen, scores) [B K X C] of block i of queries and j of keys, float32."""
    scores = cap(spec, _product("bkxe,bkce->bkxc", q, k))
    length, keys = q_segments.shape[1], kv_segments.shape[1]
    rows, columns = i * length + jnp.arange(length)[:, None], j * keys + jnp.arange(keys)
    seen = visible(spec, place, rows, columns, q_segments[:, :, None], kv_segments[:, None])
    return jnp.repeat(seen, group, axis=1)[:, None], scores
