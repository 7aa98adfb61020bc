"""Routing of tokens to experts in training: load of the experts, balance loss, selection bias, replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.experts.router import SELECTION_BIAS, RoutingSums
from jaxrl_llm.models.stacks import layer_places, layer_stacks
from jaxrl_llm.structs import Batch, Metrics, Params

ROUTING = "routing"
"""Name of the `RoutingSums` among a model's outputs and, until `routing_metrics` takes them out, metrics."""
ROUTES = "routes"
"""Name of the routes of each token among a model's outputs."""


def reads_logits(names: Sequence[str]) -> bool:
    """Return whether a model computes logits for these outputs (`learn.update.model_outputs`)."""
    return not {*names} <= {"values", ROUTES, ROUTING}


@dataclass(frozen=True)
class Replay:
    """Router replay of a model."""

    source: Literal["old", "rollout"]
    route: jax.ShapeDtypeStruct  # of a token (`models.experts.router.route_spec`)


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
    """Replace the routing sums by routing metrics; return (metrics, sums), with sums None without experts."""
    if ROUTING not in metrics:
        return metrics, None
    metrics = dict(metrics)
    sums: RoutingSums = metrics.pop(ROUTING)
    load = sums.load.astype(jnp.float32)
    metrics["moe/load_max"] = jnp.max(load / jnp.mean(load, axis=-1, keepdims=True))
    metrics["moe/balance"] = jnp.mean(balance(load, sums.scores, jnp.sum(sums.scores, axis=-1)))
    if sums.replayed is not None:
        metrics["moe/route_agreement"] = jnp.sum(sums.agreed) / jnp.maximum(jnp.sum(sums.replayed), 1)
    return metrics, sums


def balance_weights(
    score: Callable[..., dict], params: Params, batches: Sequence[Batch]
) -> Float[Array, "L X"]:
    """Return X f / N of a mini-batch of N tokens: the balance loss is the sum of these times the scores.

    The loss is linear in the tokens once f, which has no gradient, is known; so it and its gradient add over
    any split into micro-batches, rows and devices.

    Args:
        score: (params, batch, names) -> `learn.update.model_outputs`: a forward pass before the update.
    """
    sums = [score(params, batch, names=(ROUTING,))[ROUTING] for batch in batches]
    load, scores, *_ = functools.reduce(functools.partial(jax.tree.map, jnp.add), sums)
    num_tokens = jnp.sum(scores, axis=-1, keepdims=True)
    return load.shape[-1] * load / jnp.sum(load, axis=-1, keepdims=True) / num_tokens


def with_bias_gradient(grads: Params, sums: RoutingSums | None) -> Params:
    """Set the gradient of the selection bias to sign(load - mean load) (arXiv 2408.15664)."""
    if sums is None:
        return grads
    load = sums.load.astype(jnp.float32)
    excess = jnp.sign(load - jnp.mean(load, axis=-1, keepdims=True))
    # Sums are in the order of the layers, which may be in several stacks.
    stacks = layer_stacks(grads.config)
    sparse = [name for name, _ in layer_places(grads.config) if stacks[name].moe]

    def of_stack(path, gradient):
        if not _is_bias(path):
            return gradient
        stack = jax.tree_util.keystr(path, simple=True, separator=".").partition(".")[0]
        return excess[jnp.asarray([i for i, name in enumerate(sparse) if name == stack])]

    return jax.tree_util.tree_map_with_path(of_stack, grads)


def move_bias(inner: optax.GradientTransformation, rate: float) -> optax.GradientTransformation:
    """Return the transformation with gradient descent of this rate for the selection bias alone."""

    def update(updates, state, params=None):
        others = jax.tree_util.tree_map_with_path(lambda path, g: 0 * g if _is_bias(path) else g, updates)
        new, state = inner.update(others, state, params)
        choose = lambda path, u, g: -rate * g if _is_bias(path) else u
        return jax.tree_util.tree_map_with_path(choose, new, updates), state

    return optax.GradientTransformation(inner.init, update)


def _is_bias(path: tuple) -> bool:
    return SELECTION_BIAS in jax.tree_util.keystr(path)
