"""Policy gradients up to the loss: options, requirements, shaped rewards, advantages, selection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algos.config import VALUE, PolicyConfig, ValueConfig
from jaxrl_llm.algos.contract import Algorithm, Requirements
from jaxrl_llm.algos.estimators import PER_RESPONSE, PER_TOKEN, PER_TURN, WHITENED, gae, on_last_token, whiten
from jaxrl_llm.algos.kl import clamp, kl
from jaxrl_llm.algos.reduce import aggregate, token_mean
from jaxrl_llm.structs import LossInputs, Metrics, Rollouts


def policy_algorithm(name: str, doc: str, config: PolicyConfig, loss: Callable, **others: Any) -> Algorithm:
    """Return the policy-gradient algorithm with this loss and these defaults."""
    common = dict(requires=requires, advantages=advantages, returns=returns, select=select)
    return Algorithm(name, doc, "rollouts", config, loss=loss, **common | others)


def requires(config: PolicyConfig) -> Requirements:
    """Return the arrays and models that these settings read."""
    reads_old = config.advantage.startswith("otb")
    reads_old |= config.kl_in != "loss" and config.kl_coef != 0
    correction = config.correction
    of_sequences = any(rule.startswith("seq") for rule, *_ in correction.reject)
    return Requirements(
        sequences=of_sequences or correction.weight == "sequence",
        entropy=config.entropy_coef != 0 or config.entropy_target is not None,
        old_logprobs=config.old == "recompute" or reads_old,
        old_logprobs_source="policy" if config.old == "recompute" else config.old,
        corrected=correction.active,
        ref_logprobs=config.kl_coef != 0,
        values=config.advantage == "gae" and config.critic == "shared",
        critic=config.advantage == "gae" and config.critic == "separate",
        sum_pi_squared=config.advantage.startswith("otb"),
        old_entropy=config.top_entropy < 1,
        greedy=config.advantage == "remax",
        components=config.advantage == "gdpo",
        turns=config.advantage in PER_TURN,
        draws=config.max_draws if config.dynamic_sampling else 1,
    )


def requires_sequences(config: PolicyConfig) -> Requirements:
    """Return `requires` of a loss that adds up the tokens of a response."""
    return replace(requires(config), sequences=True)


def advantages(rollouts: Rollouts, config: PolicyConfig) -> Float[Array, "N R"]:
    """Return the advantage of each token by the config's estimator; 0 where mask or valid is 0."""
    outcome, dense = shaped_rewards(rollouts, config)
    mask = rollouts.mask * rollouts.valid[:, None]
    scores, rewards = outcome + dense.sum(axis=1), dense + spread_outcome(outcome, rollouts)
    if config.advantage in PER_RESPONSE:
        out = PER_RESPONSE[config.advantage](scores, rollouts, config)[:, None] * mask
    elif config.advantage in PER_TURN:
        out = PER_TURN[config.advantage](scores, rewards, rollouts, config)
    else:
        out = PER_TOKEN[config.advantage](rewards, rollouts, config)
    how = "unbiased" if config.whiten == "auto" and config.advantage in WHITENED else config.whiten
    if how in ("unbiased", "biased"):
        out = whiten(out, mask, how)
    if config.kl_in == "advantage" and config.kl_coef:
        out = out - config.present_kl_coef(rollouts) * _rollout_kl(rollouts, config)
    if config.top_entropy < 1:
        lowest = jnp.nanquantile(jnp.where(mask > 0, rollouts.entropy, jnp.nan), 1 - config.top_entropy)
        out = jnp.where(rollouts.entropy >= lowest, out, 0.0)
    return jnp.where(mask > 0, out, 0.0)


def returns(rollouts: Rollouts, config: PolicyConfig) -> Float[Array, "N R"]:
    """Return the critic's targets: GAE's advantage, not whitened, plus the value."""
    outcome, dense = shaped_rewards(rollouts, config)
    mask = rollouts.mask * rollouts.valid[:, None]
    rewards = dense + spread_outcome(outcome, rollouts)
    return gae(rewards, rollouts.values, mask, config.gamma, lam=config.lam)[1]


def select(rollouts: Rollouts, config: PolicyConfig, rng: np.random.Generator) -> np.ndarray:
    """Return the trajectories with a reward: of the prompts of `keep_prompts`, without truncated ones if
    `drop_truncated`."""
    valid = np.asarray(rollouts.valid) > 0
    kept = valid & most_uncertain(rollouts.total_rewards, rollouts.group, valid, config.keep_prompts)
    if config.drop_truncated:
        kept &= np.asarray(rollouts.truncated) == 0
    return np.flatnonzero(kept)


def most_uncertain(rewards: Any, group: Any, valid: np.ndarray, share: float) -> np.ndarray:
    """Return True for responses of the prompts whose rewards differ most: StarPO-S (arXiv 2504.20073).

    These are the `share` of the prompts, rounded down, at least one, with the largest standard deviation of
    their valid rewards; of equal ones the first.
    """
    if share == 1:
        return np.ones(len(valid), bool)
    rewards, group = np.asarray(rewards, np.float64), np.asarray(group)
    prompts = np.unique(group)
    of_prompt = [rewards[(group == prompt) & valid] for prompt in prompts]
    spreads = np.array([x.std(ddof=1) if len(x) > 1 else 0.0 for x in of_prompt])
    count = max(int(share * len(prompts) + 1e-9), 1)
    return np.isin(group, prompts[np.argsort(-spreads, kind="stable")[:count]])


def shaped_rewards(rollouts: Rollouts, config: PolicyConfig) -> tuple[Float[Array, "N"], Float[Array, "N R"]]:
    """Return (reward of each response, reward of each token): process rewards, minus the KL if in reward."""
    outcome = jnp.where(rollouts.valid > 0, rollouts.rewards, 0.0)
    dense = jnp.zeros(rollouts.mask.shape)
    if rollouts.token_rewards is not None:
        dense = dense + rollouts.token_rewards
    if config.kl_in == "reward" and config.kl_coef:
        dense = dense - config.present_kl_coef(rollouts) * _rollout_kl(rollouts, config)
    return outcome, jnp.where((rollouts.mask > 0) & (rollouts.valid[:, None] > 0), dense, 0.0)


def spread_outcome(outcome: Float[Array, "N"], rollouts: Rollouts) -> Float[Array, "N R"]:
    """Return the reward of a turn on its last token, and the rest of the outcome on the response's last."""
    mask = rollouts.mask * rollouts.valid[:, None]
    if rollouts.turn_rewards is None:
        return on_last_token(outcome, mask)
    of_turns = jnp.where(mask > 0, rollouts.turn_rewards, 0.0)
    return of_turns + on_last_token(outcome - of_turns.sum(axis=1), mask)


def _rollout_kl(rollouts: Rollouts, config: PolicyConfig) -> Float[Array, "N R"]:
    return kl(rollouts.old_logprobs, rollouts.ref_logprobs, config.kl)


def value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    clip: float | None,
    *,
    factor: float = 0.5,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return factor max((V - R)^2, (clip(V, old +- clip) - R)^2), and the tokens that the clip bounds."""
    plain = (values - returns) ** 2
    if clip is None:
        return factor * plain, jnp.zeros(plain.shape, bool)
    clipped = (clamp(values, old_values - clip, old_values + clip) - returns) ** 2
    return factor * jnp.maximum(plain, clipped), clipped > plain


def critic_loss(inputs: LossInputs, config: ValueConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the clipped squared error, and metrics that add up to the explained variance.

    Explained variance of the mini-batch is 1 - value_error / (return_square - return^2).
    """
    per_token, clipped = value_loss(
        inputs.values, inputs.old_values, inputs.returns, config.value_clip, factor=config.factor
    )
    metrics = {
        "value": token_mean(inputs.values, inputs),
        "return": token_mean(inputs.returns, inputs),
        "return_square": token_mean(inputs.returns**2, inputs),
        "value_error": token_mean((inputs.values - inputs.returns) ** 2, inputs),
        "value_clip_fraction": token_mean(clipped.astype(per_token.dtype), inputs),
    }
    return aggregate(per_token, inputs, config.aggregation), metrics


value = Algorithm(
    "value",
    """Value regression, the critic's own algorithm (PPO, arXiv 1707.06347, section 5).

    loss = factor max((V - R)^2, (clip(V, old +- clip) - R)^2), R the returns.""",
    "rollouts",
    VALUE,
    loss=critic_loss,
    requires=lambda config: Requirements(logprobs=False, values=True),
)
