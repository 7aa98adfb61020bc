"""Matrices of the layers: random weights, dims, and products with biases and adapters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.experts.weights import add_bias, add_change
from jaxrl_llm.models.quantize import SCALE, dequantize_weight
from jaxrl_llm.sharding.rules import ROLLOUT, constrain, scatter_gradient

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers


def apply_linear(c: TransformerConfig, w: Layers, name: str, x: Float[Array, "B T *I"]):
    """Apply a linear layer with its bias and adapter, if it has them."""
    if c.lora and getattr(w, name).get_metadata("axes")[1] == "embed":
        x = scatter_gradient(x)
    y = multiply(w, name, x)
    if hasattr(w, f"{name}_bias"):
        y = add_bias(y, getattr(w, f"{name}_bias")[...])
    if adapter := adapter_of(w, name):
        a, b = adapter
        y = add_change(y, project(project(x, a, narrow=True), b), c.lora.scale)
    return y


def adapter_of(w: Layers, name: str) -> tuple[Array, Array] | None:
    """Return A [*I, R] and B [R, *O] of a weight's adapter, or None; experts have a leading dim X."""
    if not hasattr(w, f"{name}_lora_a"):
        return None
    return getattr(w, f"{name}_lora_a")[...], getattr(w, f"{name}_lora_b")[...]


def multiply(w: Layers, name: str, x: Float[Array, "B T *I"]) -> Float[Array, "B T *O"]:
    """Multiply x by a weight of a layer. A quantized weight is dequantized here, for this product only.

    The backward pass dequantizes it again: saving it would mean a stack of all layers. The barrier keeps XLA
    from dequantizing all layers before a loop over tokens. With fsdp, the codes are gathered.
    """
    weight, scale = getattr(w, name), getattr(w, name + SCALE, None)
    if scale is None:
        return project(x, weight[...])
    axes = weight.get_metadata("axes")[1:]

    def product(x, *quantized):
        x, *quantized = jax.lax.optimization_barrier((x, *quantized))
        codes, scale = (constrain(part, *axes, rules=ROLLOUT) for part in quantized)
        return project(x, dequantize_weight(codes, scale, x.dtype))

    return jax.checkpoint(product, prevent_cse=False)(x, weight[...], scale[...])


def read_weight(w: Layers, name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return a weight that decoding reads directly, dequantized to the type of x if it is quantized.

    Args:
        x: activations, for the barrier of `multiply`.
    """
    weight, scale = getattr(w, name)[...], getattr(w, name + SCALE, None)
    if scale is None:
        return weight
    _, codes, scale = jax.lax.optimization_barrier((x, weight, scale[...]))
    return dequantize_weight(codes, scale, x.dtype)


def project(
    x: Float[Array, "B T *I"], w: Float[Array, "*I_and_O"], *, narrow: bool = False
) -> Float[Array, "B T *O"]:
    """Multiply x w, contracting all dims of x but B and T; the other dims of w follow.

    On one device B and T are merged first, and so are the other dims: otherwise XLA's CPU backend copies the
    transpose of every output gradient, and a weight's gradient takes 1.8 times as long. On several devices
    the dims stay separate, since each may be sharded.

    Args:
        narrow: w has few outputs, as A of an adapter.
    """
    inner, outer = x.ndim - 2, x.shape[:2]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        inputs, multiply = math.prod(w.shape[:inner]), narrow_product if narrow else jnp.matmul
        return multiply(x.reshape(-1, inputs), w.reshape(inputs, -1)).reshape(*outer, *w.shape[inner:])
    return jnp.tensordot(x, w, inner)


@jax.custom_vjp
def narrow_product(x: Float[Array, "N I"], w: Float[Array, "I O"]) -> Float[Array, "N O"]:
    """Multiply x w; the gradient of w is computed transposed.

    For 2 to 64 outputs XLA's CPU backend takes 2 to 10 times as long for x^T g as for (g^T x)^T. The barrier
    keeps it from turning the second into the first.
    """
    return x @ w


def _narrow_backward(saved: tuple[Array, Array], g: Float[Array, "N O"]) -> tuple[Array, Array]:
    x, w = saved
    return g @ w.T, jax.lax.optimization_barrier(g.T @ x).T


narrow_product.defvjp(lambda x, w: (x @ w, (x, w)), _narrow_backward)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """Compute x / sqrt(mean x^2 + eps) * weight (Zhang & Sennrich 2019) in float32; the result has the type
    of x."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight).astype(x.dtype)


def normalize_rows(x: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """Divide rows by their lengths, at least 1e-12, as torch does."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def normalize(
    c: TransformerConfig, x: Float[Array, "*B D"], weight: Float[Array, "D"], divisor: float = 1.0
) -> Float[Array, "*B D"]:
    """Apply an RMSNorm of the model, with its `norm_offset` and `norm_eps`, and divide by `divisor`."""
    weight = weight + c.norm_offset if c.norm_offset else weight
    return rms_norm(x, weight if divisor == 1.0 else weight / divisor, c.norm_eps)


def scale_embeddings(c: TransformerConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Multiply embeddings by the model's `embedding_multiplier`, rounded to the type of x."""
    return x if c.embedding_multiplier == 1.0 else x * jnp.asarray(c.embedding_multiplier, x.dtype)


class Initializer:
    """Initialise the stacked weights of `Layers`, each from a separate key.

    Args:
        depth: layers of the whole model; `config` may describe only a part.
    """

    def __init__(self, key: jax.Array, config: TransformerConfig, depth: int):
        self.key, self.config, self.depth, self.count = key, config, depth, 0

    def _param(self, value, axes):
        return nnx.Param(value, axes=("layers", *axes))

    def normal(self, shape, axes, residual: bool = False) -> nnx.Param:
        self.count += 1
        key = jax.random.fold_in(self.key, self.count)
        std = self.config.initializer_range
        if residual:  # GPT-2: the size of the residual stream does not depend on the depth
            std /= math.sqrt(2 * self.depth)
        return self._param(std * jax.random.normal(key, (self.config.num_layers, *shape), jnp.float32), axes)

    def uniform(self, shape, axes, bound: float) -> nnx.Param:
        self.count += 1
        key, whole = jax.random.fold_in(self.key, self.count), (self.config.num_layers, *shape)
        return self._param(jax.random.uniform(key, whole, jnp.float32, -bound, bound), axes)

    def norm(self, size: int, axis: str = "norm") -> nnx.Param:
        whole = (self.config.num_layers, size)
        return self._param(jnp.full(whole, 1 - self.config.norm_offset, jnp.float32), (axis,))

    def zeros(self, shape, axes) -> nnx.Param:
        return self._param(jnp.zeros((self.config.num_layers, *shape), jnp.float32), axes)

    def ones(self, shape, axes) -> nnx.Param:
        return self._param(jnp.ones((self.config.num_layers, *shape), jnp.float32), axes)


def matrix_dims(axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the (input, output) dims of a matrix of the layers; None for other weights, such as norms.

    ("layers", "heads", "head_dim", "embed") of "o" gives ((1, 2), (3,)). "layers" and "experts" are batch
    dims.

    Args:
        axes: logical axes of the weight, inputs before outputs as `project` contracts them.
    """
    if axes[0] != "layers" or "conv" in axes:
        return None
    groups: list[tuple[int, ...]] = []
    for dim, axis in enumerate(axes[1:], 1):
        if axis == "experts":
            continue
        if axis == "head_dim" and groups:  # heads and head_dim are one side of the matrix
            groups[-1] += (dim,)
        else:
            groups.append((dim,))
    assert len(groups) <= 2, f"{axes} is not a matrix: give its other dims a rule here"
    return (groups[0], groups[1]) if len(groups) == 2 else None
