"""Advantages and returns of tokens, [N, R]: one trajectory per row, padded and with gaps.

Tokens with mask 0 (padding, a tool's output) are skipped as if they were absent, so that a reward reaches the
tokens before a tool call undiminished. Values outside the mask may be any finite number.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
