"""Process reward model (Let's verify step by step, arXiv 2305.20050; Math-Shepherd, arXiv 2312.08935, eq. 6).

    -(y log sigmoid(v) + (1 - y) log(1 - sigmoid(v)))    at the state that has read a whole step

y is 1 (right), 0 (wrong), or a soft label between: the share of continuations that reach the right answer.
Cross-entropy over two classes, or over a "+" and a "-" token, is the same with v the difference of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.reduce import Aggregation, aggregate, token_mean
from jaxrl_llm.structs import LossInputs, Metrics

INPUT = "tokens"
DATA = "steps"  # the mask marks what follows each step; labels say whether the step was right


@dataclass(frozen=True)
class Config(AlgoConfig):
    """Process reward model."""

    aggregation: Aggregation = "token"
    """token: every step counts the same; sequence: every solution does."""

    @property
    def needs_policy(self) -> bool:
        return False

    @property
    def needs_values(self) -> bool:
        return True


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """Binary cross-entropy of the steps."""
    v, y = signals.values, signals.labels
    each = -(y * jax.nn.log_sigmoid(v) + (1 - y) * jax.nn.log_sigmoid(-v))
    right = ((v > 0) == (y > 0.5)).astype(v.dtype)
    metrics = {"accuracy": token_mean(right, signals), "right_fraction": token_mean(y, signals)}
    return aggregate(each, signals, config.aggregation), metrics
