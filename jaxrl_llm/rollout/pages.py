"""How many pages the paged cache of a run has."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_kernels.decode_attention.api import choose
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.paged import paged_cache
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.programs import Programs
from jaxrl_llm.rollout.sizes import Sizes, most_pages

SHARE = 0.8
"""Of the free memory; prefill and the logits take some."""


def is_paged(config: RolloutConfig, model: TransformerConfig, mesh: Mesh) -> bool:
    """What `rollout.cache` means here: "auto" is paged where a kernel reads the pages, and in 8 bits."""
    dtype = jnp.dtype(config.cache_dtype or config.dtype)
    if config.cache != "auto" or dtype.itemsize == 1:
        return config.cache != "ring"
    pages = jax.ShapeDtypeStruct((1, model.num_kv_heads, config.page, model.head_dim), dtype)
    q = jax.ShapeDtypeStruct((1, model.num_heads, model.head_dim), jnp.dtype(config.dtype))
    with jax.set_mesh(mesh):
        return choose(q, pages, jax.ShapeDtypeStruct((1, 1), jnp.int32))[0] != "reference"


def pages_wanted(sizes: Sizes, ways: int, page: int) -> int:
    """Pages that a device's share of the slots may need: each the longest response to a prompt of its own."""
    longest = sizes.max_prompt_tokens + sizes.max_response_tokens
    return sizes.slots[-1] // ways * most_pages(longest, page)


def pages_that_fit(programs: Programs, held: bool) -> int | None:
    """Pages that each device has memory for, None where they do not tell.

    Args:
        held: the copy of the weights is yet to come; leave room for it.
    """
    mine = [device for device in jax.local_devices() if device in programs.mesh.devices]
    stats = mine[0].memory_stats() if mine else None  # a plan is for devices that are not here
    if not stats or "bytes_limit" not in stats:
        return None
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    if held:
        weights = jax.eval_shape(programs.zero_weights)
        free -= sum(w.size * w.dtype.itemsize for w in jax.tree.leaves(weights)) // programs.mesh.size
    return max(int(SHARE * free) // page_bytes(programs), 1)


def page_bytes(programs: Programs) -> int:
    """Of a page in all layers, on one device."""
    with jax.set_mesh(programs.mesh):
        shapes = jax.eval_shape(
            lambda: paged_cache(programs.config, programs.ways, programs.page, programs.cache_dtype)
        )
    parts = jax.tree.map(lambda x, lie: math.prod(lie.shard_shape(x.shape)), shapes, programs.page_layouts())
    return sum(jax.tree.leaves(jax.tree.map(lambda x, part: part * x.dtype.itemsize, shapes, parts)))
