"""Random weights from numpy: `models.init` compiles for seconds, and few tests are about its numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import models


@functools.cache
def random_params(config, seed=0):
    """The tree of `models.init`: normal numbers times `initializer_range`, norms 1. Shared: do not donate."""
    shapes, rng = models.abstract(config), np.random.default_rng(seed)

    def leaf(name, x):
        if "norm" in name:
            return np.ones(x.shape, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.integer):  # codes of a quantized weight
            return rng.integers(0, 16, x.shape).astype(x.dtype)
        noise = rng.normal(size=x.shape) * config.initializer_range  # converted here: JAX would compile
        return noise.astype(np.float32).astype(x.dtype)

    leaves = [leaf(name, x) for name, x in models.named_leaves(shapes)]
    # `jnp.asarray` would compile a program for each shape.
    return jax.device_put(jax.tree.unflatten(jax.tree.structure(shapes), leaves))


def weights_for(built, seed=0):
    """`random_params` of a learner's model on its mesh: a copy, which may be donated."""
    return jax.device_put(jax.tree.map(np.array, random_params(built.model, seed)), built.param_shardings)
