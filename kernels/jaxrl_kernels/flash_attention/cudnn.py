"""NVIDIA's cuDNN attention, as far as JAX's public function reaches it; by name only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels.flash_attention.spec import AttentionSpec


def unsupported(head_dim: int, dtype: DTypeLike) -> str | None:
    """Return why cuDNN does not take q, k and v of such a head dim and type, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {jnp.dtype(dtype).name}"
    if head_dim % 8 or head_dim > 256:
        return f"takes a head_dim that is a multiple of 8 up to 256, not {head_dim}"
    return None


def cudnn_attention(
    spec: AttentionSpec,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"] | None,
    window: int | Int[Array, ""] | None,
    return_lse: bool,
) -> Float[Array, "B T H E"]:
    """Compute `api.flash_attention`.

    Raises:
        ValueError: what JAX's public function does not do, and the implementation that does.
    """
    limits = {
        "packed segments": segments is not None,
        "a float32 log-sum-exp": return_lse,
        "a softcap": spec.softcap is not None,
        "a traced window": isinstance(window, jax.core.Tracer),
        "a window without causal order": window is not None and not spec.causal,
    }
    if exceeded := [limit for limit, is_exceeded in limits.items() if is_exceeded]:
        raise ValueError(f'implementation="cudnn" cannot do {", ".join(exceeded)}; "auto" can')
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=spec.scale,
        is_causal=spec.causal,
        local_window_size=None if window is None else (int(window) - 1, 0),
        implementation="cudnn",
    )
