"""Rotary position embedding: frequencies of a config, and their use."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.config import TransformerConfig


def rope_tables(
    config: TransformerConfig, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T E/2"], Float[Array, "B T E/2"]]:
    """cos and sin of every position, float32."""
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = jnp.asarray(config.rope.theta**-half, jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "B T H E"], cos: Float[Array, "B T E/2"], sin: Float[Array, "B T E/2"]
) -> Float[Array, "B T H E"]:
    """Rotate the pairs (x[i], x[i + E/2]), HF's half-split layout, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
