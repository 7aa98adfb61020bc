"""Imitation, -log p(token): supervised fine-tuning on examples, RAFT on the policy's own best responses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.algos.config import Aggregation, AlgoConfig
from jaxrl_llm.algos.contract import Algorithm
from jaxrl_llm.algos.reduce import aggregate
from jaxrl_llm.ranges import Count, Range
from jaxrl_llm.structs import LossInputs, Metrics, Rollouts


@dataclass(frozen=True)
class SFTConfig(AlgoConfig):
    """Options of supervised fine-tuning."""

    aggregation: Aggregation = "token"
    """Aggregation: token (every token counts the same) or sequence (every example does)."""
    loss: Literal["nll", "dft"] = "nll"
    """Loss of a token: -log p, or -sg[p] log p (dynamic fine-tuning)."""


@dataclass(frozen=True)
class RAFTConfig(AlgoConfig):
    """Options of best-of-n imitation."""

    best: Count | None = 1
    """Responses kept for each prompt; None = all that are good enough."""
    above: Annotated[float, Range(-math.inf, math.inf)] = 0.0
    """Only responses with a larger reward are kept."""
    aggregation: Aggregation = "token"
    """Aggregation: token (every token counts the same) or sequence (every response does)."""


def nll_loss(inputs: LossInputs, config: SFTConfig | RAFTConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean of -log p(token) over tokens with mask 1."""
    return aggregate(-inputs.logprobs, inputs, config.aggregation), {}


def sft_loss(inputs: LossInputs, config: SFTConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the negative log-likelihood; dft weighs each token by its probability."""
    if config.loss == "nll":
        return nll_loss(inputs, config)
    weight = jnp.exp(jax.lax.stop_gradient(inputs.logprobs))
    return aggregate(-weight * inputs.logprobs, inputs, config.aggregation), {}


sft = Algorithm(
    "sft",
    """Supervised fine-tuning: the mean negative log-likelihood of the trained tokens.

    `loss` "dft" weighs each token by its probability, which carries no gradient: dynamic fine-tuning (arXiv
    2508.05629).""",
    "tokens",
    SFTConfig(),
    loss=sft_loss,
)


def raft_advantages(rollouts: Rollouts, config: RAFTConfig) -> Float[Array, "N R"]:
    """Return 1 for all tokens of all responses; `best_of_group` decides."""
    return rollouts.mask * rollouts.valid[:, None]


def best_of_group(rollouts: Rollouts, config: RAFTConfig, rng: np.random.Generator) -> np.ndarray:
    """Return the best responses of each prompt, ties broken at random, in their original order."""
    valid, group = np.asarray(rollouts.valid) > 0, np.asarray(rollouts.group)
    rewards = np.where(valid, np.asarray(rollouts.total_rewards), -np.inf)
    order = rng.permutation(len(rewards))
    order = order[np.argsort(-rewards[order], kind="stable")]
    taken: dict[int, int] = {}
    kept = []
    for i in order:
        rank = taken[int(group[i])] = taken.get(int(group[i]), 0) + 1
        if rewards[i] > config.above and (config.best is None or rank <= config.best):
            kept.append(i)
    return np.sort(np.array(kept, np.int64))


raft = Algorithm(
    "raft",
    """Rejection sampling, best-of-n, expert iteration: RAFT (arXiv 2304.06767), ReST-EM (arXiv 2312.06585).

    Of the responses to each prompt, those with a reward above `above` and among the `best` are imitated:
    loss = -log pi. With `best = None` all correct responses are (ReST-EM); others are left out.""",
    "rollouts",
    RAFTConfig(),
    loss=nll_loss,
    advantages=raft_advantages,
    select=best_of_group,
)
