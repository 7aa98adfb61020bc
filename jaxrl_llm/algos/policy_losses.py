"""Surrogate losses of the policy gradient: per-token arrays in, per-token loss out."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def ppo_clip(
    policy: Float[Array, "B T"],
    old: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(policy - old), PPO (arXiv 1707.06347, eq. 7).

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476, eq. 10). `dual_clip` c bounds the loss of a
    negative advantage by -A c (arXiv 1912.09729, eq. 5). The log-ratio is held within +-20.

    Returns: (loss, clipped): where the clip took the gradient away.
    """
    ratio = jnp.exp(jnp.clip(policy - old, -20.0, 20.0))
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(plain, clipped)
    is_clipped = clipped > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        over = (advantages < 0) & (loss > bound)
        loss, is_clipped = jnp.where(over, bound, loss), is_clipped | over
    return loss, is_clipped
