"""The memory of the paged cache: pages that sequences take, and that a device has memory for."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.decode import empty_states
from jaxrl_llm.models.paged import init_paged_cache
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.shapes import ProgramShapes, max_pages_for, state_rows
from jaxrl_llm.sharding.rules import bytes_per_device, with_shardings

MEMORY_FRACTION = 0.8
"""Share of the free device memory for pages; prefill and logits take some of the rest."""


def check_pages(requests: Sequence[Request], page_size: int, num_pages: int) -> None:
    """Refuse a response that does not fit into the empty cache of a shard.

    Raises:
        UserError: names the request, the pages it takes, and the fixes.
    """
    for request in requests:
        length = len(request.prompt_ids)
        needed = max_pages_for(length + request.max_tokens, page_size)
        if needed >= num_pages:
            raise UserError(
                f"prompt {request.prompt_index}: {length} prompt tokens + max_tokens={request.max_tokens} "
                f"take {needed} pages of {page_size} tokens, and a device has {num_pages - 1}: shorten it, "
                "raise rollout.pages, take a rollout.cache_dtype of fewer bits, lower rollout.slots (with "
                "recurrent layers), or shard the heads over more devices (mesh.tensor)."
            )


def pages_required(shapes: ProgramShapes, num_shards: int, page_size: int) -> int:
    """Return the pages that the slots of a shard can need: the longest sequences, no two of one prompt."""
    longest = shapes.max_prompt_tokens + shapes.max_response_tokens
    return shapes.slot_counts[-1] // num_shards * max_pages_for(longest, page_size)


def pages_in_free_memory(programs: Programs, shapes: ProgramShapes, reserved_bytes: int) -> int | None:
    """Return the pages that each device has memory for, beside the states; None if the device does not report
    its memory.

    Args:
        reserved_bytes: of other things that each device will hold.
    """
    free = free_device_bytes(programs)
    if free is None:
        return None
    # Decoding gathers the states of the slots and replaces them: as much again as the rows of states.
    free -= reserved_bytes + 2 * cached_state_bytes(programs, shapes.slot_counts[-1])
    return max(int(MEMORY_FRACTION * free) // page_bytes(programs), 1)


def free_device_bytes(programs: Programs) -> int | None:
    """Return the free memory of one device of this process; None if it does not report its memory."""
    local = [device for device in jax.local_devices() if device in programs.mesh.devices]
    stats = local[0].memory_stats() if local else None  # `plan` compiles for devices that are not here
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def page_bytes(programs: Programs) -> int:
    """Return the size of a page in all layers, on one device."""
    init = lambda: init_paged_cache(
        programs.config, programs.num_shards, programs.page_size, programs.cache_dtype, strict=programs.strict
    )
    with jax.set_mesh(programs.mesh):
        shapes = jax.eval_shape(init)
    return bytes_per_device(with_shardings(shapes, programs.page_shardings()))


def cached_state_bytes(programs: Programs, num_slots: int) -> int:
    """Return the size of the rows of states beside the pages, on one device."""
    rows = state_rows(num_slots, programs.num_shards)
    states = jax.eval_shape(lambda: empty_states(programs.config, rows, programs.inputs_dtype))
    return bytes_per_device(with_shardings(states, programs.shardings["cache"].states))
