"""What the algorithms with PPO's clipped surrogate share."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Bool, Float

from jaxrl_llm.algos.policy_gradient import PolicyConfig, finish
from jaxrl_llm.algos.policy_losses import ppo_clip
from jaxrl_llm.structs import LossInputs, Metrics


@dataclass(frozen=True)
class ClippedConfig(PolicyConfig):
    """Options of the clipped surrogate."""

    clip_low: float = 0.2
    """The ratio may fall to 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio may rise to 1 + clip_high (DAPO: 0.28)."""
    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative (3.0 is usual); None = none."""
    loss_cap: float | None = None
    """Bound on the loss of every token (ChatLearn: 3.0); None = none."""


def surrogate(signals: LossInputs, config: ClippedConfig) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """(max(-A r, -A clip(r, 1 - low, 1 + high)) of each token, where the clip took the gradient away)."""
    return ppo_clip(
        signals.policy,
        signals.old,
        signals.advantages,
        config.clip_low,
        config.clip_high,
        config.dual_clip,
        config.loss_cap,
    )


def loss(signals: LossInputs, config: ClippedConfig) -> tuple[Float[Array, ""], Metrics]:
    """The clipped surrogate, r = exp(policy - old); with one update a step r is 1."""
    per_token, clipped = surrogate(signals, config)
    return finish(per_token, {"clip_fraction": clipped}, signals, config)
