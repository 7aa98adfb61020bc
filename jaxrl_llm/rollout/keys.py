"""Random keys: one tree for the whole run, so that every number is a function of (seed, step, response).

    key(seed)
    |- fold_in WEIGHTS                     random initial weights
    |- fold_in ROLLOUT                     training rollouts
    |  |- fold_in draw                     one batch of prompts
    |  |  |- fold_in prompt                `Request.prompt_index`
    |  |  |  `- fold_in response           response g to the prompt (`sample_keys`)
    |  |  |     |- fold_in token           its uniform numbers in the first turn (`native/sampling.py`)
    |  |  |     `- fold_in 2^32 - 1 - turn  of turn 1, 2, ... of a conversation (`turn_keys`)
    |  |  |        `- fold_in token
    |  |  `- last 32 bits                  seeds of the environments (`envs/load.py`)
    |  `- fold_in 2^32 - 1                 weight noise
    |     `- fold_in step                  split over the weights (`weight_noise_key`)
    `- fold_in EVALUATION                  as a draw of ROLLOUT, the same in every evaluation

Numbers below 2^31 are counters; special purposes count down from 2^32 - 1, so no two share a key. Servers
take 31-bit seeds: the last word of a response's key (`servers/generate.py`). The data order has numpy
streams of (seed, epoch) and (seed, position) (`data/loader.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import jax
import numpy as np

LAST = 2**32 - 1
BLOCK = 256  # keys made in one call


class Purpose(IntEnum):
    """The children of key(seed)."""

    WEIGHTS = 0
    ROLLOUT = 1
    EVALUATION = 2
    ADAPTERS = 3


def run_key(seed: int, purpose: Purpose) -> jax.Array:
    """Return the key of one purpose of a run."""
    return jax.random.fold_in(jax.random.key(seed), purpose)


def weight_noise_key(rollout_key: jax.Array, step: int) -> jax.Array:
    """Return the key of the noise on the rollout's weights in one step."""
    return jax.random.fold_in(jax.random.fold_in(rollout_key, LAST), step)


def sample_keys(key: jax.Array, names: np.ndarray) -> np.ndarray:
    """Return key data uint32 [>= N, 2] of the responses (prompt p, response g) in `names` [N, 2].

    fold_in(fold_in(key, p), g), in blocks of one shape, so that it compiles once; at least one block.
    """
    blocks = max(1, -(-len(names) // BLOCK))
    padded = np.zeros((blocks * BLOCK, 2), np.int32)
    padded[: len(names)] = names
    return np.concatenate([_block(key, *block.T) for block in np.split(padded, blocks)])


def turn_keys(keys: np.ndarray, turns: Sequence[int]) -> np.ndarray:
    """Return key data uint32 [N, 2] of turn 1, 2, ... of responses with these keys [N, 2].

    Counted down from LAST, so that no turn shares a key with a token of the first one.
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
