"""Preference losses: DPO, SimPO, CPO and ORPO on pairs, online DPO on the policy's own, KTO on single labels.

Segments 1, 2 | 3, 4 | ... of a row are the chosen and the rejected response to a prompt; for KTO, a response
and its mismatched counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.algos.contract import Algorithm, Requirements
from jaxrl_llm.algos.pair_losses import (
    OF_DIFFERENCE,
    PAIR_LOSSES,
    SMOOTHED,
    FDivergence,
    PairLoss,
    PairSettings,
    over_pairs,
    pair_means,
    pair_sums,
    sequence_alignment,
    sigmoid_loss,
    tail_weights,
    transform_ratio,
)
from jaxrl_llm.ranges import Finite, Fraction, Positive, Range, Weight
from jaxrl_llm.structs import LossInputs, Metrics, Rollouts

Smoothing = Annotated[float, Range(0.0, 0.5, open_high=True)]
MAX_LOGPROB = -1e-6  # nats a token; the odds of a probability nearer to 1 would overflow

# Parts of the losses


def chosen_nll(inputs: LossInputs) -> Float[Array, ""]:
    """Return this micro-batch's part of the mean over chosen sequences of their mean -log p(token)."""
    return over_pairs(-pair_means(inputs.logprobs, inputs)[0], inputs)


def share_above_zero(margin: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return 1 for a positive margin, 0 for a negative one, 1/2 for 0: neither side is preferred."""
    return (jnp.sign(margin) + 1) / 2


def pair_metrics(chosen: Float[Array, "B H"], rejected: Float[Array, "B H"], inputs: LossInputs) -> Metrics:
    """Return the mean rewards of both sides, their margin, and how often the chosen reward is larger (ties:
    1/2)."""
    return {
        "chosen_reward": over_pairs(chosen, inputs),
        "rejected_reward": over_pairs(rejected, inputs),
        "margin": over_pairs(chosen - rejected, inputs),
        "accuracy": over_pairs(share_above_zero(chosen - rejected), inputs),
    }


# DPO


@dataclass(frozen=True)
class DPOConfig(AlgoConfig):
    """Options of DPO."""

    beta: Positive = 0.1
    """Strength of the KL constraint to the reference."""
    loss: PairLoss = "sigmoid"
    """Loss of a pair: sigmoid (DPO), ipo, hinge (SLiC), exo, nca, robust, bco, sppo, apo_zero, apo_down or
    discopop."""
    label_smoothing: Smoothing = 0.0
    """Assumed share of pairs with swapped labels, below 0.5 (sigmoid: cDPO; robust; exo)."""
    divergence: FDivergence = "reverse_kl"
    """f-divergence to the reference (f-DPO), of the losses of the difference alone."""
    alpha: Annotated[float, Range(0.0, 10.0, usual="0.5 is usual")] = 0.5
    """Order of the alpha divergence."""
    tail_coef: Fraction = 1.0
    """Weight of the tokens beyond the length of the pair's shorter response (alpha of LD-DPO); 1 = DPO."""
    tau: Positive = 0.05
    """Temperature of discopop's blend."""
    weighted: bool = False
    """Weigh each pair by the probability of its responses under the policy (WPO)."""
    length_normalized: bool = False
    """Average over the tokens of a response instead of summing."""
    nll_coef: Weight = 0.0
    """Weight of the chosen response's mean -log p(token)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for settings that the loss does not read."""
        if self.label_smoothing and self.loss not in SMOOTHED:
            yield "label_smoothing", f"is read by {', '.join(SMOOTHED)} only: set it to 0, or another loss."
        if self.loss == "exo" and not self.label_smoothing:
            yield "label_smoothing", "is 0: the target of exo needs a share above 0; 1e-3 is usual."
        if self.divergence != "reverse_kl" and self.loss not in OF_DIFFERENCE:
            losses = ", ".join(OF_DIFFERENCE)
            yield "divergence", f"is {self.divergence}: {self.loss} has none; losses that have: {losses}."


def dpo_loss(inputs: LossInputs, config: DPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean over pairs of the loss of the two log-ratios, plus the NLL term."""
    ratio = inputs.logprobs - inputs.ref_logprobs
    if config.tail_coef != 1.0:
        ratio = ratio * tail_weights(inputs, config.tail_coef)
    sides = (pair_means if config.length_normalized else pair_sums)(ratio, inputs)
    chosen, rejected = (transform_ratio(side, config.divergence, config.alpha) for side in sides)
    settings = PairSettings(config.beta, config.label_smoothing, config.tau)
    each = PAIR_LOSSES[config.loss](chosen, rejected, settings)
    metrics = pair_metrics(config.beta * chosen, config.beta * rejected, inputs)
    if config.weighted:
        weights = sequence_alignment(inputs)
        metrics["pair_weight"], each = over_pairs(weights, inputs), weights * each
    total = over_pairs(each, inputs)
    if config.nll_coef:
        metrics["chosen_nll"] = chosen_nll(inputs)
        total = total + config.nll_coef * metrics["chosen_nll"]
    return total, metrics


dpo = Algorithm(
    "dpo",
    """Direct preference optimization (arXiv 2305.18290), and the other losses of a pair's log-ratios.

    c = log p(chosen) - log ref(chosen), r likewise of the rejected response, summed over tokens; h = c - r,
    s = sigmoid, e = label_smoothing:

        sigmoid   -(1 - e) log s(beta h) - e log s(-beta h)         DPO, eq. 7; with e > 0 conservative DPO
        ipo       (h - 1 / (2 beta))^2                              IPO, arXiv 2310.12036, eq. 17
        hinge     max(0, 1 - beta h)                                SLiC, arXiv 2305.10425; RSO
        exo       KL((s(beta h), s(-beta h)) || (1 - e, e))         EXO-pref, arXiv 2402.00856, eq. 16
        nca       -log s(beta c) - (log s(-beta c) + log s(-beta r)) / 2     arXiv 2402.05369
        robust    (-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e)    arXiv 2403.00409
        bco       -log s(beta c) - log s(-beta r)                   arXiv 2404.04656, with a shift of 0
        sppo      (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2       arXiv 2405.00675, eq. 4.7, P = 1 and 0
        apo_zero  s(-beta c) + s(beta r)                            arXiv 2408.06266, eq. 7
        apo_down  s(beta c) + s(-beta h)                            arXiv 2408.06266, eq. 8
        discopop  (1 - m) -log s(beta h) + m exp(-beta h), m = s(beta h / tau)   arXiv 2406.08414, eq. 5

    `divergence` puts f'(p / ref) in the place of the log-ratios (f-DPO, arXiv 2309.16240): forward_kl
    1 - exp(-c), js log 2 + log s(c), alpha (exp((alpha - 1) c) - 1) / (alpha - 1). `tail_coef` weighs the
    tokens beyond the shorter response's length (LD-DPO, arXiv 2409.06411). `weighted` multiplies the loss of
    a pair by min(w(c) w(r), 1), w = exp(mean over tokens of log p - log sum p^2): pairs that are likely under
    the policy count more (WPO, arXiv 2406.11827). AOT (arXiv 2406.05882), which pairs by rank, is not here:
    ranks are those of a mini-batch, and a loss sees a micro-batch (docs/algorithms.md).

    `length_normalized` takes means over the tokens instead of sums: TRL's IPO (what its authors ran, by TRL's
    account), and the length-normalised DPO of Tulu 3 (arXiv 2411.15124). `nll_coef` adds the likelihood of
    the chosen answer (arXiv 2404.19733, eq. 1).""",
    "pairs",
    DPOConfig(),
    loss=dpo_loss,
    requires=lambda config: Requirements(ref_logprobs=True, square_in_loss=config.weighted),
    group_size=2,
)


@dataclass(frozen=True)
class OnlineDPOConfig(AlgoConfig):
    """Options of online DPO."""

    dpo: DPOConfig = field(default_factory=dpo.Config)
    """The loss of a pair."""


def best_and_worst(rollouts: Rollouts, config: OnlineDPOConfig, rng: np.random.Generator) -> np.ndarray:
    """Return best, worst, best, worst, ... of each group; groups of equal rewards are left out."""
    rewards, group = np.asarray(rollouts.total_rewards), np.asarray(rollouts.group)
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
    loss=lambda inputs, config: dpo_loss(inputs, config.dpo),
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
    alpha: Annotated[float, Range(-5.0, 5.0, usual="0.1 to 0.25 are usual")] = 0.0
    """Shape of the reward (AlphaPO); 0 = the log-prob."""
    nll_coef: Weight = 0.0
    """Weight of the chosen response's mean -log p(token)."""


def simpo_loss(inputs: LossInputs, config: SimPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean over pairs, plus the NLL term."""
    means = pair_means(inputs.logprobs, inputs)
    chosen, rejected = [config.beta * transform_ratio(mean, "alpha", 1 - config.alpha) for mean in means]
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

    With `nll_coef` it is CPO-SimPO. With `alpha` the reward is beta (1 - p^-alpha) / alpha, where log p is
    that mean (AlphaPO, arXiv 2501.03884, eq. 7), which is beta log p in the limit of 0.""",
    "pairs",
    SimPOConfig(),
    loss=simpo_loss,
    group_size=2,
)


@dataclass(frozen=True)
class CPOConfig(AlgoConfig):
    """Options of CPO."""

    beta: Positive = 0.1
    """Reward of one nat of the summed log-prob."""
    label_smoothing: Smoothing = 0.0
    """Assumed share of pairs with swapped labels, below 0.5 (sigmoid only)."""
    loss: Literal["sigmoid", "hinge"] = "sigmoid"
    """Preference term: -log sigmoid(h), or max(0, 1 - h) (SLiC)."""
    nll_coef: Weight = 1.0
    """Weight of the chosen response's mean -log p(token)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for a share that the loss does not read."""
        if self.label_smoothing and self.loss == "hinge":
            yield "label_smoothing", "is read by sigmoid only: set it to 0, or --algo.loss sigmoid."


def cpo_loss(inputs: LossInputs, config: CPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean over pairs of the preference and the likelihood term."""
    chosen, rejected = [config.beta * total for total in pair_sums(inputs.logprobs, inputs)]
    metrics = pair_metrics(chosen, rejected, inputs)
    metrics["chosen_nll"] = chosen_nll(inputs)
    each = PAIR_LOSSES[config.loss](chosen, rejected, PairSettings(1.0, config.label_smoothing, 1.0))
    preference = over_pairs(each, inputs)
    return preference + config.nll_coef * metrics["chosen_nll"], metrics


cpo = Algorithm(
    "cpo",
    """Contrastive preference optimization (arXiv 2401.08417): DPO with a uniform reference, plus likelihood.

    -log sigmoid(beta (log p(c) - log p(r))) + nll_coef * mean -log p(token of c)                  (eq. 3-5)

    The likelihood term is taken over the response alone, as in the paper and TRL 1.16.""",
    "pairs",
    CPOConfig(),
    loss=cpo_loss,
    group_size=2,
)


@dataclass(frozen=True)
class ORPOConfig(AlgoConfig):
    """Options of ORPO."""

    beta: Weight = 0.1
    """Weight of the odds ratio term (lambda in the paper)."""


def log_odds(logprob: Float[Array, "B H"]) -> Float[Array, "B H"]:
    """Return log(p / (1 - p)) from log p, without cancellation for p near 1."""
    logprob = jnp.minimum(logprob, MAX_LOGPROB)
    return logprob - jnp.log(-jnp.expm1(logprob))


def orpo_loss(inputs: LossInputs, config: ORPOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean over pairs of the likelihood and the odds ratio term."""
    chosen, rejected = pair_means(inputs.logprobs, inputs)
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
    loss=orpo_loss,
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
    """Baseline z: the mean log-ratio of mismatched sequences, or of the responses of the other label."""


def kto_baseline(inputs: LossInputs, config: KTOConfig) -> Float[Array, "*shape"]:
    """Return this micro-batch's part of z before max; "other_label": sums and counts of either label, [4]."""
    ratio, mismatched = pair_sums(inputs.old_logprobs - inputs.ref_logprobs, inputs)
    if config.baseline == "mismatched":
        return over_pairs(mismatched, inputs)
    desirable = pair_means(inputs.labels, inputs)[0] > 0.5
    of_label = lambda x: (jnp.where(desirable, x, 0.0), jnp.where(desirable, 0.0, x))
    return jnp.stack([over_pairs(x, inputs) for x in (*of_label(ratio), *of_label(jnp.ones_like(ratio)))])


def kto_loss(inputs: LossInputs, config: KTOConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean over responses of weight (1 - value); `inputs.baseline` is z before max."""
    ratio = pair_sums(inputs.logprobs - inputs.ref_logprobs, inputs)[0]
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
        "margin": over_pairs(signed, inputs),  # desirable minus undesirable, equally weighted
        "accuracy": over_pairs(share_above_zero(gain), inputs),
        "desirable_fraction": over_pairs(desirable.astype(gain.dtype), inputs),
        "mismatched_kl": over_pairs(pair_sums(inputs.old_logprobs - inputs.ref_logprobs, inputs)[1], inputs),
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
    loss=kto_loss,
    requires=lambda config: Requirements(old_logprobs=True, ref_logprobs=True),
    baseline=kto_baseline,
    group_size=2,
)
