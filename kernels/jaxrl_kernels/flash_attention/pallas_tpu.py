"""Attention for TPU: Pallas kernels forward (out, lse) and backward (dq; dk and dv).

A program reads one block of queries and one of keys. Blocks that order, window or segments make useless cost
no arithmetic, and no copy either: their index is that of the block which is there already. Blocks that are
seen whole skip the mask. Statistics are columns of 128 equal lanes; the backward pass of keys works on
transposed scores, so that statistics are rows and no product needs a transpose. All sums have one order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_kernels import target
from jaxrl_kernels.flash_attention.blocks import bounds, needed, segments_of
from jaxrl_kernels.flash_attention.shapes import LANES, VMEM, Blocks, blocks_for, padded_head_dim, unsupported
from jaxrl_kernels.flash_attention.spec import NOTHING, Place, Spec, cap, uncap, visible

__all__ = ["backward", "forward", "unsupported"]
INTERPRET = False
"""Tests set it: True or a `pltpu.InterpretParams` runs the kernels on any machine, slowly."""
FIRST, END, LOW, HIGH, ONLY, FIELDS = range(6)
"""What is known of a block before its program runs: it needs the blocks FIRST to END of the other side, and
its segments (`blocks.Segments`)."""


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
    laid = _lay_out("forward", spec, q, k, v, q_segments, kv_segments, place)
    (batch, heads, length, dim), block = laid.q.shape, laid.blocks.q
    of_q, of_kv = laid.specs_by_query()
    out, lse = _call(
        partial(_forward_kernel, spec, laid.blocks),
        (batch, heads, *laid.counts),
        ins=(of_q.tokens, of_kv.tokens, of_kv.tokens, of_q.segments, of_kv.segments),
        outs=(of_q.tokens, of_q.numbers),
        out_shape=(
            jax.ShapeDtypeStruct(laid.q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
        ),
        scratch=[_scratch(block, dim), *[_scratch(block, LANES)] * 2, _scratch(block, LANES, jnp.int32)],
    )(*laid.scalars, laid.q, laid.k, laid.v, *laid.segments)
    return _tokens(out, q), lse[:, :, 0, : q.shape[1]]


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
    delta = jnp.moveaxis(jnp.sum(d_out.astype(jnp.float32) * out, axis=-1), 1, 2)
    delta = delta if d_lse is None else delta - d_lse
    known = spec, q, k, v, q_segments, kv_segments, place
    gradients = d_out.astype(q.dtype), lse, delta
    dq = _d_queries(spec, _lay_out("dq", *known), *gradients)
    dk, dv = _d_keys(spec, _lay_out("dkv", *known), *gradients)
    return _tokens(dq, q), _tokens(dk, k), _tokens(dv, v)


def _d_queries(spec: Spec, laid: _Laid, d_out, lse, delta):
    (batch, heads, _, dim), block = laid.q.shape, laid.blocks.q
    of_q, of_kv = laid.specs_by_query()
    return _call(
        partial(_dq_kernel, spec, laid.blocks),
        (batch, heads, *laid.counts),
        ins=_backward_specs(of_q, of_kv),
        outs=of_q.tokens,
        out_shape=jax.ShapeDtypeStruct(laid.q.shape, laid.q.dtype),
        scratch=[_scratch(block, dim), *[_scratch(block, LANES)] * 2, _scratch(block, LANES, jnp.int32)],
    )(*_backward_inputs(laid, d_out, lse, delta))


def _d_keys(spec: Spec, laid: _Laid, d_out, lse, delta):
    (batch, kv_heads, _, dim), block = laid.k.shape, laid.blocks.kv
    of_q, of_kv = laid.specs_by_key()
    return _call(
        partial(_dkv_kernel, spec, laid.blocks),
        (batch, kv_heads, laid.counts[1], laid.q.shape[1] // kv_heads, laid.counts[0]),
        ins=_backward_specs(of_q, of_kv),
        outs=(of_kv.tokens, of_kv.tokens),
        out_shape=(jax.ShapeDtypeStruct(laid.k.shape, laid.k.dtype),) * 2,
        scratch=[*[_scratch(block, dim)] * 2, _scratch(block, LANES, jnp.int32)],
    )(*_backward_inputs(laid, d_out, lse, delta))


def _backward_specs(of_q: _Specs, of_kv: _Specs) -> tuple[pl.BlockSpec, ...]:
    """Of q, k, v, d_out, lse, delta and the segments, in the order of `_backward_inputs`."""
    tokens = of_q.tokens, of_kv.tokens, of_kv.tokens, of_q.tokens
    return *tokens, of_q.numbers, of_q.numbers, of_q.segments, of_kv.segments


def _backward_inputs(laid: _Laid, d_out, lse, delta) -> tuple[Array, ...]:
    block = laid.blocks.q
    numbers = _numbers(lse, block), _numbers(delta, block)
    return *laid.scalars, laid.q, laid.k, laid.v, _block_rows(d_out, block), *numbers, *laid.segments


def _forward_kernel(spec, blocks, *refs):
    *scalars, q, k, v, q_segments, kv_segments, out, lse, summed, top, total, segments = refs
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def start():
        top[...] = jnp.full_like(top, NOTHING)
        total[...] = jnp.zeros_like(total)
        summed[...] = jnp.zeros_like(summed)
        segments[...] = _column(q_segments[...])

    def add(seen):
        scores = cap(spec, _dot(q[...], k[...], (1, 1)))
        if seen is not None:
            scores = jnp.where(seen(segments[:, :1], kv_segments[...]), scores, -jnp.inf)
        new = jnp.maximum(top[...], scores.max(axis=1, keepdims=True))
        weights, kept = jnp.exp(scores - new[:, :1]), jnp.exp(top[...] - new)
        top[...] = new
        total[...] = kept * total[...] + weights.sum(axis=1, keepdims=True)
        summed[...] = kept[:, :1] * summed[...] + _dot(weights.astype(v.dtype), v[...], (1, 0))

    _where_seen(spec, blocks, scalars, i, j, add)

    @pl.when(j == pl.num_programs(3) - 1)
    def finish():
        sees = total[...] > 0
        divisor = jnp.where(sees, total[...], 1)
        out[...] = (summed[...] / divisor[:, :1]).astype(out.dtype)
        lse[...] = _row(jnp.where(sees, top[...] + jnp.log(divisor), NOTHING))


def _dq_kernel(spec, blocks, *refs):
    (
        *scalars,
        q,
        k,
        v,
        d_out,
        lse_row,
        delta_row,
        q_segments,
        kv_segments,
        dq,
        summed,
        lse,
        delta,
        segments,
    ) = refs
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def start():
        summed[...] = jnp.zeros_like(summed)
        lse[...], delta[...] = _column(lse_row[...]), _column(delta_row[...])
        segments[...] = _column(q_segments[...])

    def add(seen):
        scores = cap(spec, _dot(q[...], k[...], (1, 1)))
        weights = jnp.exp(scores - lse[:, :1])
        if seen is not None:
            weights = jnp.where(seen(segments[:, :1], kv_segments[...]), weights, 0)
        d_weights = _dot(d_out[...], v[...], (1, 1))
        d_scores = uncap(spec, scores, weights * (d_weights - delta[:, :1]))
        summed[...] += _dot(d_scores.astype(k.dtype), k[...], (1, 0))

    _where_seen(spec, blocks, scalars, i, j, add)

    @pl.when(j == pl.num_programs(3) - 1)
    def finish():
        dq[...] = summed[...].astype(dq.dtype)


def _dkv_kernel(spec, blocks, *refs):
    *scalars, q, k, v, d_out, lse, delta, q_segments, kv_segments, dk, dv, dk_sum, dv_sum, segments = refs
    j, head, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((head == 0) & (i == 0))
    def start():
        dk_sum[...], dv_sum[...] = jnp.zeros_like(dk_sum), jnp.zeros_like(dv_sum)
        segments[...] = _column(kv_segments[...])

    def add(seen):  # scores transposed: keys x queries
        scores = cap(spec, _dot(k[...], q[...], (1, 1)))
        weights = jnp.exp(scores - lse[...])
        if seen is not None:
            weights = jnp.where(seen(q_segments[...], segments[:, :1], keys_first=True), weights, 0)
        d_weights = _dot(v[...], d_out[...], (1, 1))
        d_scores = uncap(spec, scores, weights * (d_weights - delta[...]))
        dv_sum[...] += _dot(weights.astype(v.dtype), d_out[...], (1, 0))
        dk_sum[...] += _dot(d_scores.astype(q.dtype), q[...], (1, 0))

    _where_seen(spec, blocks, scalars, i, j, add, by_key=True)

    @pl.when((head == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def finish():
        dk[...], dv[...] = dk_sum[...].astype(dk.dtype), dv_sum[...].astype(dv.dtype)


def _where_seen(spec: Spec, blocks: Blocks, scalars, i, j, add, *, by_key: bool = False) -> None:
    """`add(seen)` if block i of queries sees anything of block j of keys.

    `seen(q_segments, kv_segments)` is the mask, None where all of it is seen.
    """
    place, q_info, kv_info = scalars
    batch = pl.program_id(0)
    q_count, kv_count = (pl.num_programs(n) for n in ((4, 2) if by_key else (2, 3)))
    q = lambda field: q_info[(batch * q_count + i) * FIELDS + field]
    kv = lambda field: kv_info[(batch * kv_count + j) * FIELDS + field]
    place = Place(place[0], place[1], place[2])
    first, kv_first = place.q_start + i * blocks.q, place.kv_start + j * blocks.kv

    needed = (q(FIRST) <= j) & (j < q(END)) & (q(LOW) <= kv(HIGH)) & (kv(LOW) <= q(HIGH))
    whole = (q(ONLY) == kv(ONLY)) & (q(ONLY) > 0) & (first + blocks.q - 1 - kv_first < place.window)
    if spec.causal:
        whole &= first >= kv_first + blocks.kv - 1

    def seen(q_segments, kv_segments, keys_first: bool = False):
        shape = (blocks.kv, blocks.q) if keys_first else (blocks.q, blocks.kv)
        rows = i * blocks.q + jax.lax.broadcasted_iota(jnp.int32, shape, int(keys_first))
        columns = j * blocks.kv + jax.lax.broadcasted_iota(jnp.int32, shape, int(not keys_first))
        return visible(spec, place, rows, columns, q_segments, kv_segments)

    pl.when(needed & whole)(lambda: add(None))
    pl.when(needed & jnp.logical_not(whole))(lambda: add(seen))


def _dot(x: Float[Array, "..."], y: Float[Array, "..."], contracted: tuple[int, int]) -> Float[Array, "..."]:
    """Product summed over these dims, float32; of float32 without rounding its inputs to bfloat16."""
    dims = ((contracted[:1], contracted[1:]), ((), ()))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _column(row: Shaped[Array, "1 N"]) -> Shaped[Array, "N 128"]:
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _row(column: Shaped[Array, "N 128"]) -> Shaped[Array, "1 N"]:
    return column.T[:1]


class _Specs(NamedTuple):
    """How one side's arrays are cut: tokens [B H T E], numbers [B H 1 T], segments [B 1 T]."""

    tokens: pl.BlockSpec
    numbers: pl.BlockSpec
    segments: pl.BlockSpec


def _specs(at: Callable, block: int, dim: int) -> _Specs:
    """`at(*grid, *scalars)` -> (row of the batch, head, block) that a program reads."""

    def tokens(*args):
        batch, head, i = at(*args)
        return batch, head, i, 0

    def numbers(*args):
        batch, head, i = at(*args)
        return batch, head, 0, i

    def segments(*args):
        batch, _, i = at(*args)
        return batch, 0, i

    return _Specs(
        pl.BlockSpec((None, None, block, dim), tokens),
        pl.BlockSpec((None, None, 1, block), numbers),
        pl.BlockSpec((None, 1, block), segments),
    )


def _near(i, info, other):
    """The block to read at step i: itself, or the nearest that the other side's block needs."""
    first, end = info[other * FIELDS + FIRST], info[other * FIELDS + END]
    return jnp.clip(i, first, jnp.maximum(end - 1, first))


class _Laid(NamedTuple):
    """What the kernels read: tokens [B H T E] and segments [B 1 T] of whole blocks."""

    blocks: Blocks
    counts: tuple[int, int]  # of blocks of queries, of keys
    scalars: tuple[Array, Array, Array]  # the place; what is known of each block of queries, of keys
    q: Array
    k: Array
    v: Array
    segments: tuple[Array, Array]

    def specs_by_query(self) -> tuple[_Specs, _Specs]:
        """Of queries and keys, on the grid (row, head, block of queries, block of keys)."""
        group, count = self.q.shape[1] // self.k.shape[1], self.counts[0]
        q = lambda b, h, i, j, *_: (b, h, i)
        kv = lambda b, h, i, j, place, q_info, _: (b, jax.lax.div(h, group), _near(j, q_info, b * count + i))
        return _specs(q, self.blocks.q, self.q.shape[3]), _specs(kv, self.blocks.kv, self.q.shape[3])

    def specs_by_key(self) -> tuple[_Specs, _Specs]:
        """The same on the grid (row, key head, block of keys, query head of it, block of queries)."""
        group, count = self.q.shape[1] // self.k.shape[1], self.counts[1]
        q = lambda b, h, j, g, i, place, _, kv_info: (b, h * group + g, _near(i, kv_info, b * count + j))
        kv = lambda b, h, j, g, i, *_: (b, h, j)
        return _specs(q, self.blocks.q, self.q.shape[3]), _specs(kv, self.blocks.kv, self.q.shape[3])


def _lay_out(kernel: str, spec: Spec, q, k, v, q_segments, kv_segments, place: Place) -> _Laid:
    blocks = blocks_for(kernel, q.shape[1], k.shape[1], q.shape[3], q.dtype)
    pad = lambda x, block: jnp.pad(x.astype(jnp.int32), ((0, 0), (0, -x.shape[1] % block)))
    padded = pad(q_segments, blocks.q), pad(kv_segments, blocks.kv)
    of_q, of_kv = (segments_of(x, block) for x, block in zip(padded, blocks, strict=True))
    need = needed(spec, place, of_q, of_kv, blocks)
    info = lambda need, of: jnp.stack([*bounds(need), *of], axis=-1).reshape(-1)
    return _Laid(
        blocks,
        need.shape[1:],
        (place.array(), info(need, of_q), info(need.swapaxes(1, 2), of_kv)),
        _block_rows(q, blocks.q),
        _block_rows(k, blocks.kv),
        _block_rows(v, blocks.kv),
        tuple(x[:, None] for x in padded),
    )


def _block_rows(x: Float[Array, "B T H E"], block: int) -> Float[Array, "B H T2 E2"]:
    """With the length filled up to whole blocks and the head dim to one that the kernels hold."""
    more = -x.shape[1] % block, padded_head_dim(x.shape[3]) - x.shape[3]
    return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, more[0]), (0, 0), (0, more[1]))), 1, 2)


def _tokens(x: Float[Array, "B H T2 E2"], like: Float[Array, "B T H E"]) -> Float[Array, "B T H E"]:
    """The tokens of `like`, of what lies as `_block_rows`."""
    return jnp.moveaxis(x, 1, 2)[:, : like.shape[1], :, : like.shape[3]]


def _numbers(x: Float[Array, "B H T"], block: int) -> Float[Array, "B H 1 T2"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block)))[:, :, None]


def _scratch(tokens: int, dim: int, dtype=jnp.float32):
    return pltpu.VMEM((tokens, dim), dtype)


def _call(kernel: Callable, grid: tuple[int, ...], *, ins, outs, out_shape, scratch):
    """The kernel, its three scalar arrays known before it runs. Dims of the grid that sum are the last."""
    summed = len(grid) - 3
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3, grid=grid, in_specs=ins, out_specs=outs, scratch_shapes=scratch
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",) * summed,
            vmem_limit_bytes=VMEM[target.generation()],
        ),
        interpret=INTERPRET,
    )
