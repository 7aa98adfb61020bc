"""Mixture of experts: the router, and the feed-forward of each token by the experts that it chooses.

Choosing and weighing experts are separate steps: weights, with gradients, can be computed for any choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl_kernels import batch_invariant
from jaxrl_llm.models.config import MoEConfig, TransformerConfig
from jaxrl_llm.models.experts.dispatch import sharded_experts
from jaxrl_llm.models.experts.weights import (
    AdaptedMatrices,
    ExpertWeights,
    Gate,
    QuantizedMatrices,
    dense_expert,
    product_with,
)
from jaxrl_llm.models.linear import adapter_of
from jaxrl_llm.models.quantize import SCALE, dequantize_weight
from jaxrl_llm.sharding.rules import Rules

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers

Activation = Callable[[Array], Array]
SELECTION_BIAS = "router_bias"
"""Name of the bias that is added to the scores when experts are chosen; its gradient is 0."""
SMALLEST_SUM = 1e-20
"""Added to the sum of all sigmoids in statistics of scores: they may all be 0."""


class Routing(NamedTuple):
    """Routing of one layer."""

    logits: Float[Array, "B T X"]
    chosen: Int[Array, "B T K"]  # ascending
    own: Int[Array, "B T K"] | None = None  # the router's choice, if other choices are replayed
    is_replayed: Bool[Array, "B T"] | None = None


class RoutingSums(NamedTuple):
    """Sums over tokens without padding, for all L layers with experts; sums of micro-batches add up."""

    load: Int[Array, "*L X"]  # assignments to each expert
    scores: Float[Array, "*L X"]  # the router's scores, which sum to 1 for each token
    replayed: Int[Array, "*L"] | None = None  # replayed assignments
    agreed: Int[Array, "*L"] | None = None  # replayed assignments that the router would have chosen


def copy_dtype(name: str, dtype: DTypeLike) -> DTypeLike:
    """Return the type of a weight in copies, files and pushes of type `dtype`.

    The bias that chooses experts is always float32: bfloat16 would round away its small steps.
    """
    return jnp.float32 if SELECTION_BIAS in name else dtype


def reads_float32(name: str) -> bool:
    """Return whether the forward pass reads a weight ("layers.q") in float32, whatever the type of products:
    norms, sinks, decays, skips, value heads, the bias that chooses experts and the factors of their weights,
    weights of index heads, scales of quantized weights."""
    parts = (
        "norm",
        "sinks",
        "a_log",
        "dt_bias",
        "mamba_skip",
        "router_gain",
        "index_weights",
        SELECTION_BIAS,
        SCALE,
    )
    return name == "value" or any(part in name for part in parts)


def route_spec(c: TransformerConfig) -> jax.ShapeDtypeStruct:
    """Return shape [L, K] and type of a token's routes: the experts that it chose in each layer with experts.

    The largest value of the type is `unknown_route`.
    """
    dtype = jnp.uint8 if c.moe.num_experts <= jnp.iinfo(jnp.uint8).max else jnp.uint16
    return jax.ShapeDtypeStruct((c.num_sparse_layers, c.moe.experts_per_token), dtype)


def unknown_route(dtype: DTypeLike) -> int:
    """Return the route value that leaves the choice to the router."""
    return int(jnp.iinfo(dtype).max)


def join_routes(c: TransformerConfig, chosen: Int[Array, "L B T K"] | None) -> UInt[Array, "B T L K"] | None:
    """Return the experts chosen in each layer as the routes of each token."""
    return None if chosen is None else jnp.moveaxis(chosen, 0, 2).astype(route_spec(c).dtype)


def router_logits(w: Layers, h: Float[Array, "B T D"]) -> Float[Array, "B T X"]:
    """Return the router's logits, float32 whatever the type of the product's inputs.

    Args:
        h: the router's input: of most models the experts' input.
    """
    logits = jnp.einsum("btd,dx->btx", h, w.router[...], preferred_element_type=jnp.float32)
    return logits + w.router_logit_bias[...] if hasattr(w, "router_logit_bias") else logits


def choose_experts(
    moe: MoEConfig, logits: Float[Array, "B T X"], bias: Float[Array, " X"] | None = None
) -> Int[Array, "B T K"]:
    """Return the numbers of the experts with the largest scores; ties go to the lower number. No gradient.

    With groups, only experts of the kept groups count (group-limited routing, arXiv 2412.19437, 2.1.2).

    Args:
        bias: added to the scores (`selection_bias`).
    """
    logits = jax.lax.stop_gradient(logits)
    if bias is None and moe.groups == 1:  # scores rise with the logits
        return jnp.sort(jax.lax.top_k(logits, moe.experts_per_token)[1], axis=-1)
    scores = jax.nn.sigmoid(logits) if moe.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    scores = scores if bias is None else scores + jax.lax.stop_gradient(bias)
    if moe.groups > 1:
        by_group = scores.reshape(*scores.shape[:-1], moe.groups, -1)
        best = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
        kept = jax.lax.top_k(best, moe.groups_kept)[1]
        is_kept = jnp.any(kept[..., None] == jnp.arange(moe.groups), axis=-2)
        scores = jnp.where(is_kept[..., None], by_group, -jnp.inf).reshape(scores.shape)
    return jnp.sort(jax.lax.top_k(scores, moe.experts_per_token)[1], axis=-1)


def expert_weights(
    moe: MoEConfig,
    logits: Float[Array, "B T X"],
    chosen: Int[Array, "B T K"],
    gain: Float[Array, " X"] | None = None,
) -> Float[Array, "B T K"]:
    """Return the weights of the chosen experts: scores, over their sum if `normalize`, times `scale`, and
    times the expert's `gain` if the model has one (`branches`)."""
    if moe.score == "softmax":
        weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), chosen, axis=-1)
    else:
        weights = jnp.take_along_axis(logits, chosen, axis=-1)
        weights = jax.nn.sigmoid(weights) if moe.score == "sigmoid" else jax.nn.softmax(weights, axis=-1)
    if moe.normalize and moe.score != "softmax_of_chosen":
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + moe.added_to_sum)
    weights = weights if moe.scale == 1.0 else moe.scale * weights
    return weights if gain is None else weights * gain[chosen]


def routing_sums(moe: MoEConfig, routing: Routing, readers: Int[Array, "B T"]) -> RoutingSums:
    """Return the load of the experts and the sums of the router's scores, which carry its gradient.

    A token counts once for each sequence that contains it (`readers`); padding counts 0 times. Scores are
    probabilities, or sigmoids over their sum (DeepSeek-V3, arXiv 2412.19437, equations 18 to 20).
    """
    valid, readers = readers > 0, readers[..., None]
    logits = jnp.where(valid[..., None], routing.logits, 0.0)
    if moe.score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        scores = scores / (jnp.sum(scores, axis=-1, keepdims=True) + SMALLEST_SUM)
    else:
        scores = jax.nn.softmax(logits, axis=-1)
    is_chosen = jnp.any(routing.chosen[..., None] == jnp.arange(moe.num_experts), axis=-2)
    over_tokens = functools.partial(jnp.sum, axis=(0, 1), where=valid[..., None])
    sums = RoutingSums(over_tokens(is_chosen * readers, dtype=jnp.int32), over_tokens(scores * readers))
    if routing.own is None:
        return sums
    agrees = jnp.any(routing.own[..., None] == routing.chosen[..., None, :], axis=-1)
    counts = lambda x: jnp.sum(x * readers, where=routing.is_replayed[..., None], dtype=jnp.int32)
    return sums._replace(replayed=counts(jnp.ones_like(agrees)), agreed=counts(agrees))


def sparse_mlp(
    c: TransformerConfig,
    w: Layers,
    h: Float[Array, "B T D"],
    activation: Activation,
    valid: Bool[Array, "B T"] | None,
    rules: Rules,
    strict: bool = False,
    routes: UInt[Array, "B T K"] | None = None,
    seen: Float[Array, "B T S"] | None = None,
) -> tuple[Float[Array, "B T D"], Routing]:
    """Return the weighted sum of the chosen experts' outputs, and the routing. No token is dropped.

    Args:
        h: normalised hidden states.
        valid: False = padding, which gets 0 without computation; None = all tokens are valid.
        rules: sharding of the experts (`sharding.rules`).
        strict: batch-invariant. The gradient comes from the plain computation with the same experts.
        routes: experts to use instead of the router's choice, except `unknown_route`. The router's logits
            weigh them and get the gradient (arXiv 2510.11370).
        seen: the router's input; None = h.
    """
    seen = h if seen is None else seen

    # Strict mode computes every expert in a fixed order; its gradient is the gradient of `plain`.
    def choose(w, logits):
        bias = w.router_bias[...] if c.moe.selection_bias else None
        return choose_experts(c.moe, logits, bias)

    def plain(w, h, seen, chosen, valid):
        weights = _weights_of_chosen(c, w, seen, chosen)
        chosen = jnp.where(valid[..., None], chosen, c.moe.num_experts)
        return sharded_experts(
            h, chosen, weights, weights_of_experts(c, w), gated=gate_fn(c.moe, activation), rules=rules
        )

    def exact(w, h, seen, chosen, valid):
        weights = _weights_of_chosen(c, w, seen, chosen)
        return _all_experts(c, w, h, chosen, weights=weights, activation=activation)

    # The choice, by the router or replayed.
    valid = jnp.ones(h.shape[:2], bool) if valid is None else valid
    logits = router_logits(w, seen)
    if strict:
        exact_choice = lambda w, seen: choose(w, router_logits(w, seen))
        constants = jax.lax.stop_gradient((w, seen))
        chosen = batch_invariant.map_tokens(exact_choice, *constants)
    else:
        chosen = choose(w, logits)
    routing = Routing(logits, chosen)
    if routes is not None:
        is_replayed = jnp.all(routes != unknown_route(routes.dtype), axis=-1)
        replayed = jnp.where(is_replayed[..., None], routes.astype(chosen.dtype), chosen)
        routing = Routing(logits, replayed, chosen, is_replayed)
    apply = functools.partial(batch_invariant.map_tokens, exact, plain=plain) if strict else plain
    return apply(w, h, seen, routing.chosen, valid), routing


def _weights_of_chosen(
    c: TransformerConfig, w: Layers, seen: Float[Array, "B T D"], chosen: Int[Array, "B T K"]
) -> Float[Array, "B T K"]:
    """Return the weights of the chosen experts from the router's input."""
    return expert_weights(
        c.moe, router_logits(w, seen), chosen, w.router_gain[...] if c.moe.branches else None
    )


def weights_of_experts(c: TransformerConfig, w: Layers) -> ExpertWeights:
    """Return the weights of a layer's experts, with biases, adapters and codes if they exist."""

    def one(name):
        if not hasattr(w, name):
            return None
        weight = getattr(w, name)[...]
        if hasattr(w, name + SCALE):
            weight = QuantizedMatrices(weight, getattr(w, name + SCALE)[...], dequantize_weight)
        adapter = adapter_of(w, name)
        return AdaptedMatrices(weight, *adapter, c.adapters[name][1]) if adapter else weight

    return ExpertWeights(*(one(f"expert_{name}") for name in ExpertWeights._fields))


def _all_experts(
    c: TransformerConfig,
    w: Layers,
    h: Float[Array, "B T D"],
    chosen: Int[Array, "B T K"],
    *,
    weights: Float[Array, "B T K"],
    activation: Activation,
) -> Float[Array, "B T D"]:
    """Return the weighted sum over all experts in order of their numbers; unchosen experts add 0."""
    is_chosen = chosen[..., None] == jnp.arange(c.moe.num_experts)
    dense = jnp.sum(jnp.where(is_chosen, weights[..., None], 0.0), axis=-2)  # [B, T, X]

    gated = gate_fn(c.moe, activation)

    def add(total, expert):
        e, weight = expert
        e = dense_expert(e, h)
        hidden = gated(*(product_with(h, *projection) for projection in e.inputs))
        out = product_with(hidden, e.down, e.down_bias)
        return total + weight[..., None] * out.astype(jnp.float32), None

    total, experts = jnp.zeros(h.shape, jnp.float32), weights_of_experts(c, w)
    return jax.lax.scan(add, total, (experts, jnp.moveaxis(dense, -1, 0)))[0].astype(h.dtype)


def gate_fn(moe: MoEConfig, activation: Activation) -> Gate:
    """Return the function (gate, up) -> hidden state of an expert; of up alone for experts without a gate."""
    if moe.swiglu_limit is None:
        return lambda first, *up: activation(first) * up[0] if up else activation(first)

    def clamped(gate, up):
        gate, up = jnp.minimum(gate, moe.swiglu_limit), jnp.clip(up, -moe.swiglu_limit, moe.swiglu_limit)
        return gate * jax.nn.sigmoid(moe.swiglu_alpha * gate) * (up + 1)

    return clamped
