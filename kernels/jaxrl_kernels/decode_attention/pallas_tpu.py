"""Attention over a paged KV cache on TPU: reads each page in use once, overlapping copies with compute.

One program takes one slot, all its heads, and a split of its context. It loops over blocks of pages; page
table and lengths are in scalar memory and select the pages to copy from HBM. Blocks are double-buffered: the
next block is copied while the current one is computed. After a slot's last block comes the first block of the
next slot, so that copies overlap for short contexts too.

`write_token` is a kernel because XLA's scatter needs another memory layout of the pages than attention: XLA
would copy the whole cache twice for each token.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import LANES
from jaxrl_kernels.decode_attention.reference import ArrayOrShape, Pages, merge_splits
from jaxrl_kernels.flash_attention.shapes import HEAD_DIMS
from jaxrl_kernels.flash_attention.spec import MASKED_LSE

BUFFERS = 4 * 2**20
"""Bytes of VMEM for pages in flight, two blocks of keys and of values; a quarter of the smallest chip's."""
MAX_BLOCK = 512
"""Largest number of tokens computed at once: more would not hide more of a copy's latency."""
MAX_TABLE = 2**19
"""Bytes of scalar memory for the page table, half of a chip's."""


def unsupported(q: ArrayOrShape, k_pages: ArrayOrShape, page_table: ArrayOrShape) -> str | None:
    """Return why the kernel does not take queries and pages of such shapes and types, or None."""
    _, kv_heads, page, dim = k_pages.shape
    name = k_pages.dtype.name
    multiple = {4: 8, 2: 16, 1: 128}.get(k_pages.dtype.itemsize)
    table = page_table.shape[0] * page_table.shape[1] * 4
    # Shapes and types that the compiler cannot tile.
    if dim not in HEAD_DIMS:
        return f"head_dim {dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of type {q.dtype.name}: give float32 or bfloat16"
    if multiple is None or page % multiple or page > MAX_BLOCK:
        return (
            f"pages of {page} tokens of type {name}: the page must be a multiple of {multiple} "
            f"and at most {MAX_BLOCK}"
        )
    # Pages that exceed vector memory, and tables that exceed scalar memory.
    if not block_tokens(k_pages):
        fits = BUFFERS // (4 * _page_bytes(k_pages) // page) // multiple * multiple
        return (
            f"four pages of {page} tokens with {kv_heads} heads of {dim} take {4 * _page_bytes(k_pages)} "
            f"bytes of VMEM, more than {BUFFERS}: give pages of at most {fits} tokens"
        )
    if table > MAX_TABLE:
        return (
            f"a page table {tuple(page_table.shape)} takes {table} bytes of scalar memory, more than "
            f"{MAX_TABLE}: give larger pages or fewer slots"
        )
    return None


def block_tokens(k_pages: ArrayOrShape) -> int:
    """Return the tokens of a block: as many pages as BUFFERS and MAX_BLOCK allow, 0 if not one."""
    page = k_pages.shape[2]
    tokens = min(BUFFERS // (4 * _page_bytes(k_pages)) * page, MAX_BLOCK)
    return tokens // page * page


def _page_bytes(k_pages: ArrayOrShape) -> int:
    """Return the bytes of a page in VMEM, where rows are padded to LANES."""
    _, heads, page, dim = k_pages.shape
    return heads * page * -(-dim // LANES) * LANES * k_pages.dtype.itemsize


def decode_attention(
    q: Float[Array, "S H E"],
    k_pages: Num[Array, "P K page E"],
    v_pages: Num[Array, "P K page E"],
    page_table: Int[Array, "S N"],
    lengths: Int[Array, "S"],
    *,
    scale: float,
    window: int | Int[Array, ""],
    softcap: float | None = None,
    k_scales: Float[Array, "P K page"] | None = None,
    v_scales: Float[Array, "P K page"] | None = None,
    splits: int | None = None,
    block: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "S H E"], Float[Array, "S H"]]:
    """Compute `reference.decode_attention`.

    Args:
        splits: of every context, divided among the cores of a device; None = one a core.
        block: tokens computed at once, a multiple of the page; None = `block_tokens`.
    """
    splits, block = splits or dispatch.num_cores(), block or block_tokens(k_pages)
    slots, heads, dim = q.shape
    _, kv_heads, page, _ = k_pages.shape
    group = heads // kv_heads
    tensors = [k_pages, v_pages] + ([] if k_scales is None else [k_scales, v_scales])
    # With one split the kernel writes the result itself; else float32 parts are merged.
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, scale=scale, softcap=softcap, block=block, page=page, splits=splits, tensors=len(tensors)
        ),
        grid_spec=_grid_spec((kv_heads, group, dim), tensors, block, (splits, slots)),
        out_shape=[
            jax.ShapeDtypeStruct(
                (splits, slots, kv_heads, group, dim), q.dtype if splits == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct((splits, slots, kv_heads, group, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="decode_attention",
    )(
        page_table.reshape(-1),  # one dim, since scalar memory pads rows
        lengths,
        jnp.asarray(window, jnp.int32).reshape(1),
        q.reshape(slots, kv_heads, group, dim),
        *tensors,
    )
    out, lse = merge_splits(out, lse)
    return out.astype(q.dtype).reshape(q.shape), lse.reshape(q.shape[:2])


def _grid_spec(queries: tuple[int, int, int], tensors: list[Array], block: int, grid: tuple[int, int]):
    """Return the specs: [K, G, E] queries of a slot; pages stay in HBM, two buffers of each are in VMEM."""
    # Blocks span the last two dims, so no head count or head_dim needs padding.
    output = lambda *shape: pl.BlockSpec((None, None, *shape), lambda split, slot, *_: (split, slot, 0, 0, 0))
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=grid,
        in_specs=[
            pl.BlockSpec((None, *queries), lambda split, slot, *_: (slot, 0, 0, 0)),
            *(pl.BlockSpec(memory_space=pl.ANY) for _ in tensors),
        ],
        out_specs=[output(*queries), output(*queries[:2], 1)],
        scratch_shapes=[
            *(pltpu.VMEM((2, *_buffer_shape(x, block)), x.dtype) for x in tensors),
            pltpu.SemaphoreType.DMA((2, len(tensors))),
            pltpu.SMEM((1,), jnp.int32),
            *(pltpu.VMEM((*queries[:2], n), jnp.float32) for n in (1, 1, queries[2])),
        ],
    )


def _buffer_shape(pages: Array, block: int) -> tuple[int, ...]:
    """Return the shape in VMEM of a block of pages [P, K, page, E] or scales [P, K, page]."""
    return (pages.shape[1], block, *pages.shape[3:])


def write_token(
    pages: Pages,
    new: Pages,
    numbers: Int[Array, "S"],
    offsets: Int[Array, "S"],
    interpret: bool | pltpu.InterpretParams = False,
) -> Pages:
    """Compute `api.write_token`: each program reads, changes and writes the tile of a slot's token."""
    arrays, tree = jax.tree.flatten(pages)
    tokens = [jnp.expand_dims(x, 2) for x in jax.tree.leaves(new)]
    tiles = [_tile(x) for x in arrays]
    tile_specs = [_tile_spec(x, tile) for x, tile in zip(arrays, tiles, strict=True)]
    of_slot = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda slot, *_: (slot, *(0,) * (x.ndim - 1)))
    # Scalar memory holds page numbers and offsets; outputs alias the pages, so that only tiles are written.
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(len(numbers),),
        in_specs=[*map(of_slot, tokens), *tile_specs],
        out_specs=tile_specs,
    )
    outputs = pl.pallas_call(
        functools.partial(_write_kernel, tiles),
        grid_spec=grid_spec,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
        input_output_aliases={2 + len(tokens) + i: i for i in range(len(arrays))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="write_token",
    )(numbers, offsets, *tokens, *arrays)
    return jax.tree.unflatten(tree, outputs)


def _tile(pages: Array) -> int:
    """Return the tokens of a page that are read and written together: rows of a tile; all for scales."""
    return 32 // pages.dtype.itemsize if pages.ndim == 4 else pages.shape[2]


def _tile_spec(pages: Array, tile: int) -> pl.BlockSpec:
    rest = pages.shape[3:]

    def index(slot, numbers, offsets):
        return numbers[slot], 0, offsets[slot] // tile, *(0 for _ in rest)

    return pl.BlockSpec((None, pages.shape[1], tile, *rest), index)


def _write_kernel(tiles: list[int], numbers, offsets, *refs) -> None:
    """Write the token into its row of the tile. Refs: of the tokens, of the old tiles, of the new ones."""
    count, offset = len(tiles), offsets[pl.program_id(0)]
    triples = zip(refs[:count], refs[count : 2 * count], refs[2 * count :], strict=True)
    for tile, (token, old, out) in zip(tiles, triples, strict=True):
        wide = jnp.int32 if jnp.issubdtype(old.dtype, jnp.integer) else jnp.float32  # exact, there and back
        here = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1) == offset % tile
        out[...] = jnp.where(here, token[...].astype(wide), old[...].astype(wide)).astype(out.dtype)


class _Work(NamedTuple):
    """Inputs of a program: one split of the contexts. Fields that are not numbers are refs."""

    table: Any  # [S * N]
    lengths: Any  # [S]
    window: Any  # [1]
    pages: tuple[Any, ...]  # keys, values, and for 8-bit pages their scales
    buffers: tuple[Any, ...]  # two blocks of each
    copied: Any  # semaphores, [2, tensors]
    split: Int[Array, ""]
    slots: int
    block: int
    page: int
    splits: int

    def visible(self, slot):
        """Return the first position that the slot attends to, and one past the last."""
        length = self.lengths[slot]
        return jnp.maximum(length - self.window[0], 0), length

    def blocks(self, slot):
        """Return the first block of this split, and one past the last: at least one block."""
        begin, end = self.visible(slot)
        first, last = begin // self.block, pl.cdiv(end, self.block)
        share = pl.cdiv(last - first, self.splits)
        start = first + self.split * share
        return start, jnp.maximum(jnp.minimum(start + share, last), start + 1)

    def each_copy(self, slot, index, buffer, do):
        """Call `do` on every copy of the visible pages of the slot's block `index`."""
        begin, end = self.visible(slot)
        per_block, row = self.block // self.page, self.table.shape[0] // self.slots

        def one(i, _):
            number = self.table[slot * row + i]
            at = pl.ds(pl.multiple_of((i - index * per_block) * self.page, self.page), self.page)
            for n, (pages, buffers) in enumerate(zip(self.pages, self.buffers, strict=True)):
                do(
                    pltpu.make_async_copy(
                        pages.at[number], buffers.at[buffer, :, at], self.copied.at[buffer, n]
                    )
                )
            return 0

        low = jnp.maximum(index * per_block, begin // self.page)
        jax.lax.fori_loop(low, jnp.minimum((index + 1) * per_block, pl.cdiv(end, self.page)), one, 0)


class _Softmax(NamedTuple):
    """State of the online softmax of one slot; refs of float32 [K, G, .]."""

    top: Any
    total: Any
    acc: Any

    def clear(self) -> None:
        self.top[...] = jnp.full_like(self.top, MASKED_LSE)
        self.total[...], self.acc[...] = jnp.zeros_like(self.total), jnp.zeros_like(self.acc)

    def add(self, head: int, q, tensors, visible, scale: float, softcap: float | None) -> None:
        """Add a block of one kv head, for all its query heads at once."""
        k, v, *scales = (ref[...] for ref in tensors)
        scores = _product("ge,te->gt", q, k) * scale
        if scales:
            scores = scores * scales[0][None]
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        old = self.top[head]
        new = jnp.maximum(old, jnp.max(jnp.where(visible, scores, MASKED_LSE), axis=1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(scores - new), 0.0)
        shrink = jnp.exp(old - new)
        self.top[head] = new
        self.total[head] = shrink * self.total[head] + jnp.sum(weights, axis=1, keepdims=True)
        if scales:
            weights = weights * scales[1][None]
        self.acc[head] = shrink * self.acc[head] + _product("gt,te->ge", weights.astype(q.dtype), v)


def _kernel(table, lengths, window, q, *refs, scale, softcap, block, page, splits, tensors):
    """Compute one split of one slot's context."""
    pages, (out, lse), refs = refs[:tensors], refs[tensors : tensors + 2], refs[tensors + 2 :]
    buffers, (copied, first_buffer, *statistics) = refs[:tensors], refs[tensors:]
    slot, slots, softmax = pl.program_id(1), pl.num_programs(1), _Softmax(*statistics)
    work = _Work(table, lengths, window, pages, buffers, copied, pl.program_id(0), slots, block, page, splits)
    kv_heads, group, _ = q.shape
    # The first slot starts the first copy; each block then starts the copy of the next.
    (start, stop), (begin, end) = work.blocks(slot), work.visible(slot)

    @pl.when(slot == 0)
    def _():
        first_buffer[0] = 0
        for buffer in buffers[1::2]:  # positions that are not copied have weight 0, and must not be NaN
            buffer[...] = jnp.zeros_like(buffer)
        work.each_copy(slot, start, 0, lambda copy: copy.start())

    def one_block(index, _):
        buffer = (first_buffer[0] + index - start) % 2
        last = index + 1 == stop
        next_slot = jnp.where(last, slot + 1, slot)

        @pl.when(next_slot < slots)
        def _():
            next_index = jnp.where(last, work.blocks(jnp.minimum(next_slot, slots - 1))[0], index + 1)
            work.each_copy(next_slot, next_index, 1 - buffer, lambda copy: copy.start())

        work.each_copy(slot, index, buffer, lambda copy: copy.wait())
        position = index * block + jax.lax.broadcasted_iota(jnp.int32, (group, block), 1)
        visible = (position >= begin) & (position < end)
        for head in range(kv_heads):  # unrolled: the products of several heads overlap
            softmax.add(head, q[head], [ref.at[buffer, head] for ref in buffers], visible, scale, softcap)
        return 0

    # All blocks of the slot, then its normalised output.
    softmax.clear()
    jax.lax.fori_loop(start, stop, one_block, 0)
    first_buffer[0] = (first_buffer[0] + stop - start) % 2
    total = softmax.total[...]
    some = jnp.where(total == 0, 1, total)
    out[...] = (softmax.acc[...] / some).astype(out.dtype)
    lse[...] = jnp.where(total == 0, MASKED_LSE, softmax.top[...] + jnp.log(some))


def _product(pattern: str, a: Array, b: Array) -> Array:
    """Multiply in the type of a (float32 without rounding), summed in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(pattern, a, b.astype(a.dtype), precision=precision, preferred_element_type=jnp.float32)
