"""Algorithms that select the policy's training data: tokens by covariance, responses by reward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algos.clipped import clip, clipped_loss, policy_loss
from jaxrl_llm.algos.config import ClippedConfig, PolicyConfig
from jaxrl_llm.algos.kl import kl, log_ratio
from jaxrl_llm.algos.policy_gradient import policy_algorithm, select
from jaxrl_llm.algos.reduce import masked_sum
from jaxrl_llm.ranges import Fraction, Range, Unbounded, Weight
from jaxrl_llm.structs import LossInputs, Metrics, Rollouts


@dataclass(frozen=True)
class ClipCovConfig(ClippedConfig):
    """Options of Clip-Cov."""

    fraction: Fraction = 2e-4
    """Fraction of tokens dropped."""
    covariance_low: Unbounded = 1.0
    """Only tokens of a larger covariance are dropped."""
    covariance_high: Unbounded = 5.0
    """Only tokens of a smaller covariance are dropped."""

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if not self.covariance_low < self.covariance_high:
            yield "covariance_low", f"is {self.covariance_low:g}: it must be below covariance_high."


@dataclass(frozen=True)
class KLCovConfig(PolicyConfig):
    """Options of KL-Cov."""

    fraction: Fraction = 2e-4
    """Fraction of tokens penalised."""
    penalty: Weight = 1.0
    """Weight of |logprobs - old_logprobs| there (veRL: 0.1)."""


def covariance(inputs: LossInputs) -> Float[Array, "B T"]:
    """Return (A - mean A) (log pi - mean log pi) of each token, without gradient (arXiv 2505.22617).

    The means are over this micro-batch's tokens, as in the authors' code: with micro-batches of different
    content the choice of tokens depends a little on the split.
    """
    count = jnp.maximum(inputs.mask.sum(), 1.0)
    centred = lambda x: x - masked_sum(x, inputs.mask) / count
    return jax.lax.stop_gradient(centred(inputs.advantages) * centred(inputs.logprobs))


def hash_uniform(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return a pseudo-random number in [0, 1) for each x, which depends on x but not on its index."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    for shift in (16, 15):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(0x45D9F3B)
    return (bits >> 8).astype(jnp.float32) / 2.0**24


def clip_cov_loss(inputs: LossInputs, config: ClipCovConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the clipped surrogate, 0 where the token is dropped."""
    surrogate, is_clipped = clip(
        jnp.exp(log_ratio(inputs.logprobs, inputs.old_logprobs)), inputs.advantages, config
    )
    cov = covariance(inputs)
    within = (cov > config.covariance_low) & (cov < config.covariance_high)
    candidates = within & ~is_clipped & (inputs.mask > 0)
    share = config.fraction * inputs.mask.sum() / jnp.maximum(candidates.sum(), 1)
    dropped = candidates & (hash_uniform(inputs.old_logprobs) < share)
    fractions = {"clip_fraction": is_clipped, "dropped_fraction": dropped}
    return policy_loss(jnp.where(dropped, 0.0, surrogate), fractions, inputs, config)


clip_cov = policy_algorithm(
    "clip_cov",
    """Clip-Cov (arXiv 2505.22617, eq. 10 and 11): PPO's clip, less a few tokens of high covariance.

    Among the tokens whose covariance of advantage and log-prob lies within (low, high) a random share is
    dropped, `fraction` of all tokens: those would cost most entropy. The draw is a function of the token's
    log-prob, so that a run can be repeated.""",
    ClipCovConfig(),
    clip_cov_loss,
)


def kl_cov_loss(inputs: LossInputs, config: KLCovConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return -A r, with the penalty on the chosen tokens."""
    change = log_ratio(inputs.logprobs, inputs.old_logprobs)
    chosen = largest(covariance(inputs), inputs.mask, config.fraction)
    surrogate = -inputs.advantages * jnp.exp(change)
    surrogate = surrogate + jnp.where(
        chosen, config.penalty * kl(inputs.logprobs, inputs.old_logprobs, "abs"), 0.0
    )
    return policy_loss(surrogate, {"penalised_fraction": chosen}, inputs, config)


def largest(x: Float[Array, "B T"], mask: Float[Array, "B T"], fraction: float) -> Bool[Array, "B T"]:
    """Return the `fraction` of tokens in the mask with the largest x, rounded down, at least one. Of equal
    values the first are taken: a threshold on x would take all of them.
    """
    order = jnp.argsort(jnp.where(mask > 0, x, -jnp.inf).ravel(), descending=True)
    rank = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(len(order), dtype=jnp.int32))
    count = jnp.maximum(jnp.floor(fraction * mask.sum()), 1.0).astype(jnp.int32)
    return (mask > 0) & (rank.reshape(x.shape) < count)


kl_cov = policy_algorithm(
    "kl_cov",
    """KL-Cov (arXiv 2505.22617, eq. 12 and 13): the tokens of highest covariance are penalised.

    loss = -A r_t, plus penalty |logprobs - old_logprobs| for the `fraction` of tokens whose covariance of
    advantage and log-prob is largest: those would cost most entropy. The largest are taken in each
    micro-batch, at least one.""",
    KLCovConfig(),
    kl_cov_loss,
)


@dataclass(frozen=True)
class FilteredConfig(ClippedConfig):
    """Options of PF-PPO."""

    filter: Literal["pow", "max_min", "max_random"] = "pow"
    """Probability of a response: by |r|^power; best and worst only; the best 4 times as likely as others."""
    power: Annotated[float, Range(0.0, 100.0)] = 2.0
    """Exponent of the reward, for "pow"."""


def resample(rollouts: Rollouts, config: FilteredConfig, rng: np.random.Generator) -> np.ndarray:
    """Draw as many trajectories as were given, with replacement, by their reward."""
    kept = select(rollouts, config, rng)
    if not len(kept):
        return kept
    rewards = np.asarray(rollouts.total_rewards, np.float64)[kept]
    best = rewards == rewards.max()
    if config.filter == "pow":
        weights = np.abs(rewards) ** config.power
    elif config.filter == "max_min":
        weights = (best | (rewards == rewards.min())).astype(np.float64)
    else:
        weights = np.where(best, 0.4, 0.1)
    weights = weights + 1e-8
    return np.sort(rng.choice(kept, size=len(kept), p=weights / weights.sum()))


pf_ppo = policy_algorithm(
    "pf_ppo",
    """Policy-filtered PPO: PF-PPO (arXiv 2409.06957, section 3), responses drawn again by their reward.

    As many responses as there are, drawn with replacement: with weight |r|^power, or only the best and worst
    of the step ("max_min"), or the best four times as likely as the rest ("max_random"). Rewards in the
    middle, where a reward model is least sure, then count for less.""",
    FilteredConfig(advantage="gae", lam=0.95, kl_coef=0.02, kl="k1", kl_in="reward"),
    clipped_loss,
    select=resample,
)
