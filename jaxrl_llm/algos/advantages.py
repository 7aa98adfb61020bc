"""Advantages from outcome rewards."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Scale = Literal["std", "population_std", "batch_std", "none"]


def group_advantages(
    rewards: Float[Array, "N"],
    group: Int[Array, "N"],
    valid: Float[Array, "N"],
    scale: Scale = "std",
    eps: float = 1e-6,
) -> Float[Array, "N"]:
    """(reward - group mean) / (spread + eps), GRPO (arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: one a trajectory; those with valid 0 may be anything, NaN included.
        group: trajectories of one prompt share a number in [0, N).
        valid: 1, or 0 for a trajectory that takes no part (its advantage is 0).
        scale: "std" of the group (ddof 1), "population_std" (ddof 0), "batch_std" over all rewards (ddof 1),
            or "none" (Dr. GRPO, arXiv 2503.20783).

    A group of one keeps its reward (mean 0, std 1); a group of equal rewards gets zeros.
    """
    count, mean, square = group_moments(rewards, group, valid)
    alone = count == 1
    centred = rewards - jnp.where(alone, 0.0, mean)[group]
    if scale == "batch_std":
        total = valid.sum()
        average = jnp.sum(jnp.where(valid > 0, rewards, 0.0)) / jnp.maximum(total, 1.0)
        deviation = jnp.where(valid > 0, rewards - average, 0.0)
        spread = jnp.sqrt(jnp.sum(deviation**2) / jnp.maximum(total - 1, 1.0)) + eps
    elif scale == "none":
        spread = 1.0
    else:
        freedom = jnp.maximum(count - (1 if scale == "std" else 0), 1.0)
        spread = jnp.where(alone, 1.0, jnp.sqrt(square / freedom) + eps)[group]
    return jnp.where(valid > 0, centred / spread, 0.0)


def group_moments(
    rewards: Float[Array, "N"], group: Int[Array, "N"], valid: Float[Array, "N"]
) -> tuple[Float[Array, "N"], Float[Array, "N"], Float[Array, "N"]]:
    """(members, mean, sum of squared deviations) of each group number; zeros for numbers not used."""
    total = lambda x: jax.ops.segment_sum(jnp.where(valid > 0, x, 0.0), group, rewards.shape[0])
    count = total(jnp.ones_like(rewards))
    mean = total(rewards) / jnp.maximum(count, 1.0)
    return count, mean, total((rewards - mean[group]) ** 2)


def zero_variance_fraction(
    rewards: Float[Array, "N"], group: Int[Array, "N"], valid: Float[Array, "N"]
) -> Float[Array, ""]:
    """Share of the groups whose rewards are all equal: they teach nothing."""
    count, _, square = group_moments(rewards, group, valid)
    used = count > 0
    return jnp.sum(used & (square <= 1e-12)) / jnp.maximum(jnp.sum(used), 1)
