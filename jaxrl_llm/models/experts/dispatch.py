"""Dropless dispatch of tokens to experts that are sharded over the mesh.

Every device gathers the tokens along the axes that shard the experts, computes the tokens that chose its
experts by grouped matrix products, and the sums are scattered back: all-gather and reduce-scatter, with
static shapes. If the matrices of an expert are sharded too, each device gathers its experts, and their
gradient is scattered. An axis that does not divide the number of experts shards the hidden states of experts
instead, which gives the same sum. A device owns few of the gathered assignments and computes them in chunks,
so that buffers have the size of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels.dispatch import choose
from jaxrl_kernels.grouped_matmul.api import grouped_matmul
from jaxrl_llm.models.experts.tiles import experts_in_tiles
from jaxrl_llm.models.experts.weights import (
    AdaptedMatrices,
    ExpertMatrix,
    ExpertWeights,
    Gate,
    QuantizedMatrices,
    adapted_product,
    add_bias,
    dense_matrices,
    merge_codes,
    without_codes,
)
from jaxrl_llm.sharding.rules import Rules, axes_of, current_spec

GATHERED_EXPERTS = "gathered_experts"
"""Name of the gathered weights of a layer's experts; no rematerialization policy saves them."""
NamesOfDims = tuple[tuple[str, ...], ...]
MIN_PART = 1024
"""Minimum rows of a chunk: fewer are not worth the loop (`_in_parts`)."""


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
        chosen: numbers of experts; X (the number of experts) = none.
        weights: float32.
        rules: the experts' logical axes are "experts", "expert_embed" and "expert_mlp".
    """
    rows = current_spec(("batch", "sequence", "hidden"), h.shape)
    if rows is None:
        return grouped_experts(h, chosen, weights, experts, gated=gated).astype(h.dtype)
    # The mesh axes of experts and of their dims, and the axes along which tokens are gathered.
    shape = jax.tree.leaves(experts.up)[0].shape
    owners, embed, mlp = current_spec(("experts", "expert_embed", "expert_mlp"), shape, rules)
    expert_axes, mlp_axes = axes_of(owners), axes_of(mlp)
    divided = (*expert_axes, *mlp_axes)
    gathered = tuple(tuple(name for name in axes_of(dim) if name in divided) for dim in rows[:2])
    summed = tuple(name for name in divided if name not in (*gathered[0], *gathered[1]))
    inputs = embed, embed, mlp
    experts = ExpertWeights(*map(_divide_tiles, experts[:3], inputs), *experts[3:])
    expert_specs = _specs_of_experts(experts, owners, embed, mlp)

    def local(h, chosen, weights, experts):
        if embed:  # its transpose is a reduce-scatter; the partitioner's gather would have an all-reduce
            experts = jax.tree.map(functools.partial(_gather, axes=embed), experts, expert_specs)
        gather = lambda x: _over_dims(_all_gather, gathered, x)
        first = jax.lax.axis_index(expert_axes) * experts.count if expert_axes else 0
        chosen = gather(chosen) - first
        if mlp_axes and experts.down_bias is not None:  # else the sum over devices would add it several times
            is_first = jax.lax.axis_index(mlp_axes) == 0
            experts = experts._replace(down_bias=jnp.where(is_first, experts.down_bias, 0))
        devices = math.prod(map(jax.lax.axis_size, expert_axes))
        out = grouped_experts(gather(h), chosen, gather(weights), experts, gated=gated, devices=devices)
        out = jax.lax.psum(out, summed) if summed else out
        return _scattered(out, gathered, h.dtype)

    specs = rows, rows, rows, expert_specs
    mapped = jax.shard_map(local, in_specs=specs, out_specs=rows, check_vma=False)
    return mapped(h, chosen, weights, experts)


def _all_gather(x: Array, names: tuple[str, ...], dim: int) -> Array:
    return jax.lax.all_gather(x, names, axis=dim, tiled=True)


def _over_dims(
    collective: Callable[[Array, tuple[str, ...], int], Array],
    names_of_dims: NamesOfDims,
    x: Array,
) -> Array:
    """Apply the collective to each of the first dims of x, over the dim's mesh axes."""
    for dim, names in enumerate(names_of_dims):
        x = collective(x, names, dim) if names else x
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scattered(x: Float[Array, "B T D"], names_of_dims: NamesOfDims, dtype: DTypeLike) -> Array:
    """Sum over devices in float32, scatter the first dims over their mesh axes, and return `dtype`.

    The backward pass gathers gradients of type `dtype`; XLA would gather float32 if a loop reads them next.
    """
    scatter = lambda x, names, dim: jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
    return _over_dims(scatter, names_of_dims, x).astype(dtype)


def _scattered_forward(x, names_of_dims, dtype):
    return _scattered(x, names_of_dims, dtype), None


def _scattered_backward(names_of_dims, dtype, _, gradient):
    return (_over_dims(_all_gather, names_of_dims, gradient).astype(jnp.float32),)


_scattered.defvjp(_scattered_forward, _scattered_backward)


def _gather(x: Array, spec: PartitionSpec, axes: str | tuple[str, ...]) -> Array:
    """Gather the shards of an array over these mesh axes."""
    if axes not in spec:
        return x
    return checkpoint_name(jax.lax.all_gather(x, axes, axis=spec.index(axes), tiled=True), GATHERED_EXPERTS)


def _divide_tiles(matrix: ExpertMatrix | None, inputs: Any) -> ExpertMatrix | None:
    """Split quantization tiles, repeating their scales, if the shards of the inputs are smaller."""
    if isinstance(matrix, AdaptedMatrices):
        return dataclasses.replace(matrix, weight=_divide_tiles(matrix.weight, inputs))
    if not isinstance(matrix, QuantizedMatrices):
        return matrix
    sizes, tiles = jax.sharding.get_abstract_mesh().shape, matrix.scale.shape[1]
    shards = math.prod(sizes[name] for name in axes_of(inputs))
    scale = jnp.repeat(matrix.scale, math.lcm(tiles, shards) // tiles, axis=1)
    return dataclasses.replace(matrix, scale=scale)


def _specs_of_experts(experts: ExpertWeights, owners: Any, embed: Any, mlp: Any) -> ExpertWeights:
    """Return the PartitionSpecs of the experts: experts over `owners`, their inputs and outputs over `embed`,
    hidden states over `mlp`."""

    def matrix(weight: ExpertMatrix | None, inner, outer):
        if weight is None:
            return None
        spec = PartitionSpec(owners, inner, outer)
        if isinstance(weight, QuantizedMatrices):
            return dataclasses.replace(weight, codes=spec, scale=spec)
        if not isinstance(weight, AdaptedMatrices):
            return spec
        a, b = PartitionSpec(owners, inner, None), PartitionSpec(owners, None, outer)
        return dataclasses.replace(weight, weight=matrix(weight.weight, inner, outer), a=a, b=b)

    biases = zip(experts[3:], (mlp, mlp, embed), strict=True)
    return ExpertWeights(
        matrix(experts.gate, embed, mlp),
        matrix(experts.up, embed, mlp),
        matrix(experts.down, mlp, embed),
        *(None if b is None else PartitionSpec(owners, of) for b, of in biases),
    )


def grouped_experts(
    h: Float[Array, "B T D"],
    chosen: Int[Array, "B T K"],
    weights: Float[Array, "B T K"],
    experts: ExpertWeights,
    gated: Gate,
    devices: int = 1,
) -> Float[Array, "B T D"]:
    """Return the weighted sum of the outputs of these experts, float32; numbers outside [0, X) add 0.

    Assignments are sorted by expert, so that each expert's tokens are rows of one grouped product. If many
    devices share the experts, the rows are computed in chunks (`_in_parts`). Without a kernel for grouped
    products, an expert computes a tile of rows at a time (`experts_in_tiles`).

    Args:
        devices: devices that share the experts, and so the assignments.
    """
    count, per_token = experts.count, chosen.shape[-1]
    tokens, shares = h.reshape(-1, h.shape[-1]), weights.reshape(-1)
    numbers = chosen.reshape(-1)
    numbers = jnp.where((numbers >= 0) & (numbers < count), numbers, count)
    order = jnp.argsort(numbers, stable=True)
    sizes = jnp.bincount(numbers, length=count + 1)[:count].astype(jnp.int32)
    if choose("grouped_matmul", h.dtype)[0] == "tiled":
        return experts_in_tiles(per_token, gated, tokens, shares, experts, order, sizes).reshape(h.shape)
    if length := _part_length(len(order), devices):
        order = jnp.pad(order, (0, -len(order) % length))
        total = _in_parts(per_token, length, gated, tokens, shares, experts, order, numbers, sizes)
        return total.reshape(h.shape)
    places = jnp.argsort(order)
    rows = _sorted_rows(per_token, tokens, order, places)
    out = _sorted_rows(1, _outputs(rows, numbers[order], sizes, experts, gated=gated), places, order)
    out = out.reshape(*chosen.shape, -1) * weights[..., None]
    return jnp.sum(out, axis=-2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sorted_rows(
    copies: int, x: Float[Array, "T D"], order: Int[Array, " M"], places: Int[Array, " M"]
) -> Float[Array, "M D"]:
    """Return rows of x, each copied `copies` times, in this order.

    The gradient gathers by `places`, the inverse of the order, and sums the copies in float32; XLA's gradient
    would be a scatter into zeros.
    """
    return x[order // copies]


def _sorted_rows_forward(copies, x, order, places):
    return _sorted_rows(copies, x, order, places), places


def _sorted_rows_backward(copies, places, gradient):
    of_copies = gradient[places].reshape(-1, copies, gradient.shape[-1])
    return jnp.sum(of_copies, axis=1, dtype=jnp.float32).astype(gradient.dtype), None, None


_sorted_rows.defvjp(_sorted_rows_forward, _sorted_rows_backward)


def _outputs(
    rows: Float[Array, "M D"],
    numbers: Int[Array, " M"],
    sizes: Int[Array, " X"],
    experts: ExpertWeights,
    *,
    gated: Gate,
) -> Float[Array, "M D"]:
    """Return the outputs of these experts, float32; expert x computes sizes[x] rows, further rows are 0."""
    inside = (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]
    expert_of_row = jnp.minimum(numbers, experts.count - 1)
    product = functools.partial(_product, sizes=sizes)

    def biased(y, bias):
        if bias is None:
            return y
        bias = bias.astype(jnp.float32)  # before the lookup, so that the gradient is summed in float32
        return jnp.where(inside, add_bias(y, bias[expert_of_row]), 0)

    hidden = gated(*(biased(product(rows, matrix), bias) for matrix, bias in experts.inputs))
    return biased(product(hidden, experts.down, dtype=jnp.float32), experts.down_bias)


def _part_length(rows: int, devices: int) -> int:
    """Return the chunk size: twice a balanced load, so one chunk usually suffices; 0 disables chunking."""
    length = -(-2 * rows // devices)
    return length if MIN_PART <= length < rows else 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_parts(
    per_token: int,
    length: int,
    gated: Gate,
    tokens: Float[Array, "T D"],
    shares: Float[Array, " M"],
    experts: ExpertWeights,
    order: Int[Array, " N"],
    numbers: Int[Array, " M"],
    sizes: Int[Array, " X"],
) -> Float[Array, "T D"]:
    """Compute `grouped_experts` of sorted assignments in chunks of `length`, only for assigned rows.

    Without chunks, buffers would hold every assignment of all devices that share the experts, of which this
    device has few. The backward pass recomputes each chunk, so none is saved.
    """

    def add(total, picks, sizes):
        owners = picks // per_token
        out = _outputs(tokens[owners], numbers[picks], sizes, experts, gated=gated)
        return total.at[owners].add(out * shares[picks][:, None])

    return _for_each_part(add, jnp.zeros(tokens.shape, jnp.float32), length, order, sizes=sizes)


def _for_each_part(
    step: Callable[[Any, Array, Array], Any],
    carry: Any,
    length: int,
    order: Int[Array, " N"],
    *,
    sizes: Int[Array, " X"],
) -> Any:
    """Apply `step(carry, assignments, number of assignments of each expert)` to each chunk."""
    ends = jnp.cumsum(sizes)

    def apply(i, carry):
        before = lambda row: jnp.clip(row - i * length, 0, length)
        picks = jax.lax.dynamic_slice_in_dim(order, i * length, length)
        return step(carry, picks, before(ends) - before(ends - sizes))

    return jax.lax.fori_loop(0, -(-ends[-1] // length), apply, carry)


def _in_parts_forward(per_token, length, gated, *operands):
    return _in_parts(per_token, length, gated, *operands), operands


def _in_parts_backward(per_token, length, gated, operands, gradient):
    tokens, shares, experts, order, numbers, sizes = operands
    real = without_codes(experts, experts)

    def add(sums, picks, sizes):
        owners = picks // per_token

        def compute(rows, share, real):
            out = _outputs(rows, numbers[picks], sizes, merge_codes(real, experts), gated=gated)
            return out * share[:, None]

        d_rows, d_share, d_real = jax.vjp(compute, tokens[owners], shares[picks], real)[1](gradient[owners])
        of_tokens, of_shares, of_real = sums
        of_real = jax.tree.map(jnp.add, of_real, d_real)
        return of_tokens.at[owners].add(d_rows), of_shares.at[picks].add(d_share), of_real

    primals = tokens, shares, real
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), primals)
    sums = _for_each_part(add, sums, length, order, sizes=sizes)
    d_tokens, d_shares, d_real = jax.tree.map(lambda x, like: x.astype(like.dtype), sums, primals)
    return d_tokens, d_shares, d_real, None, None, None


_in_parts.defvjp(_in_parts_forward, _in_parts_backward)


def _product(
    rows: Float[Array, "M I"], matrix: ExpertMatrix, sizes: Int[Array, "X"], dtype: DTypeLike | None = None
) -> Float[Array, "M O"]:
    """Return the grouped product of the rows with the matrices and their adapters, as `dtype`."""

    def multiply(rows, matrix, dtype):
        if isinstance(matrix, QuantizedMatrices):
            return _quantized_product(rows, matrix, sizes, dtype)
        return grouped_matmul(rows, matrix, sizes, preferred_element_type=dtype)

    return adapted_product(multiply, rows, matrix, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _quantized_product(
    rows: Float[Array, "M I"], matrix: QuantizedMatrices, sizes: Int[Array, "X"], dtype: DTypeLike | None
) -> Float[Array, "M O"]:
    """Return `_product` with dequantized matrices. The backward pass dequantizes them again, whatever the
    rematerialization policy: saved, they would be a stack of all layers."""
    return grouped_matmul(rows, dense_matrices(matrix, rows), sizes, preferred_element_type=dtype)


def _quantized_forward(rows, matrix, sizes, dtype):
    return _quantized_product(rows, matrix, sizes, dtype), (rows, matrix, sizes)


def _quantized_backward(dtype, residuals, gradient):
    rows, matrix, sizes = residuals
    matrices = dense_matrices(matrix, gradient.astype(rows.dtype))
    multiply = functools.partial(grouped_matmul, sizes=sizes, preferred_element_type=dtype)
    (gradient,) = jax.vjp(lambda rows: multiply(rows, matrices), rows)[1](gradient)
    return gradient, None, None


_quantized_product.defvjp(_quantized_forward, _quantized_backward)
