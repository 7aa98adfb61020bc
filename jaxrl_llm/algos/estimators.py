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
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Rollouts

Whitening = Literal["unbiased", "biased"]


def on_last_token(x: Float[Array, "N"], mask: Float[Array, "N R"]) -> Float[Array, "N R"]:
    """Return x on the last token of each row whose mask is 1, zeros elsewhere."""
    written = mask > 0
    rank = jnp.cumsum(written, axis=1)
    return jnp.where(written & (rank == rank[:, -1:]), x[:, None], 0.0)


def return_to_go(
    rewards: Float[Array, "N R"], mask: Float[Array, "N R"], gamma: float = 1.0
) -> Float[Array, "N R"]:
    """Return G_t = r_t + gamma G_(t+1), over the row's own tokens; 0 where mask is 0."""

    def step(after: Float[Array, "N"], now: tuple) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
        reward, own = now
        value = jnp.where(own > 0, reward + gamma * after, after)
        return value, jnp.where(own > 0, value, 0.0)

    _, out = jax.lax.scan(step, jnp.zeros(mask.shape[0]), (rewards.T, mask.T), reverse=True)
    return out.T


def gae(
    rewards: Float[Array, "N R"],
    values: Float[Array, "N R"],
    mask: Float[Array, "N R"],
    gamma: float = 1.0,
    *,
    lam: float = 1.0,
) -> tuple[Float[Array, "N R"], Float[Array, "N R"]]:
    """Return (advantages, returns) by generalized advantage estimation (arXiv 1506.02438, eq. 16).

    returns = advantages + values, delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lam A_(t+1).

    Args:
        values: V of the state in which the token was chosen; t + 1 is the row's next own token (veRL, RL2).
    """
    rewards, values = (jnp.where(mask > 0, x, 0.0) for x in (rewards, values))

    def step(after: tuple, now: tuple) -> tuple[tuple, Float[Array, "N"]]:
        (next_value, next_advantage), (reward, value, own) = after, now
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        value = jnp.where(own > 0, value, next_value)
        advantage = jnp.where(own > 0, advantage, next_advantage)
        return (value, advantage), advantage

    zeros = jnp.zeros(mask.shape[0])
    _, out = jax.lax.scan(step, (zeros, zeros), (rewards.T, values.T, mask.T), reverse=True)
    advantages = jnp.where(mask > 0, out.T, 0.0)
    return advantages, advantages + values


def whiten(
    x: Float[Array, "N R"], mask: Float[Array, "N R"], how: Whitening = "unbiased"
) -> Float[Array, "N R"]:
    """Return (x - mean) / std over the tokens whose mask is 1; zeros elsewhere.

    unbiased: variance with n - 1, plus 1e-8 (veRL, RL2). biased: with n, at least 1e-8 (OpenRLHF).
    """
    count = mask.sum()
    kept = jnp.where(mask > 0, x, 0.0)
    largest = jnp.max(x, where=mask > 0, initial=-jnp.inf)
    differs = largest > jnp.min(x, where=mask > 0, initial=jnp.inf)  # else std is rounding error
    deviation = jnp.where((mask > 0) & differs, x - kept.sum() / jnp.maximum(count, 1.0), 0.0)
    square = jnp.sum(deviation**2)
    if how == "unbiased":
        return deviation * jax.lax.rsqrt(square / jnp.maximum(count - 1, 1.0) + 1e-8)
    return deviation * jax.lax.rsqrt(jnp.maximum(square / jnp.maximum(count, 1.0), 1e-8))


def optimal_token_baseline(
    returns: Float[Array, "N R"],
    logprobs: Float[Array, "N R"],
    sum_pi_squared: Float[Array, "N R"],
    group: Int[Array, "N"],
    *,
    mask: Float[Array, "N R"],
    ratio: Float[Array, "N R"] | None = None,
    zero_tail: bool = False,
) -> Float[Array, "N R"]:
    """Return G_t - B_t, B_t = sum(G_t W_t) / sum(W_t) over the group's responses at their t-th masked-in
    token.

    W_t is the running sum of 1 - 2 p + sum(p^2), the squared gradient of the logits: a baseline of least
    variance for each token (veRL's optimal_token_baseline). A group of one has no baseline. If all other
    rewards of a group failed, the remaining response gets 0.

    Args:
        returns: reward-to-go G.
        logprobs: of the chosen tokens, nats.
        sum_pi_squared: sum over the vocabulary of p^2.
        ratio: importance weights rho of the tokens; W then sums rho^2 times the above.
        zero_tail: no baseline at tokens that only the longest response of a group reaches (else the advantage
            is 0 there).
    """
    # The weight of each token: the squared gradient of the logits, summed up to it.
    own = mask > 0
    p = jnp.exp(logprobs)
    energy = (1.0 - p) ** 2 + jnp.maximum(sum_pi_squared - p**2, 0.0)  # max: p may be of older weights
    if ratio is not None:
        energy = energy * ratio**2
    weight = jnp.where(own, jnp.cumsum(jnp.where(own, energy, 0.0), axis=1), 0.0)
    # Sums over the group by rank: the t-th tokens of its responses are compared, wherever gaps are.
    rank = jnp.maximum(jnp.cumsum(own, axis=1) - 1, 0)
    table = group[:, None], rank
    by_rank = lambda x: jnp.zeros_like(weight).at[table].add(jnp.where(own, x, 0.0))[table]
    largest = jnp.full_like(weight, -jnp.inf).at[table].max(jnp.where(own, returns, -jnp.inf))[table]
    smallest = jnp.full_like(weight, jnp.inf).at[table].min(jnp.where(own, returns, jnp.inf))[table]
    baseline = by_rank(returns * weight) / (by_rank(weight) + 1e-8)
    baseline = jnp.where(largest == smallest, returns, baseline)  # equal returns: exactly 0
    # Single responses and, with `zero_tail`, tokens past all other responses have no baseline.
    count = lambda rows: jax.ops.segment_sum(rows.astype(weight.dtype), group, mask.shape[0])[group][:, None]
    size, members = count(jnp.ones(len(mask))), count(own.any(axis=1))
    tail = (by_rank(jnp.ones_like(weight)) == 1) & (members > 1)
    dropped = (size == 1) | (tail & zero_tail)
    return jnp.where(own, returns - jnp.where(dropped, 0.0, baseline), 0.0)


def length_weighted(
    rewards: Float[Array, "N"], group: Int[Array, "N"], valid: Float[Array, "N"], lengths: Float[Array, "N"]
) -> Float[Array, "N"]:
    """Return reward - sum(length reward) / sum(length) of its group, OPO (arXiv 2505.23585, eq. 7).

    The baseline of least variance if the squared gradient of a response grows with its length.
    """
    weight = group_sum(lengths, group, valid)
    baseline = group_sum(lengths * rewards, group, valid) / jnp.maximum(weight, 1.0)
    return subtract_baseline(
        rewards, group, valid, baseline=baseline[group], moments=group_moments(rewards, group, valid)
    )


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
    *,
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


def compare_turns(
    rewards: Float[Array, "N R"], rollouts: Rollouts, group: Int[Array, "N R"], *, gamma: float, scale: Scale
) -> Float[Array, "N R"]:
    """Return (G - group mean) / (spread + eps) of each turn, on all of its tokens, G_k = r_k + gamma G_(k+1).

    r_k is the sum of the turn's rewards. A turn without another one in its group gets 0: it has nothing to
    compare with.

    Args:
        group: number in [0, N R) of the group of turn k, in column k.
    """
    # Of each turn, by its number: whether the response has it, and its return.
    has_turn = _by_turn(jnp.ones_like(rewards), rollouts) * rollouts.valid[:, None] > 0
    taken = has_turn.astype(rewards.dtype)
    returns = return_to_go(_by_turn(rewards, rollouts), taken, gamma)
    # All turns of the step as one list.
    every, groups, valid = returns.ravel(), group.ravel(), taken.ravel()
    advantages = group_advantages(every, groups, valid, scale)
    alone = group_moments(every, groups, valid).count[groups] < 2
    advantages = jnp.where(alone, 0.0, advantages).reshape(returns.shape)
    return jnp.where(rollouts.mask > 0, jnp.take_along_axis(advantages, rollouts.turns, axis=1), 0.0)


def _by_turn(x: Float[Array, "N R"], rollouts: Rollouts) -> Float[Array, "N R"]:
    """Return the sums of x over the own tokens of turn k, in column k."""
    place = jnp.arange(x.shape[0])[:, None], rollouts.turns
    return jnp.zeros_like(x).at[place].add(jnp.where(rollouts.mask > 0, x, 0.0))


def same_turn(
    scores: Float[Array, "N"], rewards: Float[Array, "N R"], r: Rollouts, config: AlgoConfig
) -> Float[Array, "N R"]:
    """Compare the return of a turn with the same turn of the other responses: MT-GRPO (arXiv 2505.11821)."""
    longest = rewards.shape[1]
    group = r.group[:, None] * longest + jnp.arange(longest)
    return compare_turns(rewards, r, group, gamma=config.gamma, scale=config.scale)


def same_state(
    scores: Float[Array, "N"], rewards: Float[Array, "N R"], r: Rollouts, config: AlgoConfig
) -> Float[Array, "N R"]:
    """Return A^E + omega A^S: the response in its group, the turn among turns taken in the same state.

    GiGPO (arXiv 2505.10978, eq. 3 and 5 to 8).
    """
    place = jnp.arange(rewards.shape[0])[:, None], r.turns
    group = jnp.zeros_like(r.states).at[place].max(jnp.where(r.mask > 0, r.states, 0))
    of_steps = compare_turns(rewards, r, group, gamma=config.gamma, scale=config.scale)
    of_episodes = group_advantages(scores, r.group, r.valid, config.scale)
    return of_episodes[:, None] + config.omega * of_steps


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
            returns, r.old_logprobs, r.sum_pi_squared, r.group, mask=mask, ratio=ratio, zero_tail=zero_tail
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
    "gdpo": lambda s, r, c: decoupled(r.components, r.group, r.valid, c.component_weights, scale=c.scale),
    "optimal_value": lambda s, r, c: less_optimal_value(s, r.group, r.valid, c.value_beta),
    "reward": lambda s, r, c: jnp.where(r.valid > 0, s, 0.0),
}
"""Scores [N], rollouts, config -> advantage of each response."""

PER_TOKEN: dict[str, Callable[..., Float[Array, "N R"]]] = {
    "gae": lambda t, r, c: gae(t, r.values, r.mask * r.valid[:, None], c.gamma, lam=c.lam)[0],
    "reinforce_pp": lambda t, r, c: return_to_go(t, r.mask, c.gamma),
    "remax": lambda t, r, c: less_greedy(return_to_go(t, r.mask, c.gamma), r),
    "otb": _otb(False),
    "otb_tail": _otb(True),
}
"""Rewards [N, R], rollouts, config -> advantage of each token."""

PER_TURN: dict[str, Callable[..., Float[Array, "N R"]]] = {"mt_grpo": same_turn, "gigpo": same_state}
"""Scores [N], rewards [N, R], rollouts with turns, config -> advantage of each token, one for each turn."""
