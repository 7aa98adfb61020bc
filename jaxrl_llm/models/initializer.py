"""Random weights of the stacked layers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.config import TransformerConfig


class Initializer:
    """Initialises the stacked weights of `Layers`, each with a key of its own."""

    def __init__(self, key: jax.Array, config: TransformerConfig):
        self.key, self.config, self.count = key, config, 0

    def _param(self, value, axes):
        return nnx.Param(value, axes=("layers", *axes))

    def normal(self, shape, axes, residual: bool = False) -> nnx.Param:
        self.count += 1
        key = jax.random.fold_in(self.key, self.count)
        std = self.config.initializer_range
        if residual:  # GPT-2: the size of the residual stream does not depend on the depth
            std /= math.sqrt(2 * self.config.num_layers)
        return self._param(std * jax.random.normal(key, (self.config.num_layers, *shape), jnp.float32), axes)

    def uniform(self, shape, axes, bound: float) -> nnx.Param:
        self.count += 1
        key, whole = jax.random.fold_in(self.key, self.count), (self.config.num_layers, *shape)
        return self._param(jax.random.uniform(key, whole, jnp.float32, -bound, bound), axes)

    def ones(self, shape, axes) -> nnx.Param:
        return self._param(jnp.ones((self.config.num_layers, *shape), jnp.float32), axes)

    def zeros(self, shape, axes) -> nnx.Param:
        return self._param(jnp.zeros((self.config.num_layers, *shape), jnp.float32), axes)
