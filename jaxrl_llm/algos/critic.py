"""Critic: values that predict the returns (PPO, arXiv 1707.06347, section 5)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algos.config import VALUE, ValueConfig
from jaxrl_llm.algos.contract import Algorithm, Requirements
from jaxrl_llm.algos.kl import clamp
from jaxrl_llm.algos.reduce import aggregate, token_mean
from jaxrl_llm.structs import LossInputs, Metrics


def value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    clip: float | None,
    factor: float = 0.5,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return factor max((V - R)^2, (clip(V, old +- clip) - R)^2), and the tokens that the clip bounds."""
    plain = (values - returns) ** 2
    if clip is None:
        return factor * plain, jnp.zeros(plain.shape, bool)
    clipped = (clamp(values, old_values - clip, old_values + clip) - returns) ** 2
    return factor * jnp.maximum(plain, clipped), clipped > plain


def critic_loss(inputs: LossInputs, config: ValueConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return the clipped squared error, and metrics that add up to the explained variance.

    Explained variance of the mini-batch is 1 - value_error / (return_square - return^2).
    """
    per_token, clipped = value_loss(
        inputs.values, inputs.old_values, inputs.returns, config.value_clip, config.factor
    )
    metrics = {
        "value": token_mean(inputs.values, inputs),
        "return": token_mean(inputs.returns, inputs),
        "return_square": token_mean(inputs.returns**2, inputs),
        "value_error": token_mean((inputs.values - inputs.returns) ** 2, inputs),
        "value_clip_fraction": token_mean(clipped.astype(per_token.dtype), inputs),
    }
    return aggregate(per_token, inputs, config.aggregation), metrics


value = Algorithm(
    "value",
    """Value regression, the critic's own algorithm (PPO, arXiv 1707.06347, section 5).

    loss = factor max((V - R)^2, (clip(V, old +- clip) - R)^2), R the returns.""",
    "rollouts",
    VALUE,
    critic_loss,
    requires=lambda config: Requirements(logprobs=False, values=True),
)
