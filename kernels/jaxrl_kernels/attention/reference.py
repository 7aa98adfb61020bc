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
    kv_heads, group = k.shape[2], heads // k.shape[2]
    # Queries and the heads that share keys are one dim, X = T * G: plain batched matrix products, which
    # take a CPU two thirds of the time of products over (K, G, T).
    q = jnp.moveaxis(q.reshape(batch, length, kv_heads, group, dim), 1, 2)
    q = q.reshape(batch, kv_heads, length * group, dim)
    scores = jnp.einsum("bkxe,bcke->bkxc", q, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    shape = scores.shape
    scores = scores.reshape(batch, kv_heads, length, group, -1)
    scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf).reshape(shape)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30)  # finite: a blind row stays NaN-free
    weights = jnp.exp(scores - jax.lax.stop_gradient(top))
    total = weights.sum(axis=-1, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    out = jnp.einsum("bkxc,bcke->bkxe", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = (out / total).astype(q.dtype).reshape(batch, kv_heads, length, group, dim)
    return jnp.moveaxis(out, 2, 1).reshape(batch, length, heads, dim)
