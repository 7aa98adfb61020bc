"""Online DPO (arXiv 2402.04792): the pairs are the policy's own best and worst response to each prompt.

A run that starts from the weights of the last, which then are its reference, is a round of iterative DPO.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.algos import dpo
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.structs import LossInputs, Metrics, Rollouts

INPUT = "rollouts"
UNIT = 2


@dataclass(frozen=True)
class Config(AlgoConfig):
    """Online DPO."""

    dpo: dpo.Config = field(default_factory=dpo.Config)
    """The loss of a pair."""

    @property
    def needs_reference(self) -> bool:
        return self.dpo.needs_reference


def advantages(rollouts: Rollouts, config: Config) -> Float[Array, "N R"]:
    """None: a pair says which response is better, not by how much."""
    return jnp.zeros_like(rollouts.mask)


def select(rollouts: Rollouts, config: Config, rng: np.random.Generator) -> np.ndarray:
    """Best, worst, best, worst, ... of each group; groups whose rewards are all the same are left out."""
    rewards, group = np.asarray(rollouts.rewards), np.asarray(rollouts.group)
    scored = np.asarray(rollouts.valid) > 0
    chosen = []
    for number in np.unique(group[scored]):
        members = rng.permutation(np.flatnonzero(scored & (group == number)))  # ties fall at random
        best, worst = members[rewards[members].argmax()], members[rewards[members].argmin()]
        if rewards[best] > rewards[worst]:
            chosen += [best, worst]
    return np.asarray(chosen, np.int64)


def loss(signals: LossInputs, config: Config) -> tuple[Float[Array, ""], Metrics]:
    """That of DPO."""
    return dpo.loss(signals, config.dpo)
