"""Odds ratio preference optimization (arXiv 2403.07691): likelihood and preference at once, no reference.

    mean -log p(token of c)  -  beta log sigmoid(log odds(c) / odds(r)),   odds = P / (1 - P)      (eq. 6, 7)

where log P is the mean log-prob of a response's tokens. The likelihood term is taken over the response, as
in the paper; TRL's includes the prompt's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.preference import chosen_nll, over_pairs, pair_means, pair_metrics
from jaxrl_llm.structs import LossInputs, Metrics

INPUT = "pairs"
UNIT = 2
CERTAIN = -1e-6  # nats a token; the odds of a probability nearer to 1 would overflow


@dataclass(frozen=True)
class Config(AlgoConfig):
    """ORPO."""

    beta: float = 0.1
    """Weight of the odds ratio term (lambda in the paper)."""


def log_odds(logprob: Float[Array, "B H"]) -> Float[Array, "B H"]:
    """log(p / (1 - p)) from log p, without cancellation where p is near 1."""
    logprob = jnp.minimum(logprob, CERTAIN)
    return logprob - jnp.log(-jnp.expm1(logprob))


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """Mean over pairs of the likelihood and the odds ratio term."""
    chosen, rejected = pair_means(signals.policy, signals)
    ratio = log_odds(chosen) - log_odds(rejected)
    nll = chosen_nll(signals)
    metrics = {
        **pair_metrics(config.beta * chosen, config.beta * rejected, signals),
        "chosen_nll": nll,
        "log_odds_ratio": over_pairs(ratio, signals),
    }
    return nll - config.beta * over_pairs(jax.nn.log_sigmoid(ratio), signals), metrics
