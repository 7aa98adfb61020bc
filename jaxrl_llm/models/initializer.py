"""Random weights of the stacked layers, and the dims of their matrices."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.config import TransformerConfig


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

    def ones(self, shape, axes) -> nnx.Param:
        return self._param(jnp.ones((self.config.num_layers, *shape), jnp.float32), axes)

    def zeros(self, shape, axes) -> nnx.Param:
        return self._param(jnp.zeros((self.config.num_layers, *shape), jnp.float32), axes)


def matrix_dims(axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the (input, output) dims of a matrix of the layers; None for norms, biases, embeddings, heads.

    ("layers", "heads", "head_dim", "embed") of "o" gives ((1, 2), (3,)). "layers" and "experts" are batch
    dims.

    Args:
        axes: logical axes of the weight, inputs before outputs as `project` contracts them.
    """
    if axes[0] != "layers":
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
