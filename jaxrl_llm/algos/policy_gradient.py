"""Policy gradients up to the loss: options, requirements, shaped rewards, advantages, selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.algos.advantages import PER_RESPONSE, PER_TOKEN, WHITENED, Advantage, Scale, clip_and_scale
from jaxrl_llm.algos.contract import AlgoConfig, Algorithm, Requirements
from jaxrl_llm.algos.correction import Correction, mean_weight
from jaxrl_llm.algos.kl import Estimator, kl, next_kl_coef
from jaxrl_llm.algos.reduce import Aggregation
from jaxrl_llm.algos.returns import Gaps, gae, on_last_token, return_to_go, whiten
from jaxrl_llm.ranges import Finite, Fraction, Positive, Range, Unbounded, Weight
from jaxrl_llm.structs import LossInputs, Metrics, Rollouts

KLPlace = Literal["loss", "reward", "advantage"]
Old = Literal["auto", "policy", "recompute", "rollout"]


@dataclass(frozen=True)
class PolicyConfig(AlgoConfig):
    """Options of every policy-gradient algorithm."""

    advantage: Advantage = "grpo"
    """Estimator of the advantage; each goes with each loss."""
    scale: Scale = "std"
    """Divide the centred reward by: the group's std, its population std, the batch's std, or nothing."""
    gamma: Fraction = 1.0
    """Discount a token, of estimators that follow the reward through the tokens."""
    lam: Fraction = 1.0
    """GAE's lambda: 1 = returns minus values, 0 = one-step."""
    gaps: Gaps = "skip"
    """GAE over tokens that a tool wrote: skip them, or zero value and reward there (OpenRLHF)."""
    whiten: Literal["auto", "none", "unbiased", "biased"] = "auto"
    """Whiten advantages over the step's tokens; auto: where the estimator's paper does."""
    value_beta: Positive = 0.5
    """Temperature beta of the optimal value: V = beta log mean exp(r / beta) over the group (A*-PO)."""
    component_weights: tuple[Finite, ...] = ()
    """Weight of each normalised reward in GDPO: reward.name, reward.shaping, reward.models; empty = all 1."""
    reward_clip: tuple[Unbounded, Unbounded] | None = None
    """Clip rewards to (low, high) first; None = no clipping. Of GDPO each reward by itself."""
    reward_scale: Literal["none", "batch"] = "none"
    """"batch": subtract the step's mean reward and divide by its std, before anything else but the clip."""
    drop_truncated: bool = False
    """Leave truncated responses out of the loss; they still count in baselines (DAPO)."""
    dynamic_sampling: bool = False
    """Replace prompts whose responses all have the same reward by fresh ones (DAPO)."""
    max_draws: Annotated[int, Range(1, 10_000)] = 4
    """Rollout rounds that dynamic sampling may take for one step."""
    critic: Literal["separate", "shared"] = "separate"
    """GAE's values: of a critic with its own backbone, or of a second head on the policy."""
    vf_coef: Weight = 0.1
    """Weight of the value loss, shared critic only."""
    value_clip: Positive = 0.5
    """Clip values to old value +- this, shared critic only."""
    aggregation: Aggregation = "token"
    """Aggregation of token losses: token, sequence (mean of means), sequence_sum, constant (Dr. GRPO),
    token_sum (no denominator)."""
    constant: Positive = 1024.0
    """Tokens that "constant" aggregation divides by."""
    kl_coef: Weight = 0.0
    """Weight of KL(policy || reference); 0 = no reference model at all."""
    kl: Estimator = "k3"
    """Estimator of the KL; k1+ and k3+ have the (unbiased) gradient of k2."""
    kl_in: KLPlace = "loss"
    """Subtract the KL in the loss, in each token's reward, or in its advantage."""
    kl_importance: bool = False
    """Weigh the KL in the loss by policy / old: k1 and k3, and the gradient of k3, are then unbiased for
    tokens of an older policy (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
    kl_target: Positive | None = None
    """Adapt kl_coef to hold this KL, nats a token; None = kl_coef is fixed."""
    kl_horizon: Positive = 10000.0
    """Trajectories over which the adaptive coefficient moves."""
    top_entropy: Annotated[float, Range(0.0, 1.0, open_low=True, usual="0.2 is usual")] = 1.0
    """Share of the step's tokens that keep their advantage, those of highest entropy before the first update
    (arXiv 2506.01939); 1 = all. The others still count in denominators."""
    entropy_coef: Finite = 0.0
    """Weight of the entropy bonus; below 0 a penalty. With `entropy_target` where it starts."""
    entropy_target: Positive | None = None
    """Adapt entropy_coef to hold this entropy, nats a token: it rises by entropy_delta after an update below
    the target, falls after others, and is not applied after one above the target (Skywork-OR1)."""
    entropy_delta: Positive = 0.005
    """Step of the adaptive coefficient (arXiv 2505.22312)."""
    entropy_coef_max: Positive = 1.0
    """Largest adaptive coefficient."""
    old: Old = "auto"
    """Old log-probs. "policy": the policy's before this step's updates, by a forward pass only if there are
    several; "recompute": the same, always by a forward pass; "rollout": those that the rollout reported;
    "auto": the rollout's where older weights may have generated tokens and no correction is on, else the
    policy's. "policy" and "recompute" count stale tokens as on-policy unless a correction is on."""
    correction: Correction = field(default_factory=Correction)
    """Importance weights and rejection for tokens of another engine, or of older weights."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, what is wrong with it) of rules across fields."""
        if self.reward_clip is not None and not self.reward_clip[0] < self.reward_clip[1]:
            low, high = self.reward_clip
            yield "reward_clip", f"is {low:g} {high:g}: it must be the lower bound, then the upper."
        if self.old == "rollout" and self.correction.active and self.correction.of == "old":
            yield (
                "old",
                'is "rollout": the correction weighs by old / rollout, which then is 1. Set it to auto, or '
                "correction.of to policy.",
            )
        if self.entropy_target is not None and not 0 <= self.entropy_coef <= self.entropy_coef_max:
            yield (
                "entropy_coef",
                f"is {self.entropy_coef:g}: entropy_target adapts it from 0 to entropy_coef_max.",
            )
        if self.advantage == "gdpo" and self.kl_in == "reward" and self.kl_coef:
            yield (
                "kl_in",
                'is "reward": GDPO normalises each reward by itself, so a KL among them would lose its '
                "weight. Set it to advantage or loss.",
            )

    @property
    def initial_kl_coef(self) -> float:
        return self.kl_coef

    def next_kl_coef(self, kl_coef: Array, metrics: Metrics, num_sequences: Array) -> Array:
        if self.kl_target is None or "kl" not in metrics:
            return kl_coef
        return next_kl_coef(kl_coef, metrics["kl"], num_sequences, self.kl_target, self.kl_horizon)

    @property
    def initial_entropy_coef(self) -> tuple[float, float] | None:
        return None if self.entropy_target is None else (self.entropy_coef, 0.0)

    def next_entropy_coef(self, coef: Float[Array, "2"], metrics: Metrics) -> Float[Array, "2"]:
        low = metrics["entropy"] <= self.entropy_target
        new = coef[0] + jnp.where(low, self.entropy_delta, -self.entropy_delta)
        new = jnp.clip(new, 0.0, self.entropy_coef_max)
        return jnp.stack([new, jnp.where(low, new, 0.0)])

    def present_kl_coef(self, x: Rollouts | LossInputs) -> Float[Array, ""] | float:
        """Return kl_coef, or the KL controller's present coefficient."""
        return self.kl_coef if self.kl_target is None else x.kl_coef


def policy_algorithm(name: str, doc: str, config: PolicyConfig, loss: Callable, **others: Any) -> Algorithm:
    """Return the algorithm that has this loss and its defaults, and all else in common with its siblings."""
    common = dict(requires=requires, advantages=advantages, returns=returns, select=select)
    return Algorithm(name, doc, "rollouts", config, loss, **common | others)


def requires(config: PolicyConfig) -> Requirements:
    """Return the arrays and models that these settings read."""
    reads_old = config.advantage.startswith("otb") or config.correction.normalize
    reads_old |= config.kl_in != "loss" and config.kl_coef != 0
    return Requirements(
        entropy=config.entropy_coef != 0 or config.entropy_target is not None,
        old=config.old == "recompute" or reads_old,
        old_source="policy" if config.old == "recompute" else config.old,
        corrected=config.correction.active,
        reference=config.kl_coef != 0,
        values=config.advantage == "gae" and config.critic == "shared",
        critic=config.advantage == "gae" and config.critic == "separate",
        sum_pi_squared=config.advantage.startswith("otb"),
        old_entropy=config.top_entropy < 1,
        greedy=config.advantage == "remax",
        draws=config.max_draws if config.dynamic_sampling else 1,
    )


def advantages(rollouts: Rollouts, config: PolicyConfig) -> Float[Array, "N R"]:
    """Return the advantage of each token by the config's estimator; 0 where mask or valid is 0."""
    outcome, dense = shaped_rewards(rollouts, config)
    mask = rollouts.mask * rollouts.valid[:, None]
    if config.advantage in PER_RESPONSE:
        per_response = PER_RESPONSE[config.advantage](outcome + dense.sum(axis=1), rollouts, config)
        out = per_response[:, None] * mask
    else:
        rewards = dense + on_last_token(outcome, mask)
        out = PER_TOKEN[config.advantage](rewards, rollouts, config)
    how = "unbiased" if config.whiten == "auto" and config.advantage in WHITENED else config.whiten
    if how in ("unbiased", "biased"):
        out = whiten(out, mask, how)
    if config.kl_in == "advantage" and config.kl_coef:
        out = out - config.present_kl_coef(rollouts) * _rollout_kl(rollouts, config)
    if config.correction.normalize:
        gap = rollouts.old - rollouts.rollout
        out = out / mean_weight(gap, mask, config.correction)
    if config.top_entropy < 1:
        lowest = jnp.nanquantile(jnp.where(mask > 0, rollouts.entropy, jnp.nan), 1 - config.top_entropy)
        out = jnp.where(rollouts.entropy >= lowest, out, 0.0)
    return jnp.where(mask > 0, out, 0.0)


def returns(rollouts: Rollouts, config: PolicyConfig) -> Float[Array, "N R"]:
    """Return the critic's targets: GAE's advantage (not whitened) plus value; without values the
    return-to-go."""
    outcome, dense = shaped_rewards(rollouts, config)
    mask = rollouts.mask * rollouts.valid[:, None]
    rewards = dense + on_last_token(outcome, mask)
    if rollouts.values is None:
        return return_to_go(rewards, mask, config.gamma)
    return gae(rewards, rollouts.values, mask, config.gamma, config.lam, config.gaps)[1]


def select(rollouts: Rollouts, config: PolicyConfig, rng: np.random.Generator) -> np.ndarray:
    """Return the trajectories with a reward, without the truncated ones where they are dropped."""
    kept = np.asarray(rollouts.valid) > 0
    if config.drop_truncated:
        kept &= np.asarray(rollouts.truncated) == 0
    return np.flatnonzero(kept)


def shaped_rewards(rollouts: Rollouts, config: PolicyConfig) -> tuple[Float[Array, "N"], Float[Array, "N R"]]:
    """Return (reward of each response, reward of each token): process rewards, minus the KL if in reward."""
    outcome = clip_and_scale(rollouts.rewards, rollouts.valid, config.reward_clip, config.reward_scale)
    dense = jnp.zeros(rollouts.mask.shape)
    if rollouts.token_rewards is not None:
        dense = dense + rollouts.token_rewards
    if config.kl_in == "reward" and config.kl_coef:
        dense = dense - config.present_kl_coef(rollouts) * _rollout_kl(rollouts, config)
    return outcome, jnp.where((rollouts.mask > 0) & (rollouts.valid[:, None] > 0), dense, 0.0)


def _rollout_kl(rollouts: Rollouts, config: PolicyConfig) -> Float[Array, "N R"]:
    return kl(rollouts.old, rollouts.reference, config.kl)
