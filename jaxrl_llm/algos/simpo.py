"""SimPO (arXiv 2405.14734): no reference; the reward is beta times the mean log-prob of the response.

    -log sigmoid(beta (mean log p(c) - mean log p(r)) - gamma)                                      (eq. 6)

With `nll_coef` it is CPO-SimPO.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.preference import chosen_nll, over_pairs, pair_means, pair_metrics, sigmoid_loss
from jaxrl_llm.structs import LossInputs, Metrics

INPUT = "pairs"
UNIT = 2


@dataclass(frozen=True)
class Config(AlgoConfig):
    """SimPO."""

    beta: float = 2.0
    """Reward of one nat per token."""
    gamma: float = 0.5
    """Margin by which the chosen reward should win."""
    nll_coef: float = 0.0
    """Weight of the chosen response's mean -log p(token)."""


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """Mean over pairs, plus the NLL term."""
    chosen, rejected = [config.beta * mean for mean in pair_means(signals.policy, signals)]
    total = over_pairs(sigmoid_loss(chosen - rejected - config.gamma), signals)
    metrics = pair_metrics(chosen, rejected, signals)
    if config.nll_coef:
        metrics["chosen_nll"] = chosen_nll(signals)
        total = total + config.nll_coef * metrics["chosen_nll"]
    return total, metrics
