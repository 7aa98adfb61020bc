"""Policy losses with surrogates other than PPO's clip: a Config, a loss and an Algorithm each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algos.clipped import clip, policy_loss
from jaxrl_llm.algos.config import Bound, ClippedConfig, Old, PolicyAggregation, PolicyConfig
from jaxrl_llm.algos.kl import MAX_LOG_RATIO, clamp, log_ratio
from jaxrl_llm.algos.policy_gradient import policy_algorithm, requires_sequences
from jaxrl_llm.algos.reduce import sequence_mean, sequence_sum
from jaxrl_llm.ranges import Positive, Range, Weight
from jaxrl_llm.structs import LossInputs, Metrics

Exponent = Annotated[float, Range(0.0, 1000.0)]

# REINFORCE and GPG


def reinforce_loss(inputs: LossInputs, config: PolicyConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return -w A log pi with w = sg[min(exp(logprobs - old_logprobs), max(correction.cap, 1))].

    w is 1 if the policy equals the old policy, whatever the cap. With a correction whose numerator is the
    policy (`correction.of`), w is 1 everywhere, since `correct` applies the weight.
    """
    weight = jnp.exp(jax.lax.stop_gradient(log_ratio(inputs.logprobs, inputs.old_logprobs)))
    weight = jnp.minimum(weight, max(config.correction.cap, 1.0))
    if config.correction.weight != "none" and config.correction.of == "policy":
        weight = jnp.ones_like(weight)
    return policy_loss(-weight * inputs.advantages * inputs.logprobs, {}, inputs, config)


reinforce = policy_algorithm(
    "reinforce",
    """REINFORCE with the batch's mean reward as baseline (Williams 1992; arXiv 2402.14740, section 2.2).

    A = r - mean of the batch, divided by its std where `scale` is not "none" (RL2's global norm; its group
    norm is `advantage = "grpo"`); loss = -w A log pi, summed over tokens. w is 1 in the first update on the
    policy's own tokens; later, and for tokens of older weights, the truncated importance weight
    min(exp(logprobs - old_logprobs), correction.cap).""",
    PolicyConfig(advantage="reinforce", scale="none", aggregation="sequence_sum"),
    reinforce_loss,
)

gpg = policy_algorithm(
    "gpg",
    """Group policy gradient: GPG (arXiv 2504.02546, eq. 4 to 6).

    A = alpha (r - mean of the group), alpha = responses / responses of groups whose rewards differ, so that
    groups of equal rewards do not shrink the step; loss = -w A log pi, mean over tokens, w as in
    reinforce. veRL counts responses whose reward is not 0 instead: `advantage = "gpg_rewards"`.""",
    PolicyConfig(advantage="gpg", scale="none"),
    reinforce_loss,
)

# GSPO


def gspo_loss(inputs: LossInputs, config: ClippedConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the clipped surrogate of the sequence's ratio."""
    mean = sequence_mean(inputs.logprobs - inputs.old_logprobs, inputs)
    fixed = jax.lax.stop_gradient(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO) - inputs.logprobs)
    surrogate, is_clipped = clip(jnp.exp(fixed + inputs.logprobs), inputs.advantages, config)
    return policy_loss(surrogate, {"clip_fraction": is_clipped}, inputs, config)


gspo = policy_algorithm(
    "gspo",
    """Group sequence policy optimization: GSPO (arXiv 2507.18071, eq. 5 and 14).

    s = exp(mean over the response's tokens of logprobs - old_logprobs), one ratio a response, in its token
    form sg[s] pi / sg[pi]; loss = max(-A s, -A clip(s)), mean over responses. The clip range is a thousandth
    of PPO's. `aggregation = "token"` is veRL 0.9's and ChatLearn's.""",
    ClippedConfig(clip_low=3e-4, clip_high=4e-4, aggregation="sequence"),
    gspo_loss,
    requires=requires_sequences,
)

luspo = policy_algorithm(
    "luspo",
    """Length-unbiased sequence policy optimization: LUSPO (arXiv 2602.05261), GSPO times the length.

    GSPO's loss of a response, times its number of tokens, mean over responses: the gradient of a token no
    longer shrinks with the length of its response.""",
    ClippedConfig(clip_low=3e-4, clip_high=4e-4, aggregation="sequence_sum"),
    gspo_loss,
    requires=requires_sequences,
)

# CISPO


@dataclass(frozen=True)
class CISPOConfig(PolicyConfig):
    """Options of CISPO."""

    clip_low: Bound = 1.0
    """The weight is at least 1 - clip_low."""
    clip_high: Bound = 4.0
    """The weight is at most 1 + clip_high."""


def cispo_loss(inputs: LossInputs, config: CISPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return -sg[clip(r)] A log pi."""
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(inputs.logprobs, inputs.old_logprobs)))
    weight = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    surrogate = -weight * inputs.advantages * inputs.logprobs
    return policy_loss(surrogate, {"clip_fraction": weight != ratio}, inputs, config)


cispo = policy_algorithm(
    "cispo",
    """Clipped importance weights: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4).

    loss = -sg[clip(r_t, 1 - low, 1 + high)] A log pi: the weight is clipped, and every token keeps a
    gradient. As in the paper there is no lower bound by default; the upper one is ScaleRL's (arXiv
    2510.13786).""",
    CISPOConfig(),
    cispo_loss,
)

# SAPO


@dataclass(frozen=True)
class SAPOConfig(PolicyConfig):
    """Options of SAPO."""

    tau_positive: Positive = 1.0
    """Steepness of the gate for positive advantages."""
    tau_negative: Positive = 1.05
    """Steepness of the gate for other advantages."""
    aggregation: PolicyAggregation = "sequence"


def sapo_loss(inputs: LossInputs, config: SAPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return -A times the gate; the gate's derivative at r = 1 is 1."""
    ratio = jnp.exp(log_ratio(inputs.logprobs, inputs.old_logprobs))
    tau = jnp.where(inputs.advantages > 0, config.tau_positive, config.tau_negative)
    gate = jax.nn.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return policy_loss(-inputs.advantages * gate, {}, inputs, config)


sapo = policy_algorithm(
    "sapo",
    """Soft adaptive policy optimization: SAPO (arXiv 2511.20347, eq. 5 and 6).

    loss = -A sigmoid(tau (r_t - 1)) 4 / tau, mean over responses of the mean over tokens: a smooth gate in
    place of the clip. tau is larger where A is not positive, so that those tokens lose their gradient
    sooner.""",
    SAPOConfig(),
    sapo_loss,
)

# GMPO


@dataclass(frozen=True)
class GMPOConfig(PolicyConfig):
    """Options of GMPO."""

    clip_low: Bound = 0.4
    """A token's log-ratio may fall to -clip_low, nats."""
    clip_high: Bound = 0.4
    """A token's log-ratio may rise to clip_high, nats."""
    aggregation: PolicyAggregation = "sequence"


def gmpo_loss(inputs: LossInputs, config: GMPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return -A times the geometric mean of the clipped ratios, the same at each token of a response."""
    change = log_ratio(inputs.logprobs, inputs.old_logprobs)
    bounded = clamp(change, -config.clip_low, config.clip_high)
    positive = inputs.advantages > 0
    kept = jnp.where(positive, jnp.minimum(change, bounded), jnp.maximum(change, bounded))
    surrogate = -sequence_mean(inputs.advantages, inputs) * jnp.exp(sequence_mean(kept, inputs))
    return policy_loss(surrogate, {"clip_fraction": kept != change}, inputs, config)


gmpo = policy_algorithm(
    "gmpo",
    """Geometric-mean policy optimization: GMPO (arXiv 2507.20673, eq. 4).

    loss = -A exp(mean over the response's tokens of l_t), l_t = logprobs - old_logprobs, cut at -low and
    high on the side to which the advantage pushes it; mean over responses. One advantage a response: that of
    its tokens' mean.""",
    GMPOConfig(),
    gmpo_loss,
    requires=requires_sequences,
)

# VESPO


@dataclass(frozen=True)
class VESPOConfig(PolicyConfig):
    """Options of VESPO."""

    k_positive: Exponent = 2.0
    """Power of W for nonnegative advantages."""
    lambda_positive: Exponent = 3.0
    """Decay in W for nonnegative advantages."""
    k_negative: Exponent = 3.0
    """Power of W for negative advantages."""
    lambda_negative: Exponent = 2.0
    """Decay in W for negative advantages."""


def vespo_loss(inputs: LossInputs, config: VESPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return -sg[phi(W)] A log pi."""
    weight = vespo_weight(jax.lax.stop_gradient(inputs.logprobs), inputs, config)
    return policy_loss(-weight * inputs.advantages * inputs.logprobs, {"phi": weight}, inputs, config)


def vespo_weight(
    logprobs: Float[Array, "B T"], inputs: LossInputs, config: VESPOConfig
) -> Float[Array, "B T"]:
    """Return phi(W) of each token's response."""
    total = sequence_sum(logprobs - inputs.old_logprobs, inputs.mask, inputs.segments)
    log_w = jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    good = inputs.advantages >= 0
    k = jnp.where(good, config.k_positive, config.k_negative)
    decay = jnp.where(good, config.lambda_positive, config.lambda_negative)
    return jnp.exp(k * log_w - decay * jnp.expm1(log_w))


vespo = policy_algorithm(
    "vespo",
    """Variational sequence-level soft policy optimization: VESPO (arXiv 2602.10693).

    W = exp(sum over the response's tokens of logprobs - old_logprobs); loss = -sg[phi(W)] A log pi with
    phi(W) = W^k exp(lambda (1 - W)): phi(1) = 1, and responses that the policy has left, or rushed to, fade
    out without a clip and without dividing by the length. k and lambda differ by the sign of A.""",
    VESPOConfig(),
    vespo_loss,
    requires=requires_sequences,
)

# DPPO


@dataclass(frozen=True)
class DPPOConfig(PolicyConfig):
    """Options of DPPO."""

    divergence_of: Literal["tv", "kl"] = "tv"
    """Total variation, or KL(old || policy)."""
    delta_low: Bound = 0.2
    """Largest divergence downwards: a probability for tv, nats for kl (0.05 is usual)."""
    delta_high: Bound = 0.2
    """Largest divergence upwards."""
    ratio_cap: Annotated[float, Range(0.0, math.inf, open_low=True)] = 20.0
    """Largest importance weight."""
    old: Old = "rollout"


def dppo_loss(inputs: LossInputs, config: DPPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return -M sg[min(r, cap)] A log pi."""
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio(inputs.logprobs, inputs.old_logprobs)))
    keep = trusted(inputs.logprobs, inputs, config)
    surrogate = -jnp.minimum(ratio, config.ratio_cap) * inputs.advantages * inputs.logprobs
    return policy_loss(jnp.where(keep, surrogate, 0.0), {"clip_fraction": ~keep}, inputs, config)


def trusted(logprobs: Float[Array, "B T"], inputs: LossInputs, config: DPPOConfig) -> Bool[Array, "B T"]:
    """Return True for tokens whose divergence is small enough, or whose advantage reduces it."""
    now, before = jnp.exp(logprobs), jnp.exp(inputs.old_logprobs)
    if config.divergence_of == "tv":
        far = jnp.abs(now - before)
    else:
        rest = jnp.log((1 - before + 1e-8) / (1 - now + 1e-8))
        far = before * (inputs.old_logprobs - logprobs) + (1 - before) * rest
    up = (far <= config.delta_high) | (now <= before)
    down = (far <= config.delta_low) | (now >= before)
    return jnp.where(inputs.advantages > 0, up, down)


dppo = policy_algorithm(
    "dppo",
    """Divergence proximal policy optimization: DPPO (arXiv 2602.04879, eq. 11 to 14).

    loss = -M_t sg[min(r_t, cap)] A log pi. M_t drops a token that the advantage pushes further away from the
    policy of the rollout once their divergence, of {this token, any other}, exceeds delta: total variation
    |p - p_old|, or KL(p_old || p). Ratios of rare tokens may then be large, those of frequent ones not.""",
    DPPOConfig(),
    dppo_loss,
)

# DRO


@dataclass(frozen=True)
class DROConfig(PolicyConfig):
    """Options of DRO."""

    beta: Weight = 1.0
    """Weight of the squared log-ratio."""


def dro_loss(inputs: LossInputs, config: DROConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return -A log pi + beta / 2 (logprobs - old_logprobs)^2."""
    square = jnp.square(log_ratio(inputs.logprobs, inputs.old_logprobs))
    surrogate = -inputs.advantages * inputs.logprobs + 0.5 * config.beta * square
    return policy_loss(surrogate, {}, inputs, config)


dro = policy_algorithm(
    "dro",
    """Direct reward optimization: DRO (arXiv 2405.19107, eq. 8), with an advantage in place of r - V.

    loss = -(A log pi - beta / 2 (logprobs - old_logprobs)^2): no ratio, so data may be far off policy; the
    square pulls the policy back to the old one.""",
    DROConfig(),
    dro_loss,
)

# A*-PO


@dataclass(frozen=True)
class AStarPOConfig(PolicyConfig):
    """Options of A*-PO."""

    beta: Positive = 1e-3
    """Strength of the KL constraint to the reference (beta_2 of the paper)."""


def a_star_po_loss(inputs: LossInputs, config: AStarPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return (beta sum(logprobs - ref_logprobs) - A)^2 of each response, the same at each of its tokens."""
    reward = config.beta * sequence_sum(inputs.logprobs - inputs.ref_logprobs, inputs.mask, inputs.segments)
    error = reward - sequence_mean(inputs.advantages, inputs)
    return policy_loss(jnp.square(error), {"implicit_reward": reward}, inputs, config)


a_star_po = policy_algorithm(
    "a_star_po",
    """Optimal advantage regression: A*-PO (arXiv 2505.20686, eq. 3 and algorithm 1).

    A = r - V, V = value_beta log mean exp(r / value_beta); loss = (beta log(pi / ref) - A)^2, mean over
    responses, log(pi / ref) summed over tokens. V is taken over the step's own group; in the paper over
    responses of the reference, once before training: for that let the reward subtract a column of the data
    with V, and set `advantage = "reward"`.

    On-policy, as in the paper: one update a step. V is a soft maximum, so A sums to less than 0 over a group,
    and no ratio bounds how far later updates would push the step's responses down.""",
    AStarPOConfig(advantage="optimal_value", aggregation="sequence"),
    a_star_po_loss,
    requires=lambda config: replace(requires_sequences(config), ref_logprobs=True),
)
