"""Mixture of experts: the router, and the feed-forward of each token by the experts that it chooses.

Choosing experts and weighing them are apart: weights can be computed for any choice, with their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels import batch_invariant
from jaxrl_llm.models.config import MoEConfig, TransformerConfig
from jaxrl_llm.sharding.experts import AdaptedMatrices, Matrices, sharded_experts
from jaxrl_llm.sharding.rules import Rules

if TYPE_CHECKING:
    from jaxrl_llm.models.transformer import Layers

Activation = Callable[[Array], Array]


def router_logits(w: Layers, h: Float[Array, "B T D"]) -> Float[Array, "B T X"]:
    """Return the router's logits, float32 whatever the type of the product's inputs."""
    return jnp.einsum("btd,dx->btx", h, w.router[...], preferred_element_type=jnp.float32)


def choose_experts(moe: MoEConfig, logits: Float[Array, "B T X"]) -> Int[Array, "B T K"]:
    """Return the experts of largest logits, by number; of equal ones the lower number."""
    return jnp.sort(jax.lax.top_k(jax.lax.stop_gradient(logits), moe.experts_per_token)[1], axis=-1)


def expert_weights(
    moe: MoEConfig, logits: Float[Array, "B T X"], chosen: Int[Array, "B T K"]
) -> Float[Array, "B T K"]:
    """Return the weights of the chosen experts: their probabilities, over their sum if `normalize`."""
    weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), chosen, axis=-1)
    return weights / jnp.sum(weights, axis=-1, keepdims=True) if moe.normalize else weights


def sparse_mlp(
    c: TransformerConfig,
    w: Layers,
    h: Float[Array, "B T D"],
    activation: Activation,
    valid: Bool[Array, "B T"] | None,
    rules: Rules,
    strict: bool = False,
) -> Float[Array, "B T D"]:
    """Return the weighted sum of the chosen experts' outputs. No token is dropped.

    Args:
        h: normalised hidden states.
        valid: False = padding, which passes no expert and gets 0; None = all tokens are valid.
        rules: by which the experts are divided (`sharding.rules`).
        strict: batch-invariant. The gradient is that of the plain computation with the experts chosen here.
    """

    def choose(w, h):
        return choose_experts(c.moe, router_logits(w, h))

    def plain(w, h, chosen, valid):
        weights = expert_weights(c.moe, router_logits(w, h), chosen)
        chosen = jnp.where(valid[..., None], chosen, c.moe.num_experts)
        return sharded_experts(h, chosen, weights, expert_matrices(c, w), activation, rules)

    def exact(w, h, chosen, valid):
        return _all_experts(c, w, h, chosen, activation)

    valid = jnp.ones(h.shape[:2], bool) if valid is None else valid
    if not strict:
        return plain(w, h, choose(w, h), valid)
    chosen = batch_invariant.map_tokens(choose, jax.lax.stop_gradient(w), jax.lax.stop_gradient(h))
    return batch_invariant.map_tokens(exact, w, h, chosen, valid, plain=plain)


def expert_matrices(c: TransformerConfig, w: Layers) -> Matrices:
    """Return gate, up and down of the experts of a layer, with the adapters that they have."""

    def one(name):
        weight = getattr(w, name)[...]
        if not hasattr(w, f"{name}_lora_a"):
            return weight
        a, b = getattr(w, f"{name}_lora_a")[...], getattr(w, f"{name}_lora_b")[...]
        return AdaptedMatrices(weight, a, b, c.adapters[name][1])

    return one("expert_gate"), one("expert_up"), one("expert_down")


def _all_experts(
    c: TransformerConfig,
    w: Layers,
    h: Float[Array, "B T D"],
    chosen: Int[Array, "B T K"],
    activation: Activation,
) -> Float[Array, "B T D"]:
    """Return the weighted sum over all experts in the order of their numbers; those not chosen add 0."""
    weights = expert_weights(c.moe, router_logits(w, h), chosen)
    is_chosen = chosen[..., None] == jnp.arange(c.moe.num_experts)
    dense = jnp.sum(jnp.where(is_chosen, weights[..., None], 0.0), axis=-2)  # [B, T, X]

    def product(x, matrix):
        if not isinstance(matrix, AdaptedMatrices):
            return x @ matrix
        return x @ matrix.weight + matrix.scale * (x @ matrix.a @ matrix.b)

    def add(total, expert):
        gate, up, down, weight = expert
        hidden = activation(product(h, gate)) * product(h, up)
        return total + weight[..., None] * product(hidden, down).astype(jnp.float32), None

    total = jnp.zeros(h.shape, jnp.float32)
    experts = *expert_matrices(c, w), jnp.moveaxis(dense, -1, 0)
    return jax.lax.scan(add, total, experts)[0].astype(h.dtype)
