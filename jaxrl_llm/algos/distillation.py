"""Distillation from teachers: on a dataset's tokens, or on the student's own responses (GKD)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.advantages import group_advantages
from jaxrl_llm.algos.clipped import clip
from jaxrl_llm.algos.config import Aggregation, AlgoConfig, Bound, ClippedConfig
from jaxrl_llm.algos.contract import Algorithm, Divergence, Requirements
from jaxrl_llm.algos.kl import log_ratio
from jaxrl_llm.algos.reduce import aggregate, token_mean
from jaxrl_llm.ranges import CountOrZero, Fraction, Positive, Weight
from jaxrl_llm.structs import LossInputs, Metrics, Rollouts


@dataclass(frozen=True)
class TeacherConfig(AlgoConfig):
    """Teachers of a distillation."""

    teachers: tuple[str, ...] = ()
    """Folders of the teachers; a dataset selects its teacher by index (--data.train.0.teacher 1)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        if not self.teachers:
            yield "teachers", "is empty: set the Hugging Face folder or hub name of a teacher."


@dataclass(frozen=True)
class DistillConfig(TeacherConfig):
    """Options of distillation."""

    beta: Fraction = 0.0
    """0 = forward KL, 1 = reverse KL, between = generalised Jensen-Shannon divergence."""
    temperature: Positive = 1.0
    """Divides the logits of both."""
    top_k: CountOrZero = 0
    """Keep the teacher's top-k tokens, pool the rest; 0 = all."""
    nll_coef: Weight = 0.0
    """Weight of -log p(token), as in supervised fine-tuning."""
    aggregation: Aggregation = "token"
    """Aggregation of token losses, see `aggregate`."""


def distill_loss(inputs: LossInputs, config: DistillConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean divergence, plus the NLL term."""
    metrics = {
        "divergence": token_mean(inputs.divergence, inputs),
        "nll": token_mean(-inputs.logprobs, inputs),
    }
    each = inputs.divergence
    if config.nll_coef:
        each = each - config.nll_coef * inputs.logprobs
    return aggregate(each, inputs, config.aggregation), metrics


distill = Algorithm(
    "distill",
    """Distillation of a teacher's next-token distribution on a dataset's tokens (arXiv 1503.02531).

        mean over tokens of D(teacher || student) + nll_coef * -log p(token)

    D is the generalised Jensen-Shannon divergence of arXiv 2306.13649 (eq. 1): beta 0 is the forward
    KL(teacher || student), 1 the reverse KL(student || teacher), and between them both are measured against
    the mixture beta teacher + (1 - beta) student. Labels say which of the teachers a row has.""",
    "tokens",
    DistillConfig(),
    loss=distill_loss,
    requires=lambda c: Requirements(
        teachers=c.teachers, divergence=Divergence(c.beta, c.temperature, c.top_k)
    ),
    data="teachers",
)


@dataclass(frozen=True)
class GKDConfig(TeacherConfig):
    """Options of on-policy distillation."""

    form: Literal["divergence", "policy_gradient"] = "divergence"
    """Match the teacher's distribution, or take its log-prob of each token as a reward."""
    beta: Fraction = 0.5
    """divergence: 0 = forward KL, 1 = reverse KL, between = generalised Jensen-Shannon divergence."""
    temperature: Positive = 1.0
    """divergence: divides the logits of both."""
    top_k: CountOrZero = 0
    """divergence: keep the teacher's top-k tokens, pool the rest; 0 = all."""
    reward_coef: Weight = 0.0
    """Weight of the task's reward; 0 = the teacher alone."""
    clip_low: Bound = 0.2
    """The ratio of the surrogate may fall to 1 - clip_low."""
    clip_high: Bound = 0.2
    """The ratio of the surrogate may rise to 1 + clip_high."""


def gkd_requires(config: GKDConfig) -> Requirements:
    """Return the teachers' log-probs as the reference, or the divergence from their distributions."""
    rewards = config.reward_coef > 0
    if config.form == "policy_gradient":
        return Requirements(old_logprobs=True, ref_logprobs=True, teachers=config.teachers, rewards=rewards)
    divergence = Divergence(config.beta, config.temperature, config.top_k)
    return Requirements(teachers=config.teachers, divergence=divergence, rewards=rewards)


def gkd_advantages(rollouts: Rollouts, config: GKDConfig) -> Float[Array, "N R"]:
    """Return the teacher's log ratio, the task's reward, both or neither."""
    total = jnp.zeros_like(rollouts.mask)
    if config.form == "policy_gradient":
        total = jnp.where(rollouts.mask > 0, rollouts.ref_logprobs - rollouts.old_logprobs, 0.0)
    if config.reward_coef:
        scores = group_advantages(rollouts.total_rewards, rollouts.group, rollouts.valid)
        total = total + config.reward_coef * scores[:, None] * rollouts.mask
    return total


def gkd_loss(inputs: LossInputs, config: GKDConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the token mean of the divergence, of the clipped surrogate, or of both."""
    total, metrics = jnp.zeros(()), {}
    if config.form == "divergence":
        total = metrics["divergence"] = token_mean(inputs.divergence, inputs)
    else:
        metrics["reverse_kl"] = token_mean(inputs.old_logprobs - inputs.ref_logprobs, inputs)
    if config.form == "policy_gradient" or config.reward_coef:
        ratio = jnp.exp(log_ratio(inputs.logprobs, inputs.old_logprobs))
        bounds = ClippedConfig(clip_low=config.clip_low, clip_high=config.clip_high)
        surrogate, is_clipped = clip(ratio, inputs.advantages, bounds)
        total = total + token_mean(surrogate, inputs)
        metrics["clip_fraction"] = token_mean(is_clipped.astype(surrogate.dtype), inputs)
    return total, metrics


gkd = Algorithm(
    "gkd",
    """On-policy distillation: GKD (arXiv 2306.13649), a teacher scores the student's own responses.

        divergence       mean over tokens of D(teacher || student), see distill
        policy_gradient  advantage log teacher(token) - log old(token), a sample of minus the reverse KL, in
                         PPO's clipped surrogate; the teacher is only scored, as the reference

    `reward_coef` adds the group-relative advantage of a task's reward to the surrogate.""",
    "rollouts",
    GKDConfig(),
    loss=gkd_loss,
    requires=gkd_requires,
    advantages=gkd_advantages,
)
