"""Reward models: Bradley-Terry on pairs, and a process reward model on labelled steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.config import Aggregation, AlgoConfig
from jaxrl_llm.algos.contract import Algorithm, Requirements
from jaxrl_llm.algos.pair_losses import Pair, over_pairs, pair_means, pair_sums, sigmoid_loss
from jaxrl_llm.algos.preference import Smoothing, pair_metrics
from jaxrl_llm.algos.reduce import aggregate, token_mean
from jaxrl_llm.ranges import Weight
from jaxrl_llm.structs import LossInputs, Metrics


@dataclass(frozen=True)
class RewardModelLossConfig(AlgoConfig):
    """Options of the Bradley-Terry loss."""

    margin: bool = True
    """Use the margins of the data; pairs without one have 0."""
    label_smoothing: Smoothing = 0.0
    """Assumed share of pairs with swapped labels, below 0.5."""
    center_coef: Weight = 0.0
    """Weight of (v(chosen) + v(rejected))^2: rewards stay around 0 (arXiv 2312.09244; 0.01 is usual)."""


def last_values(inputs: LossInputs) -> Pair:
    """Return the value at the last position (which has seen all tokens) of chosen and rejected sequences."""
    following = jnp.pad(inputs.segments[:, 1:], ((0, 0), (0, 1)))
    is_last = (inputs.segments != following).astype(inputs.mask.dtype)  # padding, segment 0, has no sum
    return pair_sums(inputs.values, replace(inputs, mask=is_last))


def reward_model_loss(inputs: LossInputs, config: RewardModelLossConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the Bradley-Terry loss, averaged over pairs."""
    chosen, rejected = last_values(inputs)
    logits = chosen - rejected
    if config.margin and inputs.labels is not None:
        logits = logits - pair_means(inputs.labels, inputs)[0]
    total = over_pairs(sigmoid_loss(logits, config.label_smoothing), inputs)
    if config.center_coef:
        total = total + config.center_coef * over_pairs((chosen + rejected) ** 2, inputs)
    return total, pair_metrics(chosen, rejected, inputs)


reward_model = Algorithm(
    "reward_model",
    """Bradley-Terry reward model (arXiv 2203.02155, eq. 1; the margin: Llama 2, arXiv 2307.09288, eq. 2).

    -log sigmoid(v(chosen) - v(rejected) - margin)

    v is the value at the last position of a sequence, which has read all of it. OpenRLHF's "LogExp",
    log(1 + exp(v(rejected) - v(chosen))), is the same function without the margin.""",
    "pairs",
    RewardModelLossConfig(),
    loss=reward_model_loss,
    requires=lambda config: Requirements(logprobs=False, values=True),
    group_size=2,
)


@dataclass(frozen=True)
class ProcessRewardModelConfig(AlgoConfig):
    """Options of the process reward model."""

    aggregation: Aggregation = "token"
    """token: every step counts the same; sequence: every solution does."""


def prm_loss(inputs: LossInputs, config: ProcessRewardModelConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the binary cross-entropy of the steps."""
    v, y = inputs.values, inputs.labels
    each = -(y * jax.nn.log_sigmoid(v) + (1 - y) * jax.nn.log_sigmoid(-v))
    right = ((v > 0) == (y > 0.5)).astype(v.dtype)
    metrics = {"accuracy": token_mean(right, inputs), "right_fraction": token_mean(y, inputs)}
    return aggregate(each, inputs, config.aggregation), metrics


prm = Algorithm(
    "prm",
    """Process reward model (PRM800K, arXiv 2305.20050; Math-Shepherd, arXiv 2312.08935, eq. 6).

    -(y log sigmoid(v) + (1 - y) log(1 - sigmoid(v)))    at the end of each step

    y is 1 (right), 0 (wrong), or a soft label between: the share of continuations that reach the right
    answer. Cross-entropy over two classes, or over a "+" and a "-" token, is the same with v the difference
    of logits. The mask marks what follows each step; labels tell whether the step was right.""",
    "tokens",
    ProcessRewardModelConfig(),
    loss=prm_loss,
    requires=lambda config: Requirements(logprobs=False, values=True),
    data="steps",
)
