"""PPO's clipped surrogate, and what other surrogates need of it: per-token arrays in, per-token loss out."""

from __future__ import annotations

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
    loss_cap: float | None = None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """`clip` of the ratio r = exp(policy - old), PPO (arXiv 1707.06347, eq. 7)."""
    return clip(jnp.exp(log_ratio(policy, old)), advantages, clip_low, clip_high, dual_clip, loss_cap)


def clip(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    loss_cap: float | None = None,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and where a bound took the gradient away.

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476, eq. 10). `dual_clip` c bounds the loss of a
    negative advantage by -A c (arXiv 1912.09729, eq. 5), `loss_cap` that of every token (ChatLearn).
    """
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(plain, clipped)
    is_clipped = clipped > plain
    bounds = []
    if dual_clip is not None:
        bounds.append(jnp.where(advantages < 0, -advantages * dual_clip, jnp.inf))
    if loss_cap is not None:
        bounds.append(jnp.full_like(loss, loss_cap))
    for bound in bounds:
        over = loss > bound
        loss, is_clipped = jnp.where(over, bound, loss), is_clipped | over
    return loss, is_clipped
