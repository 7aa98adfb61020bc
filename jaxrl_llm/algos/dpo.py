"""Direct preference optimization (arXiv 2305.18290), conservative DPO and IPO (arXiv 2310.12036).

h = (log p(c) - log ref(c)) - (log p(r) - log ref(r)), over the summed log-probs of chosen c and rejected r:

    sigmoid   -log sigmoid(beta h)             DPO, eq. 7; with label_smoothing cDPO
    ipo       (h - 1 / (2 beta))^2             IPO, eq. 17

`length_normalized` takes means over the tokens instead of sums: TRL's IPO (what its authors ran, by TRL's
account), and the length-normalised DPO of Tulu 3 (arXiv 2411.15124). `nll_coef` adds the likelihood of the
chosen answer (arXiv 2404.19733, eq. 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.preference import chosen_nll, over_pairs, pair_means, pair_metrics, sigmoid_loss
from jaxrl_llm.algos.reduce import pair_sums
from jaxrl_llm.structs import LossInputs, Metrics

INPUT = "pairs"
UNIT = 2


@dataclass(frozen=True)
class Config(AlgoConfig):
    """DPO."""

    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid (DPO) or ipo."""
    label_smoothing: float = 0.0
    """Share of pairs taken to be labelled the wrong way round, below 0.5 (cDPO; sigmoid only)."""
    length_normalized: bool = False
    """Means over the tokens of a response instead of sums."""
    reference_free: bool = False
    """Leave the reference out: no reference model at all."""
    nll_coef: float = 0.0
    """Weight of the chosen response's mean -log p(token)."""

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """Mean over pairs of the loss of h, plus the NLL term."""
    ratio = signals.policy if config.reference_free else signals.policy - signals.reference
    chosen, rejected = (pair_means if config.length_normalized else pair_sums)(ratio, signals)
    h = chosen - rejected
    if config.loss == "ipo":
        each = (h - 1 / (2 * config.beta)) ** 2
    else:
        each = sigmoid_loss(config.beta * h, config.label_smoothing)
    total = over_pairs(each, signals)
    metrics = pair_metrics(config.beta * chosen, config.beta * rejected, signals)
    if config.nll_coef:
        metrics["chosen_nll"] = chosen_nll(signals)
        total = total + config.nll_coef * metrics["chosen_nll"]
    return total, metrics
