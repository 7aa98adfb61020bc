"""Surrogate losses with a clipped ratio: per-token arrays in, per-token loss out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

BOUND = 20.0  # nats; log-ratios are held within it, so that no ratio overflows


def log_ratio(policy: Float[Array, "B T"], old: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """policy - old, held within +-20."""
    return jnp.clip(policy - old, -BOUND, BOUND)


def ppo_clip(
    policy: Float[Array, "B T"],
    old: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """`clip` of the ratio r = exp(policy - old), PPO (arXiv 1707.06347, eq. 7)."""
    return clip(jnp.exp(log_ratio(policy, old)), advantages, clip_low, clip_high, dual_clip)


def clip(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and where the clip took the gradient away.

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476, eq. 10). `dual_clip` c bounds the loss of a
    negative advantage by -A c (arXiv 1912.09729, eq. 5).
    """
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(plain, clipped)
    is_clipped = clipped > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        over = (advantages < 0) & (loss > bound)
        loss, is_clipped = jnp.where(over, bound, loss), is_clipped | over
    return loss, is_clipped


def sequence_ratio(policy: Float[Array, "B T"], mean_log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """GSPO's ratio s = exp(mean log-ratio of the sequence), in its token form sg[s] pi / sg[pi].

    Value and, where the advantage is that of the sequence, gradient are those of s (arXiv 2507.18071,
    eq. 14).
    """
    fixed = jax.lax.stop_gradient(jnp.clip(mean_log_ratio, -BOUND, BOUND) - policy)
    return jnp.exp(fixed + policy)
