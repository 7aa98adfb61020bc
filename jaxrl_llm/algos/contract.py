"""What an algorithm is: one module of arithmetic.

    INPUT = "rollouts"          # responses of the policy itself, with rewards
          | "tokens"            # examples to imitate
          | "pairs"             # a chosen and a rejected response to each prompt
          | "labels"            # single responses, each with a label
    UNIT = 1                    # sequences that stay side by side in a row; 2: chosen, rejected, chosen, ...
    class Config(AlgoConfig)    # frozen dataclass; its properties say which signals are computed
    def loss(signals, config) -> (Float[Array, ""], Metrics)

    def baseline(signals, config) -> Float[Array, ""]        # optional: a micro-batch's part of one number of
                                                             # the whole mini-batch, before its update

and, where INPUT is "rollouts",

    def advantages(rollouts, config) -> Float[Array, "N R"]
    def returns(rollouts, config) -> Float[Array, "N R"]     # where values are had: what a critic learns
    def select(rollouts, config, rng) -> int [M]             # optional, numpy: the trajectories learned from

Metrics are sums over the tokens at hand divided by the global denominators, so that adding up the
micro-batches gives the mean of the mini-batch; a key that ends in "/max" or "/max_abs" is combined by max.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import Array

from jaxrl_llm.structs import Metrics


@dataclass(frozen=True)
class AlgoConfig:
    """Base of every algorithm's Config; says which signals it wants computed.

    Each costs something: a forward pass of another model, or a gradient.
    """

    @property
    def needs_policy(self) -> bool:
        """Log-probs of the policy; a critic or reward model learns without."""
        return True

    @property
    def needs_entropy(self) -> bool:
        """Gradient through the entropy; its value is measured anyway."""
        return False

    @property
    def needs_old(self) -> bool:
        """Log-probs before this step's updates even where one update a step makes them the policy's own."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Log-probs of the frozen reference model."""
        return False

    @property
    def needs_values(self) -> bool:
        """A value head on the model that learns."""
        return False

    @property
    def needs_critic(self) -> bool:
        """Values of a critic with a backbone of its own."""
        return False

    @property
    def needs_square(self) -> bool:
        """Sum over the vocabulary of the policy's p^2."""
        return False

    @property
    def needs_greedy(self) -> bool:
        """A greedy response to every prompt, and its reward."""
        return False

    @property
    def draws(self) -> int:
        """Batches of prompts that may be rolled out for one step; with several, only groups whose rewards
        differ are kept, until the step is full (DAPO's dynamic sampling)."""
        return 1

    @property
    def teachers(self) -> tuple[str, ...]:
        """Folders of the models that are learned from."""
        return ()

    @property
    def divergence(self) -> dict[str, Any] | None:
        """Settings of `linear_divergence` from the teacher's whole distribution; None = not wanted."""
        return None

    @property
    def bypass_old(self) -> bool:
        """The old log-probs are those the rollout reported: no forward pass for them."""
        return False

    @property
    def initial_kl_coef(self) -> float:
        """Where the KL controller starts."""
        return 0.0

    def next_kl_coef(self, kl_coef: Array, metrics: Metrics, num_sequences: Array) -> Array:
        """The KL controller: its coefficient after an update with these metrics."""
        return kl_coef
