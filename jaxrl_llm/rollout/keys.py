"""The random key of each sample: a function of the call's key and of the sample's own name."""

from __future__ import annotations

from collections.abc import Sequence

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


def turn_keys(keys: np.ndarray, turns: Sequence[int]) -> np.ndarray:
    """Key data uint32 [N, 2] of turn 1, 2, ... of samples with these keys [N, 2].

    Counted down from the largest number, so that no turn shares a key with a token of the first one.
    """
    if not len(keys):
        return keys
    blocks = -(-len(keys) // BLOCK)
    padded = np.resize(keys, (blocks * BLOCK, keys.shape[1]))
    numbers = np.resize(np.array(turns, np.uint32), blocks * BLOCK)
    made = [
        _turn_block(*block)
        for block in zip(np.split(padded, blocks), np.split(~numbers, blocks), strict=True)
    ]
    return np.concatenate(made)[: len(keys)]


@jax.jit
def _turn_block(keys, turns):
    one = lambda key, turn: jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), turn))
    return jax.vmap(one)(keys, turns)


@jax.jit
def _block(key, prompts, responses):
    one = lambda p, g: jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, p), g))
    return jax.vmap(one)(prompts, responses)
