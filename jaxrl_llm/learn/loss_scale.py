"""Dynamic loss scaling for float16 (arXiv 1710.03740, section 3.2).

Gradients of activations below 3e-8 are 0 in float16. So the loss is multiplied by a power of two before the
backward pass, and the gradients of the float32 weights are divided by it, which is exact. If they overflow,
the update is skipped and counted like any other that is not finite, and the scale is halved.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.structs import Params

INITIAL, MIN, MAX = 2.0**15, 1.0, 2.0**24
GROWTH_INTERVAL = 200
"""Updates between doublings of the scale. PyTorch's 2,000 is more than most RL runs have."""


def initial_loss_scale(dtype: DTypeLike) -> Float[Array, ""] | None:
    """Return the scale of the first update; None for types with the range of float32."""
    return jnp.float32(INITIAL) if jnp.dtype(dtype) == jnp.float16 else None


def scale_loss(loss: Float[Array, ""], scale: Float[Array, ""] | None) -> Float[Array, ""]:
    """Return loss times scale."""
    return loss if scale is None else loss * scale


def unscale(grads: Params, scale: Float[Array, ""] | None) -> Params:
    """Return float32 gradients of the loss from those of the scaled loss."""
    return grads if scale is None else jax.tree.map(lambda g: g / scale, grads)


def next_loss_scale(
    scale: Float[Array, ""] | None, finite: Bool[Array, ""], version: Int[Array, ""]
) -> Float[Array, ""] | None:
    """Return the scale of the next update: half after one that was skipped, double every GROWTH_INTERVAL.

    Args:
        finite: whether the update was applied.
        version: updates applied so far, this one included.
    """
    if scale is None:
        return None
    grown = jnp.where(version % GROWTH_INTERVAL == 0, 2 * scale, scale)
    return jnp.clip(jnp.where(finite, grown, scale / 2), MIN, MAX)
