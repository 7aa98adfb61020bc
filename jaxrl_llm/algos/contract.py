"""What an algorithm is: one module of arithmetic.

    INPUT = "rollouts"                                       # or "tokens"
    class Config(AlgoConfig): ...                            # frozen dataclass
    def advantages(rollouts, config) -> Float[Array, "N R"]  # INPUT "rollouts" only
    def loss(signals, config) -> (Float[Array, ""], Metrics)

Metrics are sums over the tokens at hand divided by the global denominators, so that adding up the
micro-batches gives the mean of the mini-batch; a key that ends in "/max" or "/max_abs" is combined by max.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgoConfig:
    """Base of every algorithm's Config; says which signals the loss wants computed."""

    @property
    def needs_reference(self) -> bool:
        """Log-probs of the frozen reference model."""
        return False

    @property
    def needs_entropy(self) -> bool:
        """Gradient through the entropy; its value is measured anyway."""
        return False
