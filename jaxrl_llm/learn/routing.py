"""Load of the experts: metrics of an update."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.moe import RoutingSums
from jaxrl_llm.structs import Metrics

ROUTING = "routing"
"""Key of the `RoutingSums` among the metrics of micro-batches, until `routing_metrics` takes it out."""


def balance(
    load: Int[Array, "L X"], scores: Float[Array, "L X"], num_tokens: Float[Array, "*L"]
) -> Float[Array, " L"]:
    """Compute X sum_x f_x P_x of each layer: 1 if all experts are equally likely, at most X.

    f is the share of the assignments, P the mean score: the loss of arXiv 2101.03961, equation 4, with f and
    P over the mini-batch as in arXiv 2501.11873, and shares of all K assignments of a token.

    Args:
        scores: sums over num_tokens tokens.
    """
    shares = load / jnp.sum(load, axis=-1, keepdims=True)
    return load.shape[-1] * jnp.sum(shares * scores, axis=-1) / num_tokens


def routing_metrics(metrics: Metrics) -> tuple[Metrics, RoutingSums | None]:
    """Return the metrics with those of the routing in place of its sums, and these; None without experts."""
    if ROUTING not in metrics:
        return metrics, None
    metrics = dict(metrics)
    sums: RoutingSums = metrics.pop(ROUTING)
    load = sums.load.astype(jnp.float32)
    metrics["moe/load_max"] = jnp.max(load / jnp.mean(load, axis=-1, keepdims=True))
    metrics["moe/balance"] = jnp.mean(balance(load, sums.scores, jnp.sum(sums.scores, axis=-1)))
    return metrics, sums
