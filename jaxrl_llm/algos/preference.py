"""Preference losses: DPO, SimPO, CPO and ORPO on pairs, online DPO on the policy's own, KTO on single labels.

Segments 1, 2 | 3, 4 | ... of a row are chosen and rejected of one prompt; of KTO the responses and their
mismatched counterparts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig, Algorithm, Requirements
from jaxrl_llm.algos.reduce import segment_sums
from jaxrl_llm.ranges import Finite, Positive, Range, Weight
from jaxrl_llm.structs import LossInputs, Metrics, Rollouts

Pair = tuple[Float[Array, "B H"], Float[Array, "B H"]]
Smoothing = Annotated[float, Range(0.0, 0.5, open_high=True)]
MAX_LOGPROB = -1e-6  # nats a token; the odds of a probability nearer to 1 would overflow

# Parts of the losses


def pair_sums(x: Float[Array, "B T"], inputs: LossInputs) -> Pair:
    """Return the sums of x over each chosen (segments 1, 3, ...) and rejected (2, 4, ...) sequence.

    H = T // 2; columns without a pair read 0. `pair_sums(ones, inputs)` are the lengths.
    """
    sums = segment_sums(x, inputs.segments, inputs.mask)
    half = x.shape[1] // 2
    return sums[:, 0 : 2 * half : 2], sums[:, 1 : 2 * half : 2]


def pair_means(x: Float[Array, "B T"], inputs: LossInputs) -> Pair:
    """Return the means of x over the trained tokens of chosen and rejected sequences; 0 without a pair."""
    sums, lengths = pair_sums(x, inputs), pair_sums(jnp.ones_like(inputs.mask), inputs)
    chosen, rejected = [total / jnp.maximum(n, 1.0) for total, n in zip(sums, lengths, strict=True)]
    return chosen, rejected


def over_pairs(x: Float[Array, "B H"], inputs: LossInputs) -> Float[Array, ""]:
    """Return this micro-batch's part of the mean of x over all pairs of the mini-batch."""
    chosen, rejected = pair_sums(jnp.ones_like(inputs.mask), inputs)
    there = (chosen > 0) & (rejected > 0)
    return jnp.sum(jnp.where(there, x, 0.0)) / (inputs.num_sequences / 2)


def sigmoid_loss(logits: Float[Array, "B H"], label_smoothing: float = 0.0) -> Float[Array, "B H"]:
    """Return -log sigmoid(logits), where a share `label_smoothing` of the pairs is taken to be labelled the
    wrong way round (cDPO, https://ericmitchell.ai/cdpo.pdf)."""
    right, wrong = -jax.nn.log_sigmoid(logits), -jax.nn.log_sigmoid(-logits)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def chosen_nll(inputs: LossInputs) -> Float[Array, ""]:
    """Return this micro-batch's part of the mean over chosen sequences of their mean -log p(token)."""
    return over_pairs(-pair_means(inputs.policy, inputs)[0], inputs)


def pair_metrics(chosen: Float[Array, "B H"], rejected: Float[Array, "B H"], inputs: LossInputs) -> Metrics:
    """Return the rewards of both sides, their margin, and how often the chosen one has more."""
    return {
        "chosen_reward": over_pairs(chosen, inputs),
        "rejected_reward": over_pairs(rejected, inputs),
        "margin": over_pairs(chosen - rejected, inputs),
        "accuracy": over_pairs((chosen > rejected).astype(chosen.dtype), inputs),
    }


# DPO


@dataclass(frozen=True)
class DPOConfig(AlgoConfig):
    """Options of DPO."""

    beta: Positive = 0.1
    """Strength of the KL constraint to the reference."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid (DPO) or ipo."""
    label_smoothing: Smoothing = 0.0
    """Share of pairs taken to be labelled the wrong way round, below 0.5 (cDPO; sigmoid only)."""
    length_normalized: bool = False
    """Means over the tokens of a response instead of sums."""
    reference_free: bool = False
    """Leave the reference out: no reference model at all."""
    nll_coef: Weight = 0.0
    """Weight of the chosen response's mean -log p(token)."""


def dpo_loss(inputs: LossInputs, config: DPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean over pairs of the loss of h, plus the NLL term."""
    ratio = inputs.policy if config.reference_free else inputs.policy - inputs.reference
    chosen, rejected = (pair_means if config.length_normalized else pair_sums)(ratio, inputs)
    h = chosen - rejected
    if config.loss == "ipo":
        each = (h - 1 / (2 * config.beta)) ** 2
    else:
        each = sigmoid_loss(config.beta * h, config.label_smoothing)
    total = over_pairs(each, inputs)
    metrics = pair_metrics(config.beta * chosen, config.beta * rejected, inputs)
    if config.nll_coef:
        metrics["chosen_nll"] = chosen_nll(inputs)
        total = total + config.nll_coef * metrics["chosen_nll"]
    return total, metrics


dpo = Algorithm(
    "dpo",
    """Direct preference optimization (arXiv 2305.18290), conservative DPO and IPO (arXiv 2310.12036).

    h = (log p(c) - log ref(c)) - (log p(r) - log ref(r)), over the summed log-probs of chosen c, rejected r:

        sigmoid   -log sigmoid(beta h)             DPO, eq. 7; with label_smoothing cDPO
        ipo       (h - 1 / (2 beta))^2             IPO, eq. 17

    `length_normalized` takes means over the tokens instead of sums: TRL's IPO (what its authors ran, by TRL's
    account), and the length-normalised DPO of Tulu 3 (arXiv 2411.15124). `nll_coef` adds the likelihood of
    the chosen answer (arXiv 2404.19733, eq. 1).""",
    "pairs",
    DPOConfig(),
    dpo_loss,
    requires=lambda config: Requirements(reference=not config.reference_free),
    group_size=2,
)


@dataclass(frozen=True)
class OnlineDPOConfig(AlgoConfig):
    """Options of online DPO."""

    dpo: DPOConfig = field(default_factory=dpo.Config)
    """The loss of a pair."""


def best_and_worst(rollouts: Rollouts, config: OnlineDPOConfig, rng: np.random.Generator) -> np.ndarray:
    """Return best, worst, best, worst, ... of each group; groups of equal rewards are left out."""
    rewards, group = np.asarray(rollouts.rewards), np.asarray(rollouts.group)
    scored = np.asarray(rollouts.valid) > 0
    chosen = []
    for number in np.unique(group[scored]):
        members = rng.permutation(np.flatnonzero(scored & (group == number)))  # ties fall at random
        best, worst = members[rewards[members].argmax()], members[rewards[members].argmin()]
        if rewards[best] > rewards[worst]:
            chosen += [best, worst]
    return np.asarray(chosen, np.int64)


online_dpo = Algorithm(
    "online_dpo",
    """Online DPO (arXiv 2402.04792): the pairs are the policy's own best and worst response to each prompt.

    A run that starts from the weights of the last, which then are its reference, is a round of iterative
    DPO.""",
    "rollouts",
    OnlineDPOConfig(),
    lambda inputs, config: dpo_loss(inputs, config.dpo),
    requires=lambda config: dpo.requires(config.dpo),
    advantages=lambda rollouts, config: jnp.zeros_like(rollouts.mask),  # a pair has an order, no size
    select=best_and_worst,
    group_size=2,
)

# SimPO, CPO, ORPO: no reference


@dataclass(frozen=True)
class SimPOConfig(AlgoConfig):
    """Options of SimPO."""

    beta: Positive = 2.0
    """Reward of one nat per token."""
    gamma: Finite = 0.5
    """Margin by which the chosen reward should win."""
    nll_coef: Weight = 0.0
    """Weight of the chosen response's mean -log p(token)."""


def simpo_loss(inputs: LossInputs, config: SimPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean over pairs, plus the NLL term."""
    chosen, rejected = [config.beta * mean for mean in pair_means(inputs.policy, inputs)]
    total = over_pairs(sigmoid_loss(chosen - rejected - config.gamma), inputs)
    metrics = pair_metrics(chosen, rejected, inputs)
    if config.nll_coef:
        metrics["chosen_nll"] = chosen_nll(inputs)
        total = total + config.nll_coef * metrics["chosen_nll"]
    return total, metrics


simpo = Algorithm(
    "simpo",
    """SimPO (arXiv 2405.14734): no reference; the reward is beta times the mean log-prob of the response.

    -log sigmoid(beta (mean log p(c) - mean log p(r)) - gamma)                                      (eq. 6)

    With `nll_coef` it is CPO-SimPO.""",
    "pairs",
    SimPOConfig(),
    simpo_loss,
    group_size=2,
)


@dataclass(frozen=True)
class CPOConfig(AlgoConfig):
    """Options of CPO."""

    beta: Positive = 0.1
    """Reward of one nat of the summed log-prob."""
    label_smoothing: Smoothing = 0.0
    """Share of pairs taken to be labelled the wrong way round, below 0.5."""
    nll_coef: Weight = 1.0
    """Weight of the chosen response's mean -log p(token)."""


def cpo_loss(inputs: LossInputs, config: CPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean over pairs of the preference and the likelihood term."""
    chosen, rejected = [config.beta * total for total in pair_sums(inputs.policy, inputs)]
    metrics = pair_metrics(chosen, rejected, inputs)
    metrics["chosen_nll"] = chosen_nll(inputs)
    preference = over_pairs(sigmoid_loss(chosen - rejected, config.label_smoothing), inputs)
    return preference + config.nll_coef * metrics["chosen_nll"], metrics


cpo = Algorithm(
    "cpo",
    """Contrastive preference optimization (arXiv 2401.08417): DPO with a uniform reference, plus likelihood.

    -log sigmoid(beta (log p(c) - log p(r))) + nll_coef * mean -log p(token of c)                  (eq. 3-5)

    The likelihood term is taken over the response alone, as in the paper and TRL 1.16.""",
    "pairs",
    CPOConfig(),
    cpo_loss,
    group_size=2,
)


@dataclass(frozen=True)
class ORPOConfig(AlgoConfig):
    """Options of ORPO."""

    beta: Weight = 0.1
    """Weight of the odds ratio term (lambda in the paper)."""


def log_odds(logprob: Float[Array, "B H"]) -> Float[Array, "B H"]:
    """Return log(p / (1 - p)) from log p, without cancellation where p is near 1."""
    logprob = jnp.minimum(logprob, MAX_LOGPROB)
    return logprob - jnp.log(-jnp.expm1(logprob))


def orpo_loss(inputs: LossInputs, config: ORPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean over pairs of the likelihood and the odds ratio term."""
    chosen, rejected = pair_means(inputs.policy, inputs)
    ratio = log_odds(chosen) - log_odds(rejected)
    nll = chosen_nll(inputs)
    metrics = {
        **pair_metrics(config.beta * chosen, config.beta * rejected, inputs),
        "chosen_nll": nll,
        "log_odds_ratio": over_pairs(ratio, inputs),
    }
    return nll - config.beta * over_pairs(jax.nn.log_sigmoid(ratio), inputs), metrics


orpo = Algorithm(
    "orpo",
    """Odds ratio preference optimization (arXiv 2403.07691): likelihood and preference at once, no reference.

    mean -log p(token of c)  -  beta log sigmoid(log odds(c) / odds(r)),   odds = P / (1 - P)      (eq. 6, 7)

    where log P is the mean log-prob of a response's tokens. The likelihood term is taken over the response,
    as in the paper; TRL's includes the prompt's tokens.""",
    "pairs",
    ORPOConfig(),
    orpo_loss,
    group_size=2,
)

# KTO


@dataclass(frozen=True)
class KTOConfig(AlgoConfig):
    """Options of KTO."""

    beta: Positive = 0.1
    """Strength of the KL constraint to the reference."""
    desirable_weight: Weight = 1.0
    """Weight of desirable responses; the paper keeps weight times count of the two within 1 to 4/3."""
    undesirable_weight: Weight = 1.0
    """Weight of undesirable responses."""
    baseline: Literal["mismatched", "other_label"] = "mismatched"
    """Mean log-ratio that z is: of mismatched sequences, or of the responses of the other label."""


def kto_baseline(inputs: LossInputs, config: KTOConfig) -> Float[Array, "*shape"]:
    """Return this micro-batch's part of z before max; "other_label": sums and counts of either label, [4]."""
    ratio, mismatched = pair_sums(inputs.old - inputs.reference, inputs)
    if config.baseline == "mismatched":
        return over_pairs(mismatched, inputs)
    desirable = pair_means(inputs.labels, inputs)[0] > 0.5
    of_label = lambda x: (jnp.where(desirable, x, 0.0), jnp.where(desirable, 0.0, x))
    return jnp.stack([over_pairs(x, inputs) for x in (*of_label(ratio), *of_label(jnp.ones_like(ratio)))])


def kto_loss(inputs: LossInputs, config: KTOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean over responses of weight (1 - value); `inputs.baseline` is z before max."""
    ratio = pair_sums(inputs.policy - inputs.reference, inputs)[0]
    desirable = pair_means(inputs.labels, inputs)[0] > 0.5
    z = inputs.baseline
    if config.baseline == "other_label":
        of_desirable, of_undesirable = z[:2] / jnp.maximum(z[2:], 1e-12)
        z = jnp.where(desirable, of_undesirable, of_desirable)
    z = jax.lax.stop_gradient(jnp.maximum(z, 0.0))
    gain = jnp.where(desirable, ratio - z, z - ratio)
    weight = jnp.where(desirable, config.desirable_weight, config.undesirable_weight)
    each = weight * jax.nn.sigmoid(-config.beta * gain)
    signed = jnp.where(desirable, 2.0, -2.0) * config.beta * ratio
    metrics = {
        "reward_mean": over_pairs(config.beta * ratio, inputs),
        "margin": over_pairs(signed, inputs),  # of desirable over undesirable, as much of each
        "accuracy": over_pairs((gain > 0).astype(gain.dtype), inputs),
        "desirable_fraction": over_pairs(desirable.astype(gain.dtype), inputs),
        "mismatched_kl": over_pairs(pair_sums(inputs.old - inputs.reference, inputs)[1], inputs),
    }
    return over_pairs(each, inputs), metrics


kto = Algorithm(
    "kto",
    """Kahneman-Tversky optimization (arXiv 2402.01306): single responses, each desirable or not.

    r = log p(y | x) - log ref(y | x)
    z = max(0, mean over mismatched (x, y') of log p(y' | x) - log ref(y' | x))                      (eq. 7)
    desirable     desirable_weight   * (1 - sigmoid(beta (r - z)))
    undesirable   undesirable_weight * (1 - sigmoid(beta (z - r)))                                   (eq. 8)

    Segments 1, 3, ... of a row are the responses and 2, 4, ... the mismatched ones, a prompt with the
    response to another, which serve z alone. z carries no gradient and is measured over the mini-batch
    by the policy before the update. Pairs are two responses each; for them OpenRLHF's VanillaKTO takes as z
    the mean log ratio of the mini-batch's responses of the other label (`baseline` "other_label").""",
    "labels",
    KTOConfig(),
    kto_loss,
    requires=lambda config: Requirements(old=True, reference=True),
    baseline=kto_baseline,
    group_size=2,
)
