"""States of recurrent layers in the caches: a layer's step, and rows of states by number.

Pages hold no states. Beside them are rows: one for each slot, prompt or conversation that may be continued.
The host allocates them like pages (`rollout/native/paged_cache.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jaxtyping import Array, Bool, Int

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.recurrent import RECURRENT, State

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers

NULL_ROW = 0
"""The row of slots without a response and of padding; it is written, but never read for a token."""


def make_state_fn(
    c: TransformerConfig,
    w: Layers,
    states: tuple[State, ...],
    valid: Bool[Array, "S T"],
    *,
    at: tuple[int, tuple],
    strict: bool,
):
    """Return the function (*inputs) -> (out, (states of all layers, inputs)) of a layer with a state.

    Args:
        valid: see `RecurrentKind.make_step_fn`.
        at: (array, index) of `decode.apply_layers`.
    """
    array, index = at
    state = states[array]
    if index:
        state = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, *index, keepdims=False), state)
    step = RECURRENT[c.kind].make_step_fn(c, w, state, valid, strict=strict)
    put = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, *index, 0) if index else new

    def apply(*inputs):
        out, new = step(*inputs)
        new = jax.tree.map(put, states[array], new)
        return out, ((*states[:array], new, *states[array + 1 :]), inputs)

    return apply


def take_rows(x: Array, rows: Int[Array, "S"], num_shards: int) -> Array:
    """Return rows of dim -4: the rows, and their numbers, are divided among the shards of the slots."""
    pick = jax.vmap(jax.vmap(lambda shard, i: shard[i]), in_axes=(0, None))  # layers, shards
    found = pick(_by_shard(x, num_shards), rows.reshape(num_shards, -1))
    return found.reshape(*x.shape[:-4], len(rows), *x.shape[-3:])


def set_rows(x: Array, rows: Int[Array, "S"], new: Array, num_shards: int) -> Array:
    """Return x with new rows of dim -4; see `take_rows`."""
    put = jax.vmap(jax.vmap(lambda shard, i, y: shard.at[i].set(y)), in_axes=(0, None, 0))
    shards, new = _by_shard(x, num_shards), _by_shard(new, num_shards)
    return put(shards, rows.reshape(num_shards, -1), new).reshape(x.shape)


def _by_shard(x: Array, num_shards: int) -> Array:
    return x.reshape(-1, num_shards, x.shape[-4] // num_shards, *x.shape[-3:])
