"""Attention of one new token a slot over a paged KV cache, and writing the token into the cache."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, Num

from jaxrl_kernels.decode_attention import reference
from jaxrl_kernels.decode_attention.reference import Pages
from jaxrl_kernels.dispatch import choose, load_implementation
from jaxrl_kernels.flash_attention.spec import NO_WINDOW


def decode_attention(
    q: Float[Array, "S H E"],
    k_pages: Num[Array, "P K page E"],
    v_pages: Num[Array, "P K page E"],
    page_table: Int[Array, "S N"],
    lengths: Int[Array, "S"],
    *,
    scale: float,
    window: int | Int[Array, ""] = NO_WINDOW,
    softcap: float | None = None,
    k_scales: Float[Array, "P K page"] | None = None,
    v_scales: Float[Array, "P K page"] | None = None,
    implementation: str = "auto",
    splits: int | None = None,
    return_lse: bool = False,
) -> Float[Array, "S H E"] | tuple[Float[Array, "S H E"], Float[Array, "S H"]]:
    """Compute softmax(scale * q k^T) v for the newest token of each slot; H/K query heads share a kv head.

    A page holds `page` consecutive tokens of all kv heads, contiguous in memory. Any slots may share pages.

    Args:
        k_pages, v_pages: float, or int8 or float8 with scales; finite even in unused places. On TPU, pages
            with head_dim 128 keep their memory layout; for a smaller head_dim the compiler may copy them to
            another layout.
        page_table: int32; token t of slot s is in page page_table[s, t // page]. Entries past a slot's length
            must be valid page numbers, but are not read.
        lengths: int32, tokens of the slot including the newest; 0 = an empty slot, whose result is 0.
        window: sliding window: tokens attended to, the newest included; may be traced.
        softcap: c of c * tanh(score / c).
        k_scales, v_scales: float32, factor of each token's key (value).
        implementation: "auto" or one of `dispatch.OPERATIONS`.
        splits: parts that every context is divided into (split-KV); None = as many as occupy all cores.
        return_lse: also return the log-sum-exp of the scores, float32, in nats.

    Returns: the type of q; softmax and sums are float32. With `return_lse` (out, lse).

    Raises:
        ValueError: the shapes do not match, or the requested implementation does not support the inputs.
    """
    _check_shapes(q, k_pages, v_pages, page_table, lengths, k_scales, v_scales)
    name, _ = choose("decode_attention", q, k_pages, page_table, implementation=implementation)
    out, lse = load_implementation("decode_attention", name).decode_attention(
        q, k_pages, v_pages, page_table, lengths, scale=scale, window=window, softcap=softcap,
        k_scales=k_scales, v_scales=v_scales, splits=splits,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def write_token(
    pages: Pages,
    new: Pages,
    numbers: Int[Array, "S"],
    offsets: Int[Array, "S"],
    implementation: str,
) -> Pages:
    """Write a new token of each slot into its page; in place if the pages are donated.

    Args:
        pages: keys and values [P, K, page, E], and for 8-bit pages their scales [P, K, page].
        new: the same tree of [S, K, E] and [S, K], in the types of the pages.
        numbers, offsets: int32, each slot's page and the token in it. If slots share a page, any one of their
            tokens may remain.
        implementation: of attention, as `dispatch.choose` returns it.
    """
    module = load_implementation("decode_attention", implementation)
    return getattr(module, "write_token", reference.write_token)(pages, new, numbers, offsets)


def _check_shapes(q, k_pages, v_pages, page_table, lengths, k_scales, v_scales) -> None:
    """Refuse shapes that do not fit together."""
    slots, heads, dim = q.shape
    pages, kv_heads, page, kv_dim = k_pages.shape
    narrow = k_pages.dtype.itemsize == 1
    problems = {
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
    for problem, applies in problems.items():
        if applies:
            raise ValueError(f"decode_attention: {problem}")
