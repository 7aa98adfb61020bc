"""How many pages the paged cache of a run has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_kernels.dispatch import choose
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.paged import paged_cache
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.shapes import Sizes, most_pages
from jaxrl_llm.sharding.rules import bytes_per_device, with_shardings

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
        return choose("decode_attention", q, pages, jax.ShapeDtypeStruct((1, 1), jnp.int32))[0] != "reference"


def pages_wanted(sizes: Sizes, ways: int, page: int) -> int:
    """Pages that a device's share of the slots may need: each the longest response to a prompt of its own."""
    longest = sizes.max_prompt_tokens + sizes.max_response_tokens
    return sizes.slots[-1] // ways * most_pages(longest, page)


def pages_that_fit(programs: Programs, to_come: int) -> int | None:
    """Pages that each device has memory for, None where they do not tell.

    Args:
        to_come: bytes of other things that each device will hold.
    """
    free = free_bytes(programs)
    return None if free is None else max(int(SHARE * (free - to_come)) // page_bytes(programs), 1)


def weight_bytes(programs: Programs) -> int:
    """Of the copy of the weights that rollout has, on one device."""
    weights = jax.eval_shape(programs.zero_weights)
    return bytes_per_device(with_shardings(weights, programs.layouts["weights"]))


def free_bytes(programs: Programs) -> int | None:
    """Of one device of this process, None where it does not tell."""
    mine = [device for device in jax.local_devices() if device in programs.mesh.devices]
    stats = mine[0].memory_stats() if mine else None  # a plan is for devices that are not here
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def page_bytes(programs: Programs) -> int:
    """Of a page in all layers, on one device."""
    with jax.set_mesh(programs.mesh):
        shapes = jax.eval_shape(
            lambda: paged_cache(programs.config, programs.ways, programs.page, programs.cache_dtype)
        )
    return bytes_per_device(with_shardings(shapes, programs.page_layouts()))
