"""Attention of one new token a slot over a paged cache: which implementation, and why."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxrl_kernels import target
from jaxrl_kernels.decode_attention import pallas_gpu, pallas_tpu, reference
from jaxrl_kernels.decode_attention.reference import Pages
from jaxrl_kernels.flash_attention.spec import EVERYTHING

Implementation = Literal["reference", "pallas_tpu", "pallas_gpu"]
Shaped = Array | jax.ShapeDtypeStruct
HEAD_DIMS = 64, 96, 128, 256
BUFFERS = 4 * 2**20
"""Bytes of VMEM for pages on the way, two blocks of keys and of values; a quarter of the smallest chip's."""
LONGEST_BLOCK = 512
"""Tokens computed at once: more hide no more of a copy's latency."""
TABLE = 2**19
"""Bytes of scalar memory for the page table, half of a chip's."""


def decode_attention(
    q: Float[Array, "S H E"],
    k_pages: Num[Array, "P K page E"],
    v_pages: Num[Array, "P K page E"],
    page_table: Int[Array, "S N"],
    lengths: Int[Array, "S"],
    *,
    scale: float,
    window: int | Int[Array, ""] = EVERYTHING,
    softcap: float | None = None,
    k_scales: Float[Array, "P K page"] | None = None,
    v_scales: Float[Array, "P K page"] | None = None,
    implementation: Literal["auto"] | Implementation = "auto",
    splits: int | None = None,
) -> Float[Array, "S H E"]:
    """softmax(scale * q k^T) v for the newest token of each slot, H/K query heads sharing each kv head.

    A page holds `page` consecutive tokens of all kv heads, one piece of memory. Any slots may share pages.

    Args:
        k_pages, v_pages: float, or int8 or float8 with scales; finite even where no token is. On TPU rows of
            128 numbers stay where they are; shorter ones the compiler may lay out in another way, and copy.
        page_table: int32, token t of slot s is in page page_table[s, t // page]. Entries past a slot's
            length must be page numbers too, and are not read.
        lengths: int32, tokens that the slot has, its newest included; 0 = nobody there, the result is 0.
        window: tokens that are seen, the newest included; may be traced.
        softcap: c of c * tanh(score / c).
        k_scales, v_scales: float32, what each token's key (value) is multiplied with.
        splits: of every context, for cores of a device to share; None = as many as keep them all busy.

    Returns: the type of q; softmax and sums are float32.

    Raises:
        ValueError: shapes that do not fit, or what the implementation asked for cannot do.
    """
    _check(q, k_pages, v_pages, page_table, lengths, k_scales, v_scales)
    implementation = choose(q, k_pages, page_table)[0] if implementation == "auto" else implementation
    options = dict(scale=scale, window=window, softcap=softcap, k_scales=k_scales, v_scales=v_scales)
    if implementation == "reference":
        return reference.decode_attention(q, k_pages, v_pages, page_table, lengths, **options)
    if why := OBSTACLES[implementation](q, k_pages, page_table):
        raise ValueError(f'decode_attention: {why}, or use implementation="reference"')
    if implementation == "pallas_gpu":
        splits = splits or pallas_gpu.splits_for(len(q) * k_pages.shape[1], page_table.shape[1])
        del options["k_scales"], options["v_scales"]
        return pallas_gpu.decode_attention(q, k_pages, v_pages, page_table, lengths, **options, splits=splits)
    splits, block = splits or target.cores(), tpu_block(k_pages)
    return pallas_tpu.decode_attention(
        q, k_pages, v_pages, page_table, lengths, **options, splits=splits, block=block
    )


def write(
    pages: Pages,
    new: Pages,
    numbers: Int[Array, "S"],
    offsets: Int[Array, "S"],
    implementation: Implementation,
) -> Pages:
    """A new token of each slot put into its page; in place where the pages are not used any more.

    Args:
        pages: keys and values [P, K, page, E], and where they have some their scales [P, K, page].
        new: the same tree of [S, K, E] and [S, K], in the types of the pages.
        numbers, offsets: int32, each slot's page and the place in it. Slots of one page leave anything there.
        implementation: what `choose` says.
    """
    where = pallas_tpu if implementation == "pallas_tpu" else reference
    return where.write(pages, new, numbers, offsets)


def choose(q: Shaped, k_pages: Shaped, page_table: Shaped) -> tuple[Implementation, str]:
    """(implementation, why) of "auto" for these shapes and types, on the device that is compiled for."""
    name, why = target.kernels()
    problem = OBSTACLES[name](q, k_pages, page_table) if name else why
    return ("reference", problem) if problem else (name, why)


def tpu_block(k_pages: Shaped) -> int:
    """Tokens of a block: as many pages as BUFFERS and LONGEST_BLOCK leave room for, 0 if not one."""
    page = k_pages.shape[2]
    most = min(BUFFERS // (4 * _page_bytes(k_pages)) * page, LONGEST_BLOCK)
    return most // page * page


def tpu_obstacle(q: Shaped, k_pages: Shaped, page_table: Shaped) -> str | None:
    """Why the TPU kernel cannot do this, and what it could; None if it can."""
    _, kv_heads, page, dim = k_pages.shape
    bits, name = k_pages.dtype.itemsize * 8, k_pages.dtype.name
    multiple = {32: 8, 16: 16, 8: 128}.get(bits)
    table = page_table.shape[0] * page_table.shape[1] * 4
    if dim not in HEAD_DIMS:
        return _wrong_dim(dim)
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of type {q.dtype.name}: give float32 or bfloat16"
    if multiple is None or page % multiple or page > LONGEST_BLOCK:
        return (
            f"pages of {page} tokens of type {name}: the page must be a multiple of {multiple} "
            f"and at most {LONGEST_BLOCK}"
        )
    if not tpu_block(k_pages):
        fits = BUFFERS // (4 * _page_bytes(k_pages) // page) // multiple * multiple
        return (
            f"four pages of {page} tokens with {kv_heads} heads of {dim} take {4 * _page_bytes(k_pages)} "
            f"bytes of VMEM, more than {BUFFERS}: give pages of at most {fits} tokens"
        )
    if table > TABLE:
        return (
            f"a page table {tuple(page_table.shape)} takes {table} bytes of scalar memory, more than "
            f"{TABLE}: give larger pages or fewer slots"
        )
    return None


def gpu_obstacle(q: Shaped, k_pages: Shaped, page_table: Shaped) -> str | None:
    """As `tpu_obstacle`, of the kernel for Hopper."""
    _, kv_heads, page, dim = k_pages.shape
    if dim not in HEAD_DIMS:
        return _wrong_dim(dim)
    return pallas_gpu.unsupported(q.shape[1], kv_heads, dim, page, q.dtype, k_pages.dtype)


OBSTACLES = {"pallas_tpu": tpu_obstacle, "pallas_gpu": gpu_obstacle}


def _wrong_dim(dim: int) -> str:
    return f"head_dim {dim} is not one of {', '.join(map(str, HEAD_DIMS))}"


def _page_bytes(k_pages: Shaped) -> int:
    """Of a page in VMEM, where rows are padded to 128."""
    _, heads, page, dim = k_pages.shape
    return heads * page * -(-dim // 128) * 128 * k_pages.dtype.itemsize


def _check(q, k_pages, v_pages, page_table, lengths, k_scales, v_scales) -> None:
    """Refuse shapes that do not fit together."""
    slots, heads, dim = q.shape
    pages, kv_heads, page, kv_dim = k_pages.shape
    narrow = k_pages.dtype.itemsize == 1
    wrong = {
        f"{heads} query heads over {kv_heads} kv heads: must be a multiple": heads % kv_heads != 0,
        f"head_dim {dim} of q, {kv_dim} of the pages": dim != kv_dim,
        f"k_pages {k_pages.shape} {k_pages.dtype}, v_pages {v_pages.shape} {v_pages.dtype}: must be alike": (
            (k_pages.shape, k_pages.dtype) != (v_pages.shape, v_pages.dtype)
        ),
        f"page_table {page_table.shape}, lengths {lengths.shape}: must have {slots} rows, as q": (
            page_table.shape[0] != slots or lengths.shape != (slots,)
        ),
        f"pages of {k_pages.dtype} need k_scales and v_scales, others have none": (
            (k_scales is not None, v_scales is not None) != (narrow, narrow)
        ),
        f"scales must be {(pages, kv_heads, page)}, as the pages": narrow
        and any(x is not None and x.shape != (pages, kv_heads, page) for x in (k_scales, v_scales)),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"decode_attention: {what}")
