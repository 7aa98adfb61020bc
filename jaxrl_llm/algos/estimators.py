"""The other estimators of advantages, and the tables of all of them by name.

Scores, `valid` and `group` are as in `algos.advantages`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.algos.advantages import (
    batch_advantages,
    group_advantages,
    group_moments,
    group_sum,
    leave_one_out,
    spread,
    subtract_baseline,
)
from jaxrl_llm.algos.config import AlgoConfig, Scale
from jaxrl_llm.algos.correction import importance_weights
from jaxrl_llm.algos.returns import gae, optimal_token_baseline, return_to_go
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Rollouts


def length_weighted(
    rewards: Float[Array, "N"], group: Int[Array, "N"], valid: Float[Array, "N"], lengths: Float[Array, "N"]
) -> Float[Array, "N"]:
    """Return reward - sum(length reward) / sum(length) of its group, OPO (arXiv 2505.23585, eq. 7).

    The baseline of least variance if the squared gradient of a response grows with its length.
    """
    weight = group_sum(lengths, group, valid)
    baseline = group_sum(lengths * rewards, group, valid) / jnp.maximum(weight, 1.0)
    return subtract_baseline(rewards, group, valid, baseline[group], group_moments(rewards, group, valid))


def rescaled(
    rewards: Float[Array, "N"],
    group: Int[Array, "N"],
    valid: Float[Array, "N"],
    counted: Literal["groups", "rewards"] = "groups",
) -> Float[Array, "N"]:
    """Return alpha (reward - group mean), GPG (arXiv 2504.02546, eq. 6).

    alpha = responses / responses counted, so that groups of equal rewards, which have no gradient, do not
    shrink the step.

    Args:
        counted: responses of "groups" whose rewards differ (the paper), or whose own "rewards" are not 0
            (veRL).
    """
    moments = group_moments(rewards, group, valid)
    informative = (moments.differs | (moments.size == 1))[group] if counted == "groups" else rewards != 0
    alpha = valid.sum() / jnp.maximum(jnp.sum(informative & (valid > 0)), 1)
    return alpha * group_advantages(rewards, group, valid, "none")


def best_over_second(
    rewards: Float[Array, "N"], group: Int[Array, "N"], valid: Float[Array, "N"]
) -> Float[Array, "N"]:
    """Return best - second best for the best of its group, 0 for others: pass@k (arXiv 2503.19595, eq. 9).

    The best response counts by its lead over the second; a tie or a group of one gets 0.
    """
    top = lambda x: jax.ops.segment_max(x, group, rewards.shape[0])[group]
    scored = jnp.where(valid > 0, rewards, -jnp.inf)
    is_best = (valid > 0) & (scored == top(scored))
    alone = group_sum(is_best.astype(rewards.dtype), group, valid)[group] == 1
    second = top(jnp.where(is_best, -jnp.inf, scored))
    wins = is_best & alone & jnp.isfinite(second)
    return jnp.where(wins, jnp.where(valid > 0, rewards, 0.0) - jnp.where(wins, second, 0.0), 0.0)


def decoupled(
    components: Float[Array, "N C"],
    group: Int[Array, "N"],
    valid: Float[Array, "N"],
    weights: tuple[float, ...] = (),
    scale: Scale = "std",
) -> Float[Array, "N"]:
    """Return the weighted sum of each reward normalised in its group: GDPO (arXiv 2601.05242, eq. 4 and 5).

    A reward that is NaN is left out: the response counts by its other rewards.

    Args:
        components: the separate rewards.
        weights: one per reward; empty = all 1.

    Raises:
        UserError: the numbers of weights and rewards differ.
    """
    number = components.shape[1]
    if weights and len(weights) != number:
        raise UserError(
            f"--algo.component_weights has {len(weights)} values for {number} rewards: give one each for "
            "reward.name, reward.shaping and reward.models, in this order."
        )

    def normalised(rewards: Float[Array, "N"]) -> Float[Array, "N"]:
        known = valid * jnp.isfinite(rewards)
        return group_advantages(jnp.where(known > 0, rewards, 0.0), group, known, scale)

    each = jax.vmap(normalised, in_axes=1, out_axes=1)(components)
    return each @ jnp.asarray(weights or (1.0,) * number, components.dtype)


WHITENED = {"gae", "reinforce_pp", "reinforce_pp_baseline", "gdpo"}  # by their definition


def less_greedy(returns: Float[Array, "N R"], r: Rollouts) -> Float[Array, "N R"]:
    """Return returns - reward of the greedy response (ReMax, arXiv 2310.10505); 0 if the greedy reward
    failed."""
    greedy = r.greedy if r.greedy_process is None else r.greedy + r.greedy_process
    return jnp.where(jnp.isfinite(greedy)[:, None], returns - greedy[:, None], 0.0)


def less_optimal_value(
    rewards: Float[Array, "N"], group: Int[Array, "N"], valid: Float[Array, "N"], beta: float
) -> Float[Array, "N"]:
    """Return reward - V, V = beta log mean exp(reward / beta) of a group (A*-PO, arXiv 2505.20686)."""
    largest = jax.ops.segment_max(jnp.where(valid > 0, rewards, -jnp.inf), group, rewards.shape[0])
    below = jnp.where(valid > 0, rewards - largest[group], 0.0)
    count = group_sum(jnp.ones_like(rewards), group, valid)
    mean = group_sum(jnp.exp(below / beta), group, valid) / jnp.maximum(count, 1.0)
    return jnp.where(valid > 0, below - beta * jnp.log(jnp.maximum(mean, 1e-30))[group], 0.0)


def _passk(scores: Float[Array, "N"], r: Rollouts, config: AlgoConfig) -> Float[Array, "N"]:
    gain = best_over_second(scores, r.group, r.valid)
    return gain / spread(scores, r.group, r.valid, config.scale)


def _gpg(counted: Literal["groups", "rewards"]) -> Callable[..., Float[Array, "N"]]:
    def fn(scores: Float[Array, "N"], r: Rollouts, config: AlgoConfig) -> Float[Array, "N"]:
        advantages = rescaled(scores, r.group, r.valid, counted)
        return advantages / spread(scores, r.group, r.valid, config.scale)

    return fn


def _otb(zero_tail: bool) -> Callable[..., Float[Array, "N R"]]:
    def fn(rewards: Float[Array, "N R"], r: Rollouts, config: AlgoConfig) -> Float[Array, "N R"]:
        mask = r.mask * r.valid[:, None]
        returns = return_to_go(rewards, mask, config.gamma)
        ratio = None
        if config.correction.weight != "none":
            ids = jnp.ones(mask.shape, jnp.int32)
            ratio = importance_weights(r.old_logprobs - r.rollout_logprobs, mask, ids, config.correction)
        return optimal_token_baseline(
            returns, r.old_logprobs, r.sum_pi_squared, r.group, mask, ratio, zero_tail
        )

    return fn


PER_RESPONSE: dict[str, Callable[..., Float[Array, "N"]]] = {
    "grpo": lambda s, r, c: group_advantages(s, r.group, r.valid, c.scale),
    "rloo": lambda s, r, c: leave_one_out(s, r.group, r.valid),
    "reinforce": lambda s, r, c: batch_advantages(s, r.valid, c.scale),
    "reinforce_pp_baseline": lambda s, r, c: group_advantages(s, r.group, r.valid, "none"),
    "opo": lambda s, r, c: length_weighted(s, r.group, r.valid, r.mask.sum(axis=1)),
    "gpg": _gpg("groups"),
    "gpg_rewards": _gpg("rewards"),
    "passk": _passk,
    "gdpo": lambda s, r, c: decoupled(r.components, r.group, r.valid, c.component_weights, c.scale),
    "optimal_value": lambda s, r, c: less_optimal_value(s, r.group, r.valid, c.value_beta),
    "reward": lambda s, r, c: jnp.where(r.valid > 0, s, 0.0),
}
"""Scores [N], rollouts, config -> advantage of each response."""

PER_TOKEN: dict[str, Callable[..., Float[Array, "N R"]]] = {
    "gae": lambda t, r, c: gae(t, r.values, r.mask * r.valid[:, None], c.gamma, c.lam)[0],
    "reinforce_pp": lambda t, r, c: return_to_go(t, r.mask, c.gamma),
    "remax": lambda t, r, c: less_greedy(return_to_go(t, r.mask, c.gamma), r),
    "otb": _otb(False),
    "otb_tail": _otb(True),
}
"""Rewards [N, R], rollouts, config -> advantage of each token."""
