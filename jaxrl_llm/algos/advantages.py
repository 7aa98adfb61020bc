"""Advantages of responses: each score is compared with its group or batch.

Scores are [N]. A score with valid 0 may be anything (even NaN), does not count and gets advantage 0. `group`
numbers the prompts in [0, N).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algos.config import Scale


class GroupMoments(NamedTuple):
    """Statistics of each group number; zeros for numbers not used."""

    size: Float[Array, "N"]  # members, including members without a valid reward
    count: Float[Array, "N"]  # members with a valid reward
    mean: Float[Array, "N"]
    square: Float[Array, "N"]  # sum of squared deviations from the mean
    differs: Bool[Array, "N"]  # not all valid rewards are equal


def group_moments(
    rewards: Float[Array, "N"], group: Int[Array, "N"], valid: Float[Array, "N"]
) -> GroupMoments:
    """Compute the statistics of each group's valid rewards."""
    ones = jnp.ones_like(rewards)
    count = group_sum(ones, group, valid)
    mean = group_sum(rewards, group, valid) / jnp.maximum(count, 1.0)
    square = group_sum((rewards - mean[group]) ** 2, group, valid)
    largest = jax.ops.segment_max(jnp.where(valid > 0, rewards, -jnp.inf), group, rewards.shape[0])
    smallest = jax.ops.segment_min(jnp.where(valid > 0, rewards, jnp.inf), group, rewards.shape[0])
    return GroupMoments(group_sum(ones, group, ones), count, mean, square, largest > smallest)


def group_sum(x: Float[Array, "N"], group: Int[Array, "N"], valid: Float[Array, "N"]) -> Float[Array, "N"]:
    """Return the sum of x over the valid members of each group number."""
    return jax.ops.segment_sum(jnp.where(valid > 0, x, 0.0), group, x.shape[0])


def subtract_baseline(
    rewards: Float[Array, "N"],
    group: Int[Array, "N"],
    valid: Float[Array, "N"],
    *,
    baseline: Float[Array, "N"],
    moments: GroupMoments,
) -> Float[Array, "N"]:
    """Return reward - baseline; exactly 0 if all valid rewards of the group are equal.

    Otherwise the difference would be a rounding error, which `spread` enlarges: in float32 the mean of seven
    times 0.7 is 0.70000005. The only response to a prompt keeps its reward. If all other rewards of a group
    failed, the remaining response gets 0: it has nothing to compare with.
    """
    out = jnp.where(moments.differs[group], rewards - baseline, 0.0)
    out = jnp.where(moments.size[group] == 1, rewards, out)
    return jnp.where(valid > 0, out, 0.0)


def group_advantages(
    rewards: Float[Array, "N"],
    group: Int[Array, "N"],
    valid: Float[Array, "N"],
    scale: Scale = "std",
    *,
    eps: float = 1e-6,
) -> Float[Array, "N"]:
    """Return (reward - group mean) / (spread + eps), GRPO (arXiv 2402.03300, section 4.1.2).

    Args:
        scale: "std" of the group (ddof 1), "population_std" (ddof 0; ChatLearn), "batch_std" over all rewards
            (ddof 1), or "none" (Dr. GRPO, arXiv 2503.20783).
    """
    moments = group_moments(rewards, group, valid)
    centred = subtract_baseline(rewards, group, valid, baseline=moments.mean[group], moments=moments)
    return centred / spread(rewards, group, valid, scale, eps=eps)


def spread(
    rewards: Float[Array, "N"],
    group: Int[Array, "N"],
    valid: Float[Array, "N"],
    scale: Scale,
    *,
    eps: float = 1e-6,
) -> Float[Array, "N"]:
    """Return the divisor of an advantage, see `group_advantages`; 1 for a group of one."""
    if scale == "none":
        return jnp.ones_like(rewards)
    moments = group_moments(rewards, group, valid)
    if scale == "batch_std":
        _, variance = batch_moments(rewards, valid)
    else:
        variance = moments.square / jnp.maximum(moments.count - (1 if scale == "std" else 0), 1.0)
    return jnp.where(moments.count == 1, 1.0, jnp.sqrt(variance) + eps)[group]


def batch_moments(
    rewards: Float[Array, "N"], valid: Float[Array, "N"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return (mean, unbiased variance) of the valid rewards; exactly (value, 0) if all are equal."""
    total = valid.sum()
    mean = jnp.sum(jnp.where(valid > 0, rewards, 0.0)) / jnp.maximum(total, 1.0)
    largest = jnp.max(rewards, where=valid > 0, initial=-jnp.inf)
    smallest = jnp.min(rewards, where=valid > 0, initial=jnp.inf)
    mean = jnp.where(largest == smallest, largest, mean)
    square = jnp.sum(jnp.where(valid > 0, rewards - mean, 0.0) ** 2)
    return mean, square / jnp.maximum(total - 1, 1.0)


def batch_advantages(
    rewards: Float[Array, "N"], valid: Float[Array, "N"], scale: Scale = "none"
) -> Float[Array, "N"]:
    """Return reward - batch mean (REINFORCE), over the batch's std unless `scale` is "none"."""
    mean, variance = batch_moments(rewards, valid)
    divisor = 1.0 if scale == "none" else jnp.sqrt(variance) + 1e-6
    return jnp.where(valid > 0, (rewards - mean) / divisor, 0.0)


def leave_one_out(
    rewards: Float[Array, "N"], group: Int[Array, "N"], valid: Float[Array, "N"]
) -> Float[Array, "N"]:
    """Return reward - mean of the others = (k reward - sum) / (k - 1), RLOO (arXiv 2402.14740, eq. 8)."""
    moments = group_moments(rewards, group, valid)
    total = (moments.count * moments.mean)[group]
    others = (total - rewards) / jnp.maximum(moments.count - 1, 1.0)[group]
    return subtract_baseline(rewards, group, valid, baseline=others, moments=moments)
