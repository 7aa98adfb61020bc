"""The paged KV cache on the host: how many pages fit, and which slot uses which (vLLM's block manager).

Prefix sharing: the pages of a prompt are written once and shared by its responses, with reference counts. The
last page, if it is not full, is copied for each response, which continues in the copy. A response is admitted
only if its longest continuation fits besides those of all running ones, so nothing is ever preempted, and no
result depends on the size of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_kernels.dispatch import choose
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.mla import cache_dims
from jaxrl_llm.models.paged import NULL_PAGE, init_paged_cache
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.native.programs import ChunkOutput, PrefillBatch, Programs, SlotState
from jaxrl_llm.rollout.native.shapes import ProgramShapes, max_pages_for, pages_for, round_up
from jaxrl_llm.sharding.rules import bytes_per_device, with_shardings

MEMORY_FRACTION = 0.8
"""Share of the free device memory for pages; prefill and logits take some of the rest."""


class PagePool:
    """Reference counts of the pages of one shard. NULL_PAGE is never allocated."""

    def __init__(self, num_pages: int):
        self.ref_counts = np.zeros(num_pages, np.int32)
        self.free_pages = list(range(num_pages - 1, NULL_PAGE, -1))

    def allocate(self, count: int) -> list[int]:
        """Return so many free pages, each with one reference."""
        pages = [self.free_pages.pop() for _ in range(count)]
        self.ref_counts[pages] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        self.ref_counts[pages] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page; without any it is free again."""
        for page in pages:
            self.ref_counts[page] -= 1
            assert self.ref_counts[page] >= 0, f"page {page} freed twice"
            if not self.ref_counts[page]:
                self.free_pages.append(page)


@dataclass(eq=False)
class CachedPrompt:
    """The pages of a prompt that its responses share."""

    pages: list[int]
    num_active: int = 0  # its responses that are in slots
    cached: bool = False


class SlotPages(NamedTuple):
    """The pages of a slot."""

    pages: list[int]  # in order; grows
    max_pages: int  # reserved for it
    prompt: CachedPrompt


class PagedCacheManager:
    """The page tables of all slots, and the cache itself.

    Args:
        num_slots: of all shards together.
        num_pages: of each shard.
        lengths: lengths in tokens that a row of the page table may have, ascending.
    """

    def __init__(self, programs: Programs, num_slots: int, num_pages: int, lengths: tuple[int, ...]):
        self.programs, self.page_size, self.lengths = programs, programs.page_size, lengths
        self.cache = programs.empty_cache(programs.num_shards * num_pages, self.page_size)
        self.pools = [PagePool(num_pages) for _ in range(programs.num_shards)]
        self.prompts: list[dict[bytes, CachedPrompt]] = [{} for _ in self.pools]
        self.slots: list[SlotPages | None] = [None] * num_slots
        self.pending_copies: list[tuple[int, int, int]] = []  # (slot, source, target)
        self.table_width = 0

    def allocate(self, slot: int, prompt_key: bytes, num_context: int, max_new_tokens: int) -> bool:
        """Give the slot its first pages, and reserve all that it may ever need.

        Returns: whether there were enough; otherwise nothing has changed.
        """
        shard = self._shard_of(slot)
        pool, prompts = self.pools[shard], self.prompts[shard]
        shared = (num_context - 1) // self.page_size
        total = pages_for(num_context + max_new_tokens - 1, self.page_size)
        first = pages_for(num_context - 1, self.page_size)
        needed = total - shared + (0 if prompt_key in prompts else first)
        if self._unreserved(shard) < needed:
            for key in [k for k, prompt in prompts.items() if not prompt.num_active and k != prompt_key]:
                pool.free(prompts.pop(key).pages)
        if self._unreserved(shard) < needed:
            return False
        prompt = prompts.get(prompt_key) or prompts.setdefault(prompt_key, CachedPrompt(pool.allocate(first)))
        prompt.num_active += 1
        pages = prompt.pages[:shared]
        pool.share(pages)
        if shared < first:
            pages = [*pages, *pool.allocate(1)]
            self.pending_copies.append((slot, prompt.pages[-1], pages[-1]))
        self.slots[slot] = SlotPages(pages, total, prompt)
        return True

    def free(self, slot: int) -> None:
        """Free the pages of a slot whose turn has ended."""
        own = self.slots[slot]
        own.prompt.num_active -= 1
        self.pools[self._shard_of(slot)].free(own.pages)
        self.slots[slot] = None

    def needs_prompt(self, slot: int) -> bool:
        """Return whether the slot's prompt is not in the cache yet."""
        return not self.slots[slot].prompt.cached

    def insert(self, batch: PrefillBatch, rows: np.ndarray) -> None:
        """Write prompt rows[s] of the batch to the pages of slot s (row -1 = nothing to write).

        Then copy the last page of prompts that are now there for the slots that continue it.
        """
        if (rows >= 0).any():
            width = pages_for(batch.kv[0][0].shape[-1], self.page_size)
            tables = np.full((len(self.pools), len(batch.lengths), width), NULL_PAGE, np.int32)
            for slot in np.flatnonzero(rows >= 0):
                prompt = self.slots[slot].prompt
                tables[self._shard_of(slot), rows[slot], : len(prompt.pages)] = prompt.pages
                prompt.cached = True
            tables = tables.reshape(-1, width)
            self.cache = self.programs.write_pages(self.cache, batch.kv, batch.lengths, tables)
        copies = np.full((2, len(self.slots)), NULL_PAGE, np.int32)
        ready = [copy for copy in self.pending_copies if self.slots[copy[0]].prompt.cached]
        for slot, *pages in ready:
            copies[:, slot] = pages
        if ready:
            self.cache = self.programs.copy_pages(self.cache, *copies)
        self.pending_copies = [copy for copy in self.pending_copies if copy not in ready]

    def reserve(self, state: SlotState, steps: int) -> None:
        """Allocate pages for `steps` more tokens of each active slot, or up to its limit."""
        tokens = state.positions + np.minimum(steps, state.limits - state.counts)
        for slot in np.flatnonzero(state.active):
            own = self.slots[slot]
            missing = pages_for(tokens[slot], self.page_size) - len(own.pages)
            own.pages.extend(self.pools[self._shard_of(slot)].allocate(missing))
            assert len(own.pages) <= own.max_pages, "more pages than were reserved"
        self.table_width = pages_for(round_up(self.lengths, tokens[state.active].max()), self.page_size)

    def available_steps(self, state: SlotState) -> int:
        """Return the tokens that each slot can still take: what `reserve` allocated."""
        return self.programs.chunk

    def decode(self, weights, state: SlotState, *args, **options) -> ChunkOutput:
        """Generate a chunk."""
        run = self.programs.decode
        self.cache, chunk = run(weights, self.cache, state, *args, self._table(), **options)
        return chunk

    def reorder(self, old_slots: np.ndarray) -> None:
        """Renumber the slots, each within its shard: slot s was old_slots[s]."""
        self.slots = [self.slots[s] for s in old_slots]

    def _table(self) -> np.ndarray:
        """Return the page table, int32 [S, N]: pages of each slot in order, then NULL_PAGE."""
        table = np.full((len(self.slots), self.table_width), NULL_PAGE, np.int32)
        for slot, own in enumerate(self.slots):
            if own:
                table[slot, : len(own.pages)] = own.pages
        return table

    def _shard_of(self, slot: int) -> int:
        return slot * len(self.pools) // len(self.slots)

    def _unreserved(self, shard: int) -> int:
        """Return the free pages of a shard that are not reserved for running responses."""
        per_shard = len(self.slots) // len(self.pools)
        running = [own for own in self.slots[shard * per_shard :][:per_shard] if own]
        reserved = sum(own.max_pages - len(own.pages) for own in running)
        return len(self.pools[shard].free_pages) - reserved


def uses_pages(config: RolloutConfig, model: TransformerConfig, mesh: Mesh) -> bool:
    """Resolve `rollout.cache`: "auto" is paged where a kernel reads pages, and for 8-bit caches."""
    dtype = jnp.dtype(config.cache_dtype or config.dtype)
    if config.cache != "auto" or dtype.itemsize == 1:
        return config.cache != "ring"
    heads, size = cache_dims(model)
    pages = jax.ShapeDtypeStruct((1, heads, config.page, size), dtype)
    q = jax.ShapeDtypeStruct((1, model.num_heads, size), jnp.dtype(config.dtype))
    with jax.set_mesh(mesh):
        return choose("decode_attention", q, pages, jax.ShapeDtypeStruct((1, 1), jnp.int32))[0] != "reference"


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
                "raise rollout.pages, take a rollout.cache_dtype of fewer bits, or shard the heads over more "
                "devices (mesh.tensor)."
            )


def pages_required(shapes: ProgramShapes, num_shards: int, page_size: int) -> int:
    """Return the pages that the slots of a shard can need: the longest sequences, no two of one prompt."""
    longest = shapes.max_prompt_tokens + shapes.max_response_tokens
    return shapes.slot_counts[-1] // num_shards * max_pages_for(longest, page_size)


def pages_in_free_memory(programs: Programs, reserved_bytes: int) -> int | None:
    """Return the pages that each device has memory for; None if the device does not report its memory.

    Args:
        reserved_bytes: of other things that each device will hold.
    """
    free = free_device_bytes(programs)
    if free is None:
        return None
    return max(int(MEMORY_FRACTION * (free - reserved_bytes)) // page_bytes(programs), 1)


def rollout_weight_bytes(programs: Programs) -> int:
    """Return the size of the rollout's copy of the weights on one device."""
    weights = jax.eval_shape(programs.zero_weights)
    return bytes_per_device(with_shardings(weights, programs.shardings["weights"]))


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
        programs.config, programs.num_shards, programs.page_size, programs.cache_dtype
    )
    with jax.set_mesh(programs.mesh):
        shapes = jax.eval_shape(init)
    return bytes_per_device(with_shardings(shapes, programs.page_shardings()))
