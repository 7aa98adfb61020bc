"""NVIDIA's cuDNN attention over packed rows: XLA's custom calls with ragged offsets, for Ampere GPUs and
newer.

`jax._src.cudnn` refuses packed rows before Hopper; cuDNN supports them since 9.18.1.

cuDNN needs an upper bound on segment length, and its backward workspace holds float32 gradients for every
slot at this bound. So each class of lengths in (s/2, s] has a separate call: of N tokens, fewer than 2N/s
segments are so long, and 2N/s slots of s tokens always suffice. A class without segments is skipped at run
time.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import is_hopper
from jaxrl_kernels.flash_attention import blockwise
from jaxrl_kernels.flash_attention.spec import MASKED_LSE, NO_WINDOW, AttentionSpec, DynamicMask

MIN_VERSION = (9, 18, 1)
"""The first cuDNN with packed rows for compute capability 8."""
SLOTS = 2
"""Segments for every s tokens of a class of lengths in (s/2, s]."""
MIN_CLASS = 64
"""Classes are halved down to this length; the last class has all shorter segments."""
TYPES = {"bfloat16": "BF16", "float16": "F16"}
"""Names of the types in XLA."""
DOTS = {
    "bmm1": ((3, 3), (2, 2)),
    "bmm2": ((3, 1), (1, 2)),
    "bmm1_grad_gemm1": ((2, 1), (1, 2)),
    "bmm1_grad_gemm2": ((3, 1), (1, 2)),
    "bmm2_grad_gemm1": ((2, 1), (1, 2)),
    "bmm2_grad_gemm2": ((3, 3), (2, 2)),
}
"""Product -> (contracted dims, dims of the heads) of both factors: q, k, v are BTHE, the weights BHTC."""


def unsupported(head_dim: int, dtype: DTypeLike, softcap: float | None = None) -> str | None:
    """Return why cuDNN does not support this head dim and type of q, k and v, or None."""
    if jnp.dtype(dtype).name not in TYPES:
        return f"cuDNN attention takes bfloat16 and float16, not {jnp.dtype(dtype).name}"
    max_head_dim = 256 if is_hopper(dispatch.device()[1]) else 128
    if head_dim % 8 or head_dim > max_head_dim:
        return f"cuDNN attention takes head_dims that are multiples of 8 up to {max_head_dim}, not {head_dim}"
    if softcap is not None:
        return "cuDNN attention has no soft-cap of scores"
    version = installed_version()
    if version and version < MIN_VERSION:
        return "cuDNN {}.{}.{}: packed rows need {}.{}.{} or newer".format(*version, *MIN_VERSION)
    return None


@functools.cache
def installed_version() -> tuple[int, int, int] | None:
    """Return the version of cuDNN, or None on a machine without it, which can only compile."""
    try:
        number = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()
    except OSError:
        return None
    return number // 10_000, number // 100 % 100, number % 100


def forward(
    spec: AttentionSpec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_last: Int[Array, "B Tk"],
    mask: DynamicMask,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B H Tq"]]:
    """Compute `reference.forward`: by cuDNN if `_call` allows it, else by `blockwise`."""
    plain = lambda *qkv: blockwise.forward(spec, *qkv, q_segments, kv_last, mask)
    return _call(spec, mask, (q_segments, kv_last), _forward, plain, (q, k, v))


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
    """Compute `reference.backward`; also by `blockwise` if the log-sum-exp has a gradient."""

    def plain(q, k, v, out, lse, d_out):
        return blockwise.backward(
            spec, q, k, v, q_segments, kv_last, mask, out, lse, d_out.astype(q.dtype), d_lse
        )

    operands = q, k, v, out, lse, d_out
    if d_lse is not None:
        return plain(*operands)
    return _call(spec, mask, (q_segments, kv_last), _backward, plain, operands)


class Runs(NamedTuple):
    """Segments of N tokens, the rows one after the other."""

    start: Int[Array, "N"]  # index of the first token of a token's segment
    length: Int[Array, "N"]  # of a token's segment; 0 = padding

    def of_length(self, shortest: int, longest: int) -> Bool[Array, "N"]:
        """Return which tokens are of segments of these lengths."""
        return (self.length >= shortest) & (self.length <= longest)


def _call(
    spec: AttentionSpec,
    mask: DynamicMask,
    segments: tuple[Array, Array],
    fused: Callable,
    plain: Callable,
    operands: tuple[Array, ...],
):
    """Return `fused(spec, window, runs, *operands)`, or `plain(*operands)` if cuDNN cannot compute it.

    Reasons known at compile time: branches, and queries and keys that are not the same tokens (`q_segments is
    kv_last` except in ring attention). Reasons known at run time: a window that is not one of `spec.windows`,
    and more than one segment of at most `MIN_CLASS` tokens for every 32 tokens.
    """
    q_segments, kv_last = segments
    whole_rows = q_segments is kv_last and all(isinstance(x, int) for x in mask[:2])
    length = q_segments.shape[1]
    windows = sorted({min(window, length) for window in spec.windows or (NO_WINDOW,)})
    if not whole_rows or mask.q_offset != mask.kv_offset:
        return plain(*operands)
    padded = _padded_length(length)
    runs, fits = find_runs(_pad_rows(q_segments, padded))
    matches = jnp.minimum(mask.window, length) == jnp.asarray(windows)
    branch = jnp.where(fits & matches.any(), 1 + jnp.argmax(matches), 0)
    branches = [functools.partial(fused, spec, window, runs) for window in windows]
    return jax.lax.switch(branch, [plain, *branches], *operands)


def find_runs(segments: Int[Array, "B T"]) -> tuple[Runs, Bool[Array, ""]]:
    """Return the segments of rows, and whether the slots of `_classes` suffice."""
    batch, length = segments.shape
    differs = segments[:, 1:] != segments[:, :-1]
    first = jnp.concatenate([jnp.ones((batch, 1), bool), differs], axis=1) & (segments > 0)
    first, real = first.reshape(-1), segments.reshape(-1) > 0
    index = jnp.arange(batch * length)
    start = jax.lax.cummax(jnp.where(first, index, 0))
    counts = jnp.zeros(batch * length, jnp.int32).at[start].add(real.astype(jnp.int32))
    runs = Runs(start, jnp.where(real, counts[start], 0))
    shortest, longest = _classes(length)[-1]
    count = jnp.sum(first & runs.of_length(shortest, longest))
    return runs, count <= SLOTS * (batch * length // longest)


def _padded_length(length: int) -> int:
    """Return the least length from `length` that can be halved to MIN_CLASS or less."""
    halvings = max(0, -(-length // MIN_CLASS) - 1).bit_length()
    return -(-length // 2**halvings) * 2**halvings


def _classes(length: int) -> list[tuple[int, int]]:
    """Return (shortest, longest) of each class of lengths of segments, from whole rows to 1."""
    longest = [length]
    while longest[-1] > MIN_CLASS:
        longest.append(longest[-1] // 2)
    return list(zip([x + 1 for x in longest[1:]] + [1], longest, strict=True))


def _pad_rows(x: Shaped[Array, "B T ..."], length: int) -> Shaped[Array, "B L ..."]:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))


class Slots(NamedTuple):
    """The segments of one class as cuDNN takes them, and the tokens in them."""

    longest: int
    first: Int[Array, "S"]  # index of each segment's first token; N = an empty slot
    lengths: Int[Array, "S"]
    slot: Int[Array, "N"]  # of each token
    position: Int[Array, "N"]  # of each token in its segment
    member: Bool[Array, "N"]  # whether a token is of this class

    @classmethod
    def of(cls, runs: Runs, shortest: int, longest: int) -> Slots:
        """Return the segments of a class of lengths, in order."""
        index = jnp.arange(runs.start.size)
        member = runs.of_length(shortest, longest)
        starts = member & (runs.start == index)
        size = SLOTS * (index.size // longest)
        number = jnp.cumsum(starts) - 1
        empty = jnp.full(size, index.size, jnp.int32)
        first = empty.at[jnp.where(starts, number, size)].set(index, mode="drop")
        lengths = jnp.where(first < index.size, runs.length[jnp.minimum(first, index.size - 1)], 0)
        return cls(longest, first, lengths, number[runs.start], index - runs.start, member)

    def lse_of_tokens(self, statistics: Float[Array, "S H s"]) -> Float[Array, "N H"]:
        """Return the log-sum-exp of each token of this class from the slots; arbitrary for other classes."""
        return statistics[self.slot, :, self.position]

    def statistics(self, lse: Float[Array, "N H"]) -> Float[Array, "S H s"]:
        """Invert `lse_of_tokens`; past the end of a segment the weights exp(score - lse) are 0."""
        position = jnp.arange(self.longest)
        index = jnp.minimum(self.first[:, None] + position, len(lse) - 1)
        inside = position < self.lengths[:, None]
        return jnp.moveaxis(jnp.where(inside[..., None], lse[index], -MASKED_LSE), 2, 1)


def _forward(spec: AttentionSpec, window: int, runs: Runs, q, k, v):
    batch, length, heads, _ = q.shape
    padded = len(runs.start) // batch
    q, k, v = (_flat(x, padded) for x in (q, k, v))

    def compute(slots, q, k, v):
        out, statistics = fused_call(False, spec, window % length, slots, q, k, v)
        return out, slots.lse_of_tokens(statistics)

    empty = jnp.zeros_like(q), jnp.full((batch * padded, heads), MASKED_LSE)
    out, lse = _by_class(compute, runs, padded, empty, (q, k, v))
    return _rows(out, batch, length), jnp.moveaxis(_rows(lse, batch, length), 1, 2)


def _backward(spec: AttentionSpec, window: int, runs: Runs, q, k, v, out, lse, d_out):
    batch, length = q.shape[:2]
    padded = len(runs.start) // batch
    operands = q, k, v, out, jnp.moveaxis(lse, 1, 2), d_out.astype(q.dtype)
    q, k, v, out, lse, d_out = (_flat(x, padded) for x in operands)

    def compute(slots, q, k, v, out, lse, d_out):
        return fused_call(True, spec, window % length, slots, q, k, v, slots.statistics(lse), d_out, out)

    empty = tuple(jnp.zeros_like(x) for x in (q, k, v))
    gradients = _by_class(compute, runs, padded, empty, (q, k, v, out, lse, d_out))
    return tuple(_rows(x, batch, length) for x in gradients)


def _by_class(compute: Callable, runs: Runs, length: int, results: tuple, operands: tuple) -> tuple:
    """Return `results` with the tokens of each class set by `compute(slots, *operands)`.

    cuDNN does not write the tokens of other classes.
    """
    for bounds in _classes(length):
        slots = Slots.of(runs, *bounds)

        def add(results, *operands, slots=slots):
            select = lambda new, old: jnp.where(slots.member.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
            return tuple(map(select, compute(slots, *operands), results))

        results = jax.lax.cond(slots.member.any(), add, lambda results, *_: results, results, *operands)
    return results


def _flat(x: Shaped[Array, "B T ..."], length: int) -> Shaped[Array, "N ..."]:
    x = _pad_rows(x, length)
    return x.reshape(-1, *x.shape[2:])


def _rows(x: Shaped[Array, "N ..."], batch: int, length: int) -> Shaped[Array, "B T ..."]:
    return x.reshape(batch, -1, *x.shape[1:])[:, :length]


def fused_call(
    is_backward: bool,
    spec: AttentionSpec,
    window: int,
    slots: Slots,
    q: Float[Array, "N H E"],
    k: Float[Array, "N K E"],
    v: Float[Array, "N K E"],
    *residuals: Array,
) -> tuple[Array, ...]:
    """Call cuDNN for the segments of one class.

    Args:
        window: 0 = none.
        residuals: of the backward pass: statistics [S, H, s], d_out and out.

    Returns: (out, statistics) or (dq, dk, dv); tokens outside the segments are not written.
    """
    tokens, longest = len(q), slots.longest
    batch = tokens // longest  # XLA takes SLOTS segments of up to `longest` tokens for each
    rows = lambda x: x.reshape(batch, longest, *x.shape[1:])
    offsets = jnp.append(slots.first, jnp.int32(tokens))
    ends = slots.lengths, slots.lengths, *(offsets * (x.shape[1] * x.shape[2]) for x in (q, k))
    like = lambda x: jax.ShapeDtypeStruct((batch, x.shape[1], longest, x.shape[2]), x.dtype)
    # XLA asks cuDNN for the size if it is installed; else (`plan`) use float32 dq, dk, dv and a sum.
    size = is_backward * 4 * SLOTS * tokens * q.shape[1] * (3 * q.shape[2] + 1)
    workspace = jax.ShapeDtypeStruct((size,), jnp.uint8)
    if is_backward:
        statistics, d_out, out = residuals
        results, target = [like(x) for x in (q, k, v)], "__cudnn$fmhaSoftmaxBackward"
        operands = *map(rows, (q, k, v)), statistics, rows(d_out), rows(out), *ends
    else:
        statistics = jax.ShapeDtypeStruct((SLOTS * batch, q.shape[1], longest), jnp.float32)
        results, target = [like(q), statistics], "__cudnn$fmhaSoftmax"
        operands = *map(rows, (q, k, v)), *ends
    outputs = jax.ffi.ffi_call(
        target,
        [*results, workspace],
        output_layouts=[(0, 2, 1, 3) if x.ndim == 4 else None for x in (*results, workspace)],
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(is_backward, spec, window, rows(q)),
    )(*operands)
    flat = lambda x: jnp.swapaxes(x, 1, 2).reshape(tokens, x.shape[1], x.shape[3]) if x.ndim == 4 else x
    return tuple(map(flat, outputs[:-1]))


def _backend_config(is_backward: bool, spec: AttentionSpec, window: int, q: Float[Array, "B s H E"]) -> str:
    """Return XLA's CudnnfMHABackendConfig (xla/service/gpu/backend_configs.proto) as JSON."""
    batch, longest, heads, _ = q.shape
    # Which dims each product contracts, and which are of the batch.
    dots = {
        f"{name}_dot_dimension_numbers": {
            f"{side}_{kind}_dimensions": values
            for i, side in enumerate(("lhs", "rhs"))
            for kind, values in (("contracting", [str(contracted[i])]), ("batch", ["0", str(of_heads[i])]))
        }
        for name, (contracted, of_heads) in DOTS.items()
        if ("grad" in name) == is_backward
    }
    scores = {
        "element_type": TYPES[q.dtype.name],
        "dimensions": [str(size) for size in (batch, heads, longest, longest)],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
    }
    settings = {
        "algorithm": {"algo_id": "0", "is_cudnn_frontend": True, "workspace_size": "0"},
        "fmha_scale": spec.scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL",
        "sliding_window_length": window,
        "max_seg_per_batch": SLOTS,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": settings | dots})
