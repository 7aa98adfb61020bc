"""Rejection sampling, best-of-n, expert iteration: RAFT (arXiv 2304.06767), ReST-EM (arXiv 2312.06585).

Of the responses to each prompt, those with a reward above `above` and among the `best` are imitated:
loss = -log pi. With `best = None` all correct responses are (ReST-EM); others teach nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.reduce import Aggregation, aggregate
from jaxrl_llm.structs import LossInputs, Metrics, Rollouts

INPUT = "rollouts"


@dataclass(frozen=True)
class Config(AlgoConfig):
    """Best-of-n imitation."""

    best: int | None = 1
    """Responses kept of each prompt; None = all that are good enough."""
    above: float = 0.0
    """Only responses with a larger reward are kept."""
    aggregation: Aggregation = "token"
    """How token losses become one: token (every token counts the same) or sequence (every response does)."""


def advantages(rollouts: Rollouts, config: Config) -> Float[Array, "N R"]:
    """All tokens of all responses weigh the same; `select` decides."""
    return rollouts.mask * rollouts.valid[:, None]


def select(rollouts: Rollouts, config: Config, rng: np.random.Generator) -> np.ndarray:
    """The best responses of each prompt, ties broken at random, in their original order."""
    valid, group = np.asarray(rollouts.valid) > 0, np.asarray(rollouts.group)
    rewards = np.where(valid, np.asarray(rollouts.rewards), -np.inf)
    order = rng.permutation(len(rewards))
    order = order[np.argsort(-rewards[order], kind="stable")]
    taken: dict[int, int] = {}
    kept = []
    for i in order:
        rank = taken[int(group[i])] = taken.get(int(group[i]), 0) + 1
        if rewards[i] > config.above and (config.best is None or rank <= config.best):
            kept.append(i)
    return np.sort(np.array(kept, np.int64))


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """-log pi."""
    return aggregate(-signals.policy, signals, config.aggregation), {}
