"""Keys and values, or choices of keys, that later layers read instead of having them (Gemma 4 E2B, GLM-5).

The last layers have only queries. They read the keys and values of the last layer before them with keys, and
with a window if they have one. Whole rows carry these through the scans; caches hold them once.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.indexer import no_choice
from jaxrl_llm.models.mixer_config import ATTENTION, has_indexer
from jaxrl_llm.models.stacks import layer_stacks
from jaxrl_llm.sharding.rules import constrain

KeysValues = tuple[Array, Array | None]
"""Keys and values [B, T, K, E] of a layer; latents have no values."""
SharedKV = dict[bool | str, Any]
"""Has a window? -> keys and values of the newest layer with one, or without; {} if all layers have them. Of
layers with an indexer, CHOICE -> the choice of the newest one, if some layers have none."""
CHOICE = "choice"


def kv_sources(c: TransformerConfig) -> list[int]:
    """Return the layer whose keys and values each layer reads: the layer itself, or another before it."""
    first, slides = c.num_layers - c.shared_kv_layers, c.window_layers or (True,) * c.num_layers
    last = {has_window: i for i, has_window in enumerate(slides[:first])}
    return [i if i < first else last[slides[i]] for i in range(c.num_layers)]


def no_shared_kv(c: TransformerConfig, x: Float[Array, "B T D"]) -> SharedKV:
    """Return zeros, in the type of x, for a scan to begin with."""
    if c.index_layers:
        return {CHOICE: constrain(no_choice(*x.shape[:2]), "batch", "sequence", None)}
    readers = [stack for stack in layer_stacks(c).values() if _reads_others(stack)]
    zeros = lambda stack: jnp.zeros((*x.shape[:2], stack.num_kv_heads, stack.head_dim), x.dtype)
    return {
        _has_window(stack): (constrain(zeros(stack), "batch", "sequence", "kv_heads", "head_dim"),) * 2
        for stack in readers
    }


def read_shared(c: TransformerConfig, shared: SharedKV) -> KeysValues | UInt[Array, "B T W"] | None:
    """Return the keys and values, or the choice, that the layers of a stack read; None if they have them."""
    if c.index:
        return None if has_indexer(c) else shared[CHOICE]
    return shared[_has_window(c)] if _reads_others(c) else None


def put_shared(c: TransformerConfig, shared: SharedKV, kv: tuple | None) -> SharedKV:
    """Return the shared keys and values with `kv` in its place, if layers of this stack have keys."""
    if CHOICE in shared:
        return shared if kv[2] is None else {CHOICE: kv[2]}
    return {**shared, _has_window(c): kv} if c.has_kv and _has_window(c) in shared else shared


def _has_window(c: TransformerConfig) -> bool:
    return (c.window_layers or (True,))[0]


def _reads_others(c: TransformerConfig) -> bool:
    return c.kind == ATTENTION and not c.has_kv
