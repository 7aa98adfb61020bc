"""Attention within rows of packed sequences: one function over several implementations."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_kernels.dispatch import choose, load_implementation
from jaxrl_kernels.flash_attention.sinks import add_sinks, d_sinks
from jaxrl_kernels.flash_attention.spec import NO_WINDOW, AttentionSpec, DynamicMask

SAVED = "flash_attention"
"""Name of the residuals for `jax.checkpoint` policies: saving them (the size of q, and one number per head
and token) avoids a second forward pass."""


def flash_attention(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"] | None = None,
    last: Int[Array, "B T"] | None = None,
    *,
    scale: float,
    window: int | Int[Array, ""] | Int[Array, "B T"] | None = None,
    windows: tuple[int, ...] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
) -> Float[Array, "B T H E"] | tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Compute softmax(scale * q k^T) v; each token attends to earlier tokens of its segment, and of the
    segments that it continues.

    Args:
        segments: number of each token's segment, 1, 2, ... in the order of the row, 0 = padding; None = one
            segment per row.
        last: number of the last segment that continues each token's segment (the segment itself if none
            does), 0 = padding; None = no segment continues another. Segments are in depth-first order: for
            the trees 1 -> (2 -> 3, 4) and 5, `last` is 4, 3, 3, 4, 5.
        window: sliding window: how many tokens of the row a token attends to, including itself; may be
            traced, or an array with a window for each token. None = all. The window also counts tokens of
            other branches in between: with `last`, pass the windows of `spec.row_windows`.
        windows: all possible values of a traced `window`; None = any value, which cuDNN cannot compile.
        softcap: c: scores become c * tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2).
        sinks: the score of one more key of value 0 for each head (`sinks.add_sinks`); None = none.
        implementation: "auto" or one of `dispatch.OPERATIONS`.
        return_lse: also return the log-sum-exp of the scores, including the sink, float32, in nats.

    Returns: like q, 0 for a fully masked token; with `return_lse` (out, lse).

    Raises:
        ValueError: the implementation does not support the inputs; the message names one that does.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads: not a multiple")
    window = NO_WINDOW if window is None else window
    windows = (window,) if isinstance(window, int) else windows
    spec = AttentionSpec(scale, softcap, windows, branches=last is not None)
    name, _ = choose("flash_attention", q.shape[3], q.dtype, softcap, implementation=implementation)
    if implementation == "cudnn" and spec.branches:
        raise ValueError(
            "flash_attention: cudnn: no segment may continue another; use implementation='blockwise'"
        )
    # Static arguments select the compiled program; the window is traced.
    segments = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments
    static, window = _Static(name, spec, return_lse), jnp.asarray(window, jnp.int32)
    out, lse = _attention(static, q, k, v, segments, last, window, sinks)
    return (out, lse) if return_lse else out


class _Static(NamedTuple):
    """Static arguments of `_attention`."""

    name: str
    spec: AttentionSpec
    with_lse: bool  # whether the log-sum-exp may have a gradient


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, q, k, v, segments, last, window, sinks):
    module = load_implementation("flash_attention", static.name)
    last = segments if last is None else last  # one array, as cuDNN needs to know
    results = module.forward(static.spec, q, k, v, segments, last, DynamicMask(window=window))
    return results if sinks is None else add_sinks(*results, sinks)


def _attention_forward(static: _Static, q, k, v, segments, last, window, sinks):
    results = _attention(static, q, k, v, segments, last, window, sinks)
    out, lse = (checkpoint_name(x, SAVED) for x in results)
    return (out, lse), (q, k, v, segments, last, window, sinks, out, lse)


def _attention_backward(static: _Static, residuals, gradients):
    q, k, v, segments, last, window, sinks, *results = residuals
    module = load_implementation("flash_attention", static.name)
    gradients = gradients[0], gradients[1] if static.with_lse else None
    last, mask = segments if last is None else last, DynamicMask(window=window)
    d = module.backward(static.spec, q, k, v, segments, last, mask, *results, *gradients)
    return *d, None, None, None, None if sinks is None else d_sinks(sinks, *results, *gradients)


_attention.defvjp(_attention_forward, _attention_backward)
