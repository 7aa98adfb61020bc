"""The definition of attention here: dense, float32 statistics, readable in a minute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attention(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B C K E"],
    v: Float[Array, "B C K E"],
    visible: Bool[Array, "B T C"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T H E"]:
    """softmax(scale * q k^T) v over the visible keys, H/K query heads sharing each key head.

    A query that sees nothing (padding) returns zeros. With `softcap` c the scores become
    c * tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2).

    Returns: the type of q; scores and softmax are float32.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("btkge,bcke->bkgtc", q, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    visible = visible[:, None, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30)  # finite: a blind row stays NaN-free
    weights = jnp.exp(scores - jax.lax.stop_gradient(top))
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    out = jnp.einsum("bkgtc,bcke->btkge", (weights / total).astype(v.dtype), v)
    return out.reshape(batch, length, heads, dim)
