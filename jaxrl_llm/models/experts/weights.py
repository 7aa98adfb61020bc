"""The weights of a layer's experts: matrices, with adapters or as codes, and biases."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

ADAPTED = "adapted_product"
"""Name of a product with its adapter's output, for policies of jax.checkpoint: they save this sum. Of the two
products, "dots" would save both and add them again in the backward pass."""
Gate = Callable[..., Array]
"""Hidden state of an expert from its gate and up projection, or from its up projection alone."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class AdaptedMatrices:
    """The matrices of all experts with adapters: x W + scale (x A) B."""

    weight: Any
    a: Any
    b: Any
    scale: float


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["dequantize"]
)
@dataclasses.dataclass(frozen=True)
class QuantizedMatrices:
    """The matrices of all experts as codes, with a scale for each tile of their inputs."""

    codes: Any
    scale: Any
    dequantize: Callable[[Array, Array, DTypeLike], Array]


ExpertMatrix = Float[Array, "X _ _"] | QuantizedMatrices | AdaptedMatrices


class ExpertWeights(NamedTuple):
    """The projections of each expert, [X, D, F] and down [X, F, D], and optional gate and biases."""

    gate: ExpertMatrix | None
    up: ExpertMatrix
    down: ExpertMatrix
    gate_bias: Float[Array, "X F"] | None = None
    up_bias: Float[Array, "X F"] | None = None
    down_bias: Float[Array, "X D"] | None = None

    @property
    def inputs(self) -> tuple[tuple[Any, Array | None], ...]:
        """The matrices and biases, of all experts or of one, of the projections that `Gate` reads."""
        up = (self.up, self.up_bias)
        return (up,) if self.gate is None else ((self.gate, self.gate_bias), up)

    @property
    def count(self) -> int:
        """The number of experts."""
        return jax.tree.leaves(self)[0].shape[0]


def dense_matrices(matrix: Array | QuantizedMatrices, x: Array) -> Array:
    """Return matrices; codes are dequantized to the type of x, the other factor of the product. The barrier
    keeps XLA from dequantizing all layers before a loop over layers or tokens.
    """
    if not isinstance(matrix, QuantizedMatrices):
        return matrix
    _, codes, scale = jax.lax.optimization_barrier((x, matrix.codes, matrix.scale))
    return matrix.dequantize(codes, scale, x.dtype)


def dense_expert(expert: ExpertWeights, like: Array) -> ExpertWeights:
    """Return one expert, its codes dequantized to the type of `like`."""
    dense = functools.partial(dense_matrices, x=like)
    return jax.tree.map(dense, expert, is_leaf=lambda x: isinstance(x, QuantizedMatrices))


def without_codes(experts: ExpertWeights, values: Any) -> Any:
    """Return `values` with None in place of codes, which have no gradient."""
    is_codes = lambda x: isinstance(x, QuantizedMatrices)
    return jax.tree.map(lambda x, value: None if is_codes(x) else value, experts, values, is_leaf=is_codes)


def merge_codes(values: Any, experts: ExpertWeights) -> ExpertWeights:
    """Return `experts` with the values of `without_codes`."""
    return jax.tree.map(
        lambda x, other: other if x is None else x, values, experts, is_leaf=lambda x: x is None
    )


def adapted_product(
    multiply: Callable[[Array, Any, DTypeLike | None], Array], x: Array, matrix: Any, dtype: DTypeLike | None
) -> Array:
    """Return `multiply(x, matrix, dtype)`, plus the output of the matrix's adapter if it has one."""
    if not isinstance(matrix, AdaptedMatrices):
        return multiply(x, matrix, dtype)
    change = multiply(multiply(x, matrix.a, None), matrix.b, dtype)
    return add_change(multiply(x, matrix.weight, dtype), change, matrix.scale)


def add_change(y: Float[Array, "..."], change: Float[Array, "..."], scale: float) -> Float[Array, "..."]:
    """Return a product plus the output of its adapter, times `scale`."""
    return checkpoint_name(y + scale * change, ADAPTED)


def product_with(
    x: Float[Array, "... I"],
    matrix: Float[Array, "I O"] | AdaptedMatrices,
    bias: Float[Array, "..."] | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "... O"]:
    """Return the product with a dense matrix of one expert and its adapter, as `dtype`, plus the bias."""
    multiply = lambda x, matrix, dtype: jnp.dot(x, matrix, preferred_element_type=dtype)
    y = adapted_product(multiply, x, matrix, dtype)
    return y if bias is None else add_bias(y, bias)


def add_bias(y: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return y + bias in the type of y. The gradient of a narrower bias is summed in float32."""
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)
