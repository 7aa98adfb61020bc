"""The random key of each sample: a function of the call's key and of the sample's own name."""

from __future__ import annotations

import jax
import numpy as np

BLOCK = 256  # samples whose keys are made in one call


def sample_keys(key: jax.Array, names: np.ndarray) -> np.ndarray:
    """Key data uint32 [>= N, 2] of the samples (prompt p, response g) in `names` [N, 2].

    fold_in(fold_in(key, p), g), in blocks of one shape, so that it compiles once; at least one block.
    """
    blocks = max(1, -(-len(names) // BLOCK))
    padded = np.zeros((blocks * BLOCK, 2), np.int32)
    padded[: len(names)] = names
    return np.concatenate([_block(key, *block.T) for block in np.split(padded, blocks)])


@jax.jit
def _block(key, prompts, responses):
    one = lambda p, g: jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, p), g))
    return jax.vmap(one)(prompts, responses)
