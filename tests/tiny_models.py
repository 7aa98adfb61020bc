"""Weights of small models without compiling anything: `models.init` costs seconds of compilation."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import models


def random_params(config: models.TransformerConfig, seed: int = 0) -> models.Transformer:
    """Normal float32 weights with `initializer_range`, norms near 1, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    shapes = models.abstract(config)

    def leaf(name, x):
        if jnp.issubdtype(x.dtype, jnp.integer):  # codes of a quantized weight
            return rng.integers(0, 16, x.shape).astype(x.dtype)
        noise = rng.normal(size=x.shape).astype(np.float32)
        return 1 + 0.1 * noise if "norm" in name else config.initializer_range * noise

    leaves = [leaf(name, x) for name, x in models.named_leaves(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)
