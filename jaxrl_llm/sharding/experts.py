"""Dropless dispatch of tokens to experts that are divided over the mesh.

Every device gathers the tokens of the axes that divide the experts, computes those that chose its experts by
grouped matrix products, and the sums are scattered back: all-gather and reduce-scatter, of static shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.sharding.rules import Rules, axes_of, current_spec

Gate = Callable[[Array, Array], Array]
"""Hidden state of an expert from its gate and up projection."""


class ExpertWeights(NamedTuple):
    """The projections of each expert, and their biases where it has them."""

    gate: Float[Array, "X D F"]
    up: Float[Array, "X D F"]
    down: Float[Array, "X F D"]
    gate_bias: Float[Array, "X F"] | None = None
    up_bias: Float[Array, "X F"] | None = None
    down_bias: Float[Array, "X D"] | None = None


def sharded_experts(
    h: Float[Array, "B T D"],
    chosen: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    experts: ExpertWeights,
    gated: Gate,
    rules: Rules,
) -> Float[Array, "B T D"]:
    """Return the weighted sum of the chosen experts' outputs under the current mesh.

    Args:
        chosen: numbers of experts; the number of experts itself = none.
        weights: float32.
        rules: the experts' logical axes are "experts", "expert_embed" and "expert_mlp".
    """
    rows = current_spec(("batch", "sequence", "hidden"), h.shape)
    if rows is None:
        return grouped_experts(h, chosen, weights, experts, gated).astype(h.dtype)
    owners, _, mlp = current_spec(("experts", None, "expert_mlp"), experts.gate.shape, rules)
    expert_axes, tensor_axes = axes_of(owners), axes_of(mlp)
    gathered = tuple(name for name in axes_of(rows[0]) if name in expert_axes)
    summed = (*(name for name in expert_axes if name not in gathered), *tensor_axes)

    def local(h, chosen, weights, experts):
        gather = lambda x: jax.lax.all_gather(x, gathered, axis=0, tiled=True) if gathered else x
        first = jax.lax.axis_index(expert_axes) * experts.gate.shape[0] if expert_axes else 0
        chosen = gather(chosen) - first
        if tensor_axes and experts.down_bias is not None:  # or the sum over them would have it several times
            is_first = jax.lax.axis_index(tensor_axes) == 0
            experts = experts._replace(down_bias=jnp.where(is_first, experts.down_bias, 0))
        out = grouped_experts(gather(h), chosen, gather(weights), experts, gated)
        out = jax.lax.psum(out, summed) if summed else out
        if gathered:
            out = jax.lax.psum_scatter(out, gathered, scatter_dimension=0, tiled=True)
        return out.astype(h.dtype)

    up, down = PartitionSpec(owners, None, mlp), PartitionSpec(owners, mlp, None)
    up_bias = None if experts.up_bias is None else PartitionSpec(owners, mlp)
    down_bias = None if experts.down_bias is None else PartitionSpec(owners, None)
    specs = rows, rows, rows, ExpertWeights(up, up, down, up_bias, up_bias, down_bias)
    mapped = jax.shard_map(local, in_specs=specs, out_specs=rows, check_vma=False)
    return mapped(h, chosen, weights, experts)


def grouped_experts(
    h: Float[Array, "B T D"],
    chosen: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    experts: ExpertWeights,
    gated: Gate,
) -> Float[Array, "B T D"]:
    """Return the weighted sum of the outputs of these experts, float32; numbers outside [0, X) add 0.

    Assignments are sorted by expert, so that each expert's tokens are rows of one grouped product.
    """
    count, per_token = experts.gate.shape[0], chosen.shape[-1]
    tokens = h.reshape(-1, h.shape[-1])
    numbers = chosen.reshape(-1)
    numbers = jnp.where((numbers >= 0) & (numbers < count), numbers, count)
    order = jnp.argsort(numbers, stable=True)
    sizes = jnp.bincount(numbers, length=count + 1)[:count].astype(jnp.int32)
    inside = (jnp.arange(len(order)) < jnp.sum(sizes))[:, None]
    expert_of_row = jnp.minimum(numbers[order], count - 1)
    product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    biased = lambda y, bias: y if bias is None else y + bias[expert_of_row]
    rows = jnp.where(inside, tokens[order // per_token], 0)
    gate = biased(product(rows, experts.gate), experts.gate_bias)
    hidden = gated(gate, biased(product(rows, experts.up), experts.up_bias))
    hidden = jnp.where(inside, hidden, 0)  # rows beyond the last group may hold anything
    out = biased(product(hidden, experts.down, preferred_element_type=jnp.float32), experts.down_bias)
    out = jnp.where(inside, out, 0)[jnp.argsort(order)]
    out = out.reshape(*chosen.shape, -1) * weights[..., None]
    return jnp.sum(out, axis=-2)
