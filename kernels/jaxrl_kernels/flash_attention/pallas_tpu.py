"""Attention for TPU: Pallas kernels forward (out, lse) and backward (dq; dk and dv).

A program reads one block of queries and one of keys. A block that order, window or segments mask entirely
costs neither arithmetic nor a copy: its index map repeats the block that is in VMEM already. Blocks without a
masked pair skip the mask. Statistics are columns of 128 equal lanes; the backward pass of keys works on
transposed scores, so that statistics are rows and no product needs a transpose. All sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import LANES
from jaxrl_kernels.flash_attention.blocks import (
    KeyBlocks,
    QueryBlocks,
    block_range,
    compare_blocks,
    key_blocks,
    nearest_blocks,
    query_blocks,
    visible_blocks,
)
from jaxrl_kernels.flash_attention.shapes import (
    DTYPES,
    HEAD_DIMS,
    Blocks,
    blocks_for,
    padded_head_dim,
    vmem_limit,
)
from jaxrl_kernels.flash_attention.spec import (
    MASKED_LSE,
    AttentionSpec,
    DynamicMask,
    capped_scores,
    d_products,
    visible,
)

INTERPRET = False
"""Set by tests: True or a `pltpu.InterpretParams` runs the kernels in the interpreter."""
MAX_READS = 2**16
"""Largest table of the blocks to copy, in numbers of scalar memory (1 MiB); with more, and without branches,
the range of needed blocks is copied."""


def unsupported(head_dim: int, dtype: DTypeLike, softcap: float | None = None) -> str | None:
    """Return why the kernels do not take q, k and v of such a head dim and type, or None."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"dtype {name}: the TPU kernels of attention take {' and '.join(DTYPES)}"
    if head_dim > HEAD_DIMS[-1]:
        return (
            f"head_dim {head_dim}: the TPU kernels of attention hold up to {HEAD_DIMS[-1]} (as {HEAD_DIMS})"
        )
    return None


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
    inputs = _pad_inputs("forward", spec, q, k, v, q_segments, kv_last, mask)
    # The last grid dim loops over blocks of keys; scratch keeps the sums between its steps.
    (batch, heads, length, dim), block = inputs.q.shape, inputs.blocks.q
    of_q, of_kv = inputs.specs_by_query()
    out, lse = _call(
        partial(_forward_kernel, spec, inputs.blocks),
        (batch, heads, *inputs.counts),
        ins=(of_q.tokens, of_kv.tokens, of_kv.tokens, *inputs.mask_specs(of_q, of_kv)),
        outs=(of_q.tokens, of_q.numbers),
        out_shape=(
            jax.ShapeDtypeStruct(inputs.q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
        ),
        scratch=[
            _scratch(block, dim),
            *[_scratch(block, LANES)] * 2,
            *[_scratch(block, LANES, jnp.int32)] * 2,
        ],
    )(*inputs.scalars, inputs.q, inputs.k, inputs.v, *inputs.mask)
    return _tokens(out, q), lse[:, :, 0, : q.shape[1]]


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
    delta = jnp.moveaxis(jnp.sum(d_out.astype(jnp.float32) * out, axis=-1), 1, 2)
    delta = delta if d_lse is None else delta - d_lse
    arguments = spec, q, k, v, q_segments, kv_last, mask
    gradients = d_out.astype(q.dtype), lse, delta
    dq = _d_queries(spec, _pad_inputs("dq", *arguments), *gradients)
    dk, dv = _d_keys(spec, _pad_inputs("dkv", *arguments), *gradients)
    return _tokens(dq, q), _tokens(dk, k), _tokens(dv, v)


def _d_queries(spec: AttentionSpec, inputs: _Inputs, d_out, lse, delta):
    (batch, heads, _, dim), block = inputs.q.shape, inputs.blocks.q
    of_q, of_kv = inputs.specs_by_query()
    return _call(
        partial(_dq_kernel, spec, inputs.blocks),
        (batch, heads, *inputs.counts),
        ins=_backward_specs(inputs, of_q, of_kv),
        outs=of_q.tokens,
        out_shape=jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype),
        scratch=[
            _scratch(block, dim),
            *[_scratch(block, LANES)] * 2,
            *[_scratch(block, LANES, jnp.int32)] * 2,
        ],
    )(*_backward_inputs(inputs, d_out, lse, delta))


def _d_keys(spec: AttentionSpec, inputs: _Inputs, d_out, lse, delta):
    (batch, kv_heads, _, dim), block = inputs.k.shape, inputs.blocks.kv
    of_q, of_kv = inputs.specs_by_key()
    return _call(
        partial(_dkv_kernel, spec, inputs.blocks),
        (batch, kv_heads, inputs.counts[1], inputs.q.shape[1] // kv_heads, inputs.counts[0]),
        ins=_backward_specs(inputs, of_q, of_kv),
        outs=(of_kv.tokens, of_kv.tokens),
        out_shape=(jax.ShapeDtypeStruct(inputs.k.shape, inputs.k.dtype),) * 2,
        scratch=[*[_scratch(block, dim)] * 2, _scratch(block, LANES, jnp.int32)],
    )(*_backward_inputs(inputs, d_out, lse, delta))


def _backward_specs(inputs: _Inputs, of_q: _Specs, of_kv: _Specs) -> tuple[pl.BlockSpec, ...]:
    """Return the specs of q, k, v, d_out, lse, delta and the mask, in the order of `_backward_inputs`."""
    tokens = of_q.tokens, of_kv.tokens, of_kv.tokens, of_q.tokens
    return *tokens, of_q.numbers, of_q.numbers, *inputs.mask_specs(of_q, of_kv)


def _backward_inputs(inputs: _Inputs, d_out, lse, delta) -> tuple[Array, ...]:
    block = inputs.blocks.q
    numbers = _numbers(lse, block), _numbers(delta, block)
    tokens = inputs.q, inputs.k, inputs.v, _block_rows(d_out, block)
    return *inputs.scalars, *tokens, *numbers, *inputs.mask


def _forward_kernel(spec, blocks, *refs):
    *scalars, q, k, v, q_windows, q_segments, kv_last, out, lse, summed, top, total, windows, segments = refs
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def start():
        top[...] = jnp.full_like(top, MASKED_LSE)
        total[...] = jnp.zeros_like(total)
        summed[...] = jnp.zeros_like(summed)
        windows[...], segments[...] = _column(q_windows[...]), _column(q_segments[...])

    def add(mask):
        scores = capped_scores(spec, _dot(q[...], k[...], (1, 1)))
        if mask is not None:
            scores = jnp.where(mask(windows[:, :1], segments[:, :1], kv_last[...]), scores, -jnp.inf)
        new = jnp.maximum(top[...], scores.max(axis=1, keepdims=True))
        weights, kept = jnp.exp(scores - new[:, :1]), jnp.exp(top[...] - new)
        top[...] = new
        total[...] = kept * total[...] + weights.sum(axis=1, keepdims=True)
        summed[...] = kept[:, :1] * summed[...] + _dot(weights.astype(v.dtype), v[...], (1, 0))

    _unless_masked(blocks, scalars, i, j, add)

    @pl.when(j == pl.num_programs(3) - 1)
    def finish():
        attends = total[...] > 0
        divisor = jnp.where(attends, total[...], 1)
        out[...] = (summed[...] / divisor[:, :1]).astype(out.dtype)
        lse[...] = _row(jnp.where(attends, top[...] + jnp.log(divisor), MASKED_LSE))


def _dq_kernel(spec, blocks, *refs):
    (
        *scalars,
        q,
        k,
        v,
        d_out,
        lse_row,
        delta_row,
        q_windows,
        q_segments,
        kv_last,
        dq,
        summed,
        lse,
        delta,
        windows,
        segments,
    ) = refs
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def start():
        summed[...] = jnp.zeros_like(summed)
        # Columns of the statistics, once for all blocks of keys.
        lse[...], delta[...] = _column(lse_row[...]), _column(delta_row[...])
        windows[...], segments[...] = _column(q_windows[...]), _column(q_segments[...])

    def add(mask):
        scores = capped_scores(spec, _dot(q[...], k[...], (1, 1)))
        weights = jnp.exp(scores - lse[:, :1])
        if mask is not None:
            weights = jnp.where(mask(windows[:, :1], segments[:, :1], kv_last[...]), weights, 0)
        d_weights = _dot(d_out[...], v[...], (1, 1))
        d_scores = d_products(spec, scores, weights * (d_weights - delta[:, :1]))
        summed[...] += _dot(d_scores.astype(k.dtype), k[...], (1, 0))

    _unless_masked(blocks, scalars, i, j, add)

    @pl.when(j == pl.num_programs(3) - 1)
    def finish():
        dq[...] = summed[...].astype(dq.dtype)


def _dkv_kernel(spec, blocks, *refs):
    *scalars, q, k, v, d_out, lse, delta, q_windows, q_segments, kv_last = refs[:13]
    dk, dv, dk_sum, dv_sum, last = refs[13:]
    j, head, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((head == 0) & (i == 0))
    def start():
        dk_sum[...], dv_sum[...] = jnp.zeros_like(dk_sum), jnp.zeros_like(dv_sum)
        last[...] = _column(kv_last[...])

    def add(mask):  # scores transposed: keys x queries
        scores = capped_scores(spec, _dot(k[...], q[...], (1, 1)))
        weights = jnp.exp(scores - lse[...])
        if mask is not None:
            visible = mask(q_windows[...], q_segments[...], last[:, :1], keys_first=True)
            weights = jnp.where(visible, weights, 0)
        d_weights = _dot(v[...], d_out[...], (1, 1))
        d_scores = d_products(spec, scores, weights * (d_weights - delta[...]))
        dv_sum[...] += _dot(weights.astype(v.dtype), d_out[...], (1, 0))
        dk_sum[...] += _dot(d_scores.astype(q.dtype), q[...], (1, 0))

    _unless_masked(blocks, scalars, i, j, add, by_key=True)

    @pl.when((head == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def finish():
        dk[...], dv[...] = dk_sum[...].astype(dk.dtype), dv_sum[...].astype(dv.dtype)


def _unless_masked(blocks: Blocks, scalars, i, j, add, *, by_key: bool = False) -> None:
    """Call `add(mask)` unless all pairs of block i of queries and block j of keys are masked.

    `mask(q_windows, q_segments, kv_last)` returns the visible pairs; None if all are.
    """
    offsets, q_info, kv_info, _ = scalars
    batch = pl.program_id(0)
    q_count, kv_count = (pl.num_programs(n) for n in ((4, 2) if by_key else (2, 3)))
    read = lambda kind, info, n: kind(*(info[n * len(kind._fields) + f] for f in range(len(kind._fields))))
    q = read(QueryBlocks, q_info, batch * q_count + i)
    kv = read(KeyBlocks, kv_info, batch * kv_count + j)
    offsets = DynamicMask(offsets[0], offsets[1])
    first = offsets.q_offset + i * blocks.q, offsets.kv_offset + j * blocks.kv
    needed, unmasked = compare_blocks(q, kv, first, blocks)

    def mask(q_windows, q_segments, kv_last, keys_first: bool = False):
        shape = (blocks.kv, blocks.q) if keys_first else (blocks.q, blocks.kv)
        rows = i * blocks.q + jax.lax.broadcasted_iota(jnp.int32, shape, int(keys_first))
        columns = j * blocks.kv + jax.lax.broadcasted_iota(jnp.int32, shape, int(not keys_first))
        return visible(offsets, rows, columns, q_windows, q_segments, kv_last)

    pl.when(needed & unmasked)(lambda: add(None))
    pl.when(needed & jnp.logical_not(unmasked))(lambda: add(mask))


def _dot(x: Float[Array, "..."], y: Float[Array, "..."], contracted: tuple[int, int]) -> Float[Array, "..."]:
    """Multiply and sum over these dims in float32; float32 inputs are not rounded to bfloat16."""
    dims = ((contracted[:1], contracted[1:]), ((), ()))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _column(row: Shaped[Array, "1 N"]) -> Shaped[Array, "N 128"]:
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _row(column: Shaped[Array, "N 128"]) -> Shaped[Array, "1 N"]:
    return column.T[:1]


class _Specs(NamedTuple):
    """Block specs of queries or keys: tokens [B H T E], numbers [B H 1 T], arrays of the mask [B 1 T]."""

    tokens: pl.BlockSpec
    numbers: pl.BlockSpec
    mask: pl.BlockSpec


def _specs(at: Callable, block: int, dim: int) -> _Specs:
    """Return the specs for `at(*grid, *scalars)` -> the (row of the batch, head, block) that a program
    reads."""

    def tokens(*args):
        batch, head, i = at(*args)
        return batch, head, i, 0

    def numbers(*args):
        batch, head, i = at(*args)
        return batch, head, 0, i

    def mask(*args):
        batch, _, i = at(*args)
        return batch, 0, i

    return _Specs(
        pl.BlockSpec((None, None, block, dim), tokens),
        pl.BlockSpec((None, None, 1, block), numbers),
        pl.BlockSpec((None, 1, block), mask),
    )


class _Inputs(NamedTuple):
    """Inputs of the kernels, padded to whole blocks: tokens [B H T E] and the mask's arrays [B 1 T]."""

    blocks: Blocks
    counts: tuple[int, int]  # of blocks of queries, of keys
    scalars: tuple[Array, ...]  # offsets; the fields of each block of queries, of keys; what `_read` reads
    q: Array
    k: Array
    v: Array
    mask: tuple[Array, Array, Array]  # windows and segments of queries, `kv_last`
    by_table: bool  # the block to read at every step is in the scalars, not only their range

    def mask_specs(self, of_q: _Specs, of_kv: _Specs) -> tuple[pl.BlockSpec, ...]:
        """Return the specs of `mask`."""
        return of_q.mask, of_q.mask, of_kv.mask

    def specs_by_query(self) -> tuple[_Specs, _Specs]:
        """Return the specs of queries and keys on the grid (row, head, block of queries, block of keys)."""
        group, (count, steps) = self.q.shape[1] // self.k.shape[1], self.counts
        q = lambda b, h, i, j, *_: (b, h, i)
        kv = lambda b, h, i, j, *s: (b, jax.lax.div(h, group), self._read(j, steps, s[-1], b * count + i))
        return _specs(q, self.blocks.q, self.q.shape[3]), _specs(kv, self.blocks.kv, self.q.shape[3])

    def specs_by_key(self) -> tuple[_Specs, _Specs]:
        """Return the specs on the grid (row, key head, block of keys, query head of it, block of queries)."""
        group, (steps, count) = self.q.shape[1] // self.k.shape[1], self.counts
        q = lambda b, h, j, g, i, *s: (b, h * group + g, self._read(i, steps, s[-1], b * count + j))
        kv = lambda b, h, j, g, i, *_: (b, h, j)
        return _specs(q, self.blocks.q, self.q.shape[3]), _specs(kv, self.blocks.kv, self.q.shape[3])

    def _read(self, i, steps, reads, other):
        """Return the block to read at step i of `steps`: i itself, or a near block that block `other`
        needs."""
        if self.by_table:
            return reads[other * steps + i]
        first, end = reads[2 * other], reads[2 * other + 1]
        return jnp.clip(i, first, jnp.maximum(end - 1, first))


def _pad_inputs(kernel: str, spec: AttentionSpec, q, k, v, q_segments, kv_last, mask: DynamicMask) -> _Inputs:
    """Pad to whole blocks and find which blocks each block needs."""
    blocks = blocks_for(kernel, q.shape[1], k.shape[1], q.shape[3], q.dtype)
    pad = lambda x, block: jnp.pad(x.astype(jnp.int32), ((0, 0), (0, -x.shape[1] % block)))
    padded = pad(mask.windows(q_segments), blocks.q), pad(q_segments, blocks.q), pad(kv_last, blocks.kv)
    windows, segments, last = padded
    of_q, of_kv = query_blocks(mask, segments, windows, blocks.q), key_blocks(last, blocks.kv)
    needed, _ = visible_blocks(mask, of_q, of_kv, blocks)
    read = needed.swapaxes(1, 2) if kernel == "dkv" else needed
    by_table = spec.branches and read.size <= MAX_READS
    reads = nearest_blocks(read) if by_table else jnp.stack(block_range(read), axis=-1)
    flat = lambda of: jnp.stack(of, axis=-1).reshape(-1)
    return _Inputs(
        blocks,
        needed.shape[1:],
        (mask.offsets(), flat(of_q), flat(of_kv), reads.reshape(-1)),
        _block_rows(q, blocks.q),
        _block_rows(k, blocks.kv),
        _block_rows(v, blocks.kv),
        tuple(x[:, None] for x in padded),
        by_table,
    )


def _block_rows(x: Float[Array, "B T H E"], block: int) -> Float[Array, "B H T2 E2"]:
    """Transpose, and pad the length to whole blocks and the head dim to a supported one."""
    more = -x.shape[1] % block, padded_head_dim(x.shape[3]) - x.shape[3]
    return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, more[0]), (0, 0), (0, more[1]))), 1, 2)


def _tokens(x: Float[Array, "B H T2 E2"], like: Float[Array, "B T H E"]) -> Float[Array, "B T H E"]:
    """Invert `_block_rows`: the tokens of `like`."""
    return jnp.moveaxis(x, 1, 2)[:, : like.shape[1], :, : like.shape[3]]


def _numbers(x: Float[Array, "B H T"], block: int) -> Float[Array, "B H 1 T2"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block)))[:, :, None]


def _scratch(tokens: int, dim: int, dtype=jnp.float32):
    return pltpu.VMEM((tokens, dim), dtype)


def _call(kernel: Callable, grid: tuple[int, ...], *, ins, outs, out_shape, scratch):
    """Return the kernel with four scalar-prefetch arrays; the last dims of the grid accumulate."""
    accumulating = len(grid) - 3
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4, grid=grid, in_specs=ins, out_specs=outs, scratch_shapes=scratch
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",) * accumulating,
            vmem_limit_bytes=vmem_limit(dispatch.tpu_generation()),
        ),
        interpret=INTERPRET,
    )
