"""On-policy distillation: the student writes, the teacher says what it would have written (arXiv 2306.13649).

    divergence       mean over tokens of D(teacher || student), of both whole distributions (distill.py)
    policy_gradient  advantage log teacher(token) - log old(token), a sample of minus the reverse KL, in the
                     clipped surrogate of PPO; the teacher is only scored, as the reference

`reward_coef` adds the group-relative advantage of a task's reward to the surrogate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.advantages import group_advantages
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.policy_losses import ppo_clip
from jaxrl_llm.algos.reduce import token_mean
from jaxrl_llm.structs import LossInputs, Metrics, Rollouts

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(AlgoConfig):
    """On-policy distillation."""

    teachers: tuple[str, ...] = ()
    """Folders of the teachers; a source of data names its own by place (--data.train.0.teacher 1)."""
    form: Literal["divergence", "policy_gradient"] = "divergence"
    """Learn the teacher's whole distribution, or take its log-prob of each token written for a reward."""
    beta: float = 0.5
    """divergence: 0 = forward KL, 1 = reverse KL, between = generalised Jensen-Shannon divergence."""
    temperature: float = 1.0
    """divergence: divides the logits of both."""
    top_k: int = 0
    """divergence: tokens of the teacher that are told apart, the rest counting as one; 0 = all."""
    reward_coef: float = 0.0
    """Weight of the task's reward; 0 = the teacher alone teaches."""
    clip_low: float = 0.2
    """The ratio of the surrogate may fall to 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio of the surrogate may rise to 1 + clip_high."""

    @property
    def needs_old(self) -> bool:
        return self.form == "policy_gradient"

    @property
    def needs_reference(self) -> bool:
        return self.form == "policy_gradient"

    @property
    def divergence(self) -> dict | None:
        """Keyword arguments of linear_divergence; None = the teacher is only scored."""
        if self.form == "policy_gradient":
            return None
        return {"beta": self.beta, "temperature": self.temperature, "top_k": self.top_k}


def advantages(rollouts: Rollouts, config: Config) -> Float[Array, "N R"]:
    """What the surrogate pushes on: the teacher's log ratio, the task's reward, both or neither."""
    total = jnp.zeros_like(rollouts.mask)
    if config.form == "policy_gradient":
        total = jnp.where(rollouts.mask > 0, rollouts.reference - rollouts.old, 0.0)
    if config.reward_coef:
        scores = group_advantages(rollouts.rewards, rollouts.group, rollouts.valid)
        total = total + config.reward_coef * scores[:, None] * rollouts.mask
    return total


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """Token mean of the divergence, of the clipped surrogate, or of both."""
    total, metrics = jnp.zeros(()), {}
    if config.form == "divergence":
        total = metrics["divergence"] = token_mean(signals.divergence, signals)
    else:
        metrics["reverse_kl"] = token_mean(signals.old - signals.reference, signals)
    if config.form == "policy_gradient" or config.reward_coef:
        surrogate, clipped = ppo_clip(
            signals.policy, signals.old, signals.advantages, config.clip_low, config.clip_high
        )
        total = total + token_mean(surrogate, signals)
        metrics["clip_fraction"] = token_mean(clipped.astype(surrogate.dtype), signals)
    return total, metrics
