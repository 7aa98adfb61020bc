"""Dropless dispatch of tokens to experts that are divided over the mesh.

Every device gathers the tokens of the axes that divide the experts, computes those that chose its experts by
grouped matrix products, and the sums are scattered back: all-gather and reduce-scatter, of static shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels.grouped_matmul.api import grouped_matmul
from jaxrl_llm.sharding.rules import Rules, axes_of, current_spec


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class AdaptedMatrices:
    """The matrices of all experts with adapters: x W + scale (x A) B."""

    weight: Any
    a: Any
    b: Any
    scale: float


ExpertMatrix = Float[Array, "X _ _"] | AdaptedMatrices
Matrices = tuple[
    Float[Array, "X D F"] | AdaptedMatrices,
    Float[Array, "X D F"] | AdaptedMatrices,
    Float[Array, "X F D"] | AdaptedMatrices,
]
"""Gate, up and down of each expert."""


def sharded_experts(
    h: Float[Array, "B T D"],
    chosen: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    matrices: Matrices,
    activation: Callable[[Array], Array],
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
        return grouped_experts(h, chosen, weights, matrices, activation).astype(h.dtype)
    shape = jax.tree.leaves(matrices[0])[0].shape
    experts, _, mlp = current_spec(("experts", None, "expert_mlp"), shape, rules)
    expert_axes, tensor_axes = axes_of(experts), axes_of(mlp)
    gathered = tuple(name for name in axes_of(rows[0]) if name in expert_axes)
    summed = (*(name for name in expert_axes if name not in gathered), *tensor_axes)

    def local(h, chosen, weights, *matrices):
        gather = lambda x: jax.lax.all_gather(x, gathered, axis=0, tiled=True) if gathered else x
        first = jax.lax.axis_index(expert_axes) * num_experts(matrices) if expert_axes else 0
        chosen = gather(chosen) - first
        out = grouped_experts(gather(h), chosen, gather(weights), matrices, activation)
        out = jax.lax.psum(out, summed) if summed else out
        if gathered:
            out = jax.lax.psum_scatter(out, gathered, scatter_dimension=0, tiled=True)
        return out.astype(h.dtype)

    def specs(matrix: ExpertMatrix, inner, outer):
        spec = PartitionSpec(experts, inner, outer)
        if not isinstance(matrix, AdaptedMatrices):
            return spec
        a, b = PartitionSpec(experts, inner, None), PartitionSpec(experts, None, outer)
        return dataclasses.replace(matrix, weight=spec, a=a, b=b)

    gate, up, down = matrices
    of_matrices = specs(gate, None, mlp), specs(up, None, mlp), specs(down, mlp, None)
    mapped = jax.shard_map(local, in_specs=(rows, rows, rows, *of_matrices), out_specs=rows, check_vma=False)
    return mapped(h, chosen, weights, *matrices)


def grouped_experts(
    h: Float[Array, "B T D"],
    chosen: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    matrices: Matrices,
    activation: Callable[[Array], Array],
) -> Float[Array, "B T D"]:
    """Return the weighted sum of the outputs of these experts, float32; numbers outside [0, X) add 0.

    Assignments are sorted by expert, so that each expert's tokens are rows of one grouped product.
    """
    gate, up, down = matrices
    count, per_token = num_experts(matrices), chosen.shape[-1]
    tokens = h.reshape(-1, h.shape[-1])
    numbers = chosen.reshape(-1)
    numbers = jnp.where((numbers >= 0) & (numbers < count), numbers, count)
    order = jnp.argsort(numbers, stable=True)
    sizes = jnp.bincount(numbers, length=count + 1)[:count].astype(jnp.int32)
    product = functools.partial(_product, sizes=sizes)
    rows = tokens[order // per_token]
    hidden = activation(product(rows, gate)) * product(rows, up)
    out = product(hidden, down, dtype=jnp.float32)[jnp.argsort(order)]
    out = out.reshape(*chosen.shape, -1) * weights[..., None]
    return jnp.sum(out, axis=-2)


def num_experts(matrices: Matrices) -> int:
    """Return the number of experts that have these matrices."""
    return jax.tree.leaves(matrices)[0].shape[0]


def _product(
    rows: Float[Array, "M I"], matrix: ExpertMatrix, sizes: Int[Array, "X"], dtype: DTypeLike | None = None
) -> Float[Array, "M O"]:
    """Return the grouped product of the rows with the matrices, and their adapters, of type `dtype`."""
    multiply = functools.partial(grouped_matmul, sizes=sizes)
    if not isinstance(matrix, AdaptedMatrices):
        return multiply(rows, matrix, preferred_element_type=dtype)
    change = multiply(multiply(rows, matrix.a), matrix.b, preferred_element_type=dtype)
    return multiply(rows, matrix.weight, preferred_element_type=dtype) + matrix.scale * change
