"""Contrastive preference optimization (arXiv 2401.08417): DPO with a uniform reference, plus likelihood.

    -log sigmoid(beta (log p(c) - log p(r))) + nll_coef * mean -log p(token of c)                  (eq. 3-5)

The likelihood term is taken over the response alone, as in the paper; TRL's includes the prompt's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.preference import chosen_nll, over_pairs, pair_metrics, sigmoid_loss
from jaxrl_llm.algos.reduce import pair_sums
from jaxrl_llm.structs import LossInputs, Metrics

INPUT = "pairs"
UNIT = 2


@dataclass(frozen=True)
class Config(AlgoConfig):
    """CPO."""

    beta: float = 0.1
    """Reward of one nat of the summed log-prob."""
    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round, below 0.5."""
    nll_coef: float = 1.0
    """Weight of the chosen response's mean -log p(token)."""


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """Mean over pairs of the preference and the likelihood term."""
    chosen, rejected = [config.beta * total for total in pair_sums(signals.policy, signals)]
    metrics = pair_metrics(chosen, rejected, signals)
    metrics["chosen_nll"] = chosen_nll(signals)
    preference = over_pairs(sigmoid_loss(chosen - rejected, config.label_smoothing), signals)
    return preference + config.nll_coef * metrics["chosen_nll"], metrics
