"""Attention over the parts of a context, put together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def combine(out: Float[Array, "N *R E"], lse: Float[Array, "N *R 1"]) -> Float[Array, "*R E"]:
    """Attention over N parts of the keys, from that over each part and its log-sum-exp."""
    if len(out) == 1:
        return out[0]
    weights = jax.nn.softmax(lse, axis=0)
    return jnp.sum(weights * out.astype(jnp.float32), axis=0)
