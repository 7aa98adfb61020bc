"""Attention within a row, without the work above the diagonal."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_kernels.flash_attention.reference import attention

BLOCKS = 4
"""5/8 of the products of a full square. More blocks save little more and compile longer."""
SHORTEST = 256
"""Queries of a block at least: below this it saves nothing in a whole training step and compiles longer."""


def causal_attention(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    visible: Bool[Array, "B T T"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T H E"]:
    """`attention` where no token sees a later one: a block of queries reads the keys up to its own end.

    Args:
        visible: may be narrower than causal (segments, windows); what it says of later tokens is ignored
            between blocks, so it must hide them.

    Returns: as `attention`.
    """
    length = q.shape[1]
    block = max(-(-length // BLOCKS), SHORTEST)
    outs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        seen = visible[:, start:end, :end]
        outs.append(attention(q[:, start:end], k[:, :end], v[:, :end], seen, scale=scale, softcap=softcap))
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)
