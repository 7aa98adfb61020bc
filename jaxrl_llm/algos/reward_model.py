"""Bradley-Terry reward model (arXiv 2203.02155, eq. 1; the margin: Llama 2, arXiv 2307.09288, eq. 2).

    -log sigmoid(v(chosen) - v(rejected) - margin)

v is the value at the last position of a sequence, which has read all of it. OpenRLHF's "LogExp",
log(1 + exp(v(rejected) - v(chosen))), is the same function without the margin.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.preference import last_values, over_pairs, pair_means, pair_metrics, sigmoid_loss
from jaxrl_llm.structs import LossInputs, Metrics

INPUT = "pairs"
UNIT = 2


@dataclass(frozen=True)
class Config(AlgoConfig):
    """Reward model."""

    margin: bool = True
    """Use the margins of the data; pairs without one have 0."""
    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round, below 0.5."""
    center_coef: float = 0.0
    """Weight of (v(chosen) + v(rejected))^2: rewards stay around 0 (arXiv 2312.09244; 0.01 is usual)."""

    @property
    def needs_policy(self) -> bool:
        return False

    @property
    def needs_values(self) -> bool:
        return True


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """Mean over pairs."""
    chosen, rejected = last_values(signals)
    logits = chosen - rejected
    if config.margin and signals.labels is not None:
        logits = logits - pair_means(signals.labels, signals)[0]
    total = over_pairs(sigmoid_loss(logits, config.label_smoothing), signals)
    if config.center_coef:
        total = total + config.center_coef * over_pairs((chosen + rejected) ** 2, signals)
    return total, pair_metrics(chosen, rejected, signals)
