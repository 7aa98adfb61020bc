"""Distillation: learn a teacher's whole next-token distribution on a dataset's tokens (arXiv 1503.02531).

    mean over tokens of D(teacher || student) + nll_coef * -log p(token)

D is the generalised Jensen-Shannon divergence of arXiv 2306.13649 (eq. 1): beta 0 is the forward KL(teacher
|| student), 1 the reverse KL(student || teacher), and between them the mixture beta teacher + (1 - beta)
student is what both are measured against.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.reduce import Aggregation, aggregate, token_mean
from jaxrl_llm.structs import LossInputs, Metrics

INPUT = "tokens"
DATA = "teachers"  # labels say which of the teachers a row has


@dataclass(frozen=True)
class Config(AlgoConfig):
    """Distillation."""

    teachers: tuple[str, ...] = ()
    """Folders of the teachers; a source of data names its own by place (--data.train.0.teacher 1)."""
    beta: float = 0.0
    """0 = forward KL, 1 = reverse KL, between = generalised Jensen-Shannon divergence."""
    temperature: float = 1.0
    """Divides the logits of both."""
    top_k: int = 0
    """Tokens of the teacher that are told apart, the rest counting as one; 0 = all."""
    nll_coef: float = 0.0
    """Weight of -log p(token), as in supervised fine-tuning."""
    aggregation: Aggregation = "token"
    """How token losses become one."""

    @property
    def divergence(self) -> dict:
        """Keyword arguments of linear_divergence."""
        return {"beta": self.beta, "temperature": self.temperature, "top_k": self.top_k}


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """Mean divergence, plus the NLL term."""
    metrics = {
        "divergence": token_mean(signals.divergence, signals),
        "nll": token_mean(-signals.policy, signals),
    }
    each = signals.divergence
    if config.nll_coef:
        each = each - config.nll_coef * signals.policy
    return aggregate(each, signals, config.aggregation), metrics
