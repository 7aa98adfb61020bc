"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.reduce import Aggregation, aggregate
from jaxrl_llm.structs import LossInputs, Metrics

INPUT = "tokens"


@dataclass(frozen=True)
class Config(AlgoConfig):
    """Supervised fine-tuning."""

    aggregation: Aggregation = "token"
    """How token losses become one: token (every token counts the same) or sequence (every row does)."""


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """-log p(token), averaged over the tokens whose mask is 1."""
    return aggregate(-signals.policy, signals, config.aggregation), {}
