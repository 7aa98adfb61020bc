"""Kept turns of the ring cache: conversations wait in pages for their environment's answer.

After a turn, its tokens are copied from the ring into pages. On the next turn, new tokens are prefilled after
the cached pages; all pages are then copied to the ring for decoding. So each token is prefilled once, as with
the paged cache, and decoded as fast as with the ring: without a kernel, every decoding step from pages would
gather all of them. Pages hold nothing else. If they are too few, the least recently used conversations are
dropped, and prefilled from their start; so are all conversations if this takes almost no time.
"""

from __future__ import annotations

from collections.abc import Hashable

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.models import TransformerConfig, cache_copies, flops
from jaxrl_llm.models.decode import RingCache
from jaxrl_llm.models.paged import PagedCache
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.native.paged_cache import KeptPages, PagedCacheManager, SlotPages, uses_pages
from jaxrl_llm.rollout.native.programs import ChunkOutput, PrefillBatch, Programs, SlotState
from jaxrl_llm.rollout.native.ring_cache import RingCacheManager
from jaxrl_llm.rollout.native.shapes import ProgramShapes, pages_for

MIN_PREFILL_FLOPS = 2**28
"""FLOPs of the prefill of the longest conversation below which turns are not kept: some ten milliseconds of a
CPU core. Copies and small batches of observations then take longer than to prefill again."""


class KeptPrograms(Programs):
    """`Programs` of pages, with the copies between them and the ring."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = jax.jit(self._read, donate_argnums=0, out_shardings=self.shardings["ring"])
        self.write = jax.jit(self._write, donate_argnums=1, out_shardings=self.shardings["cache"])

    def _read(self, ring: RingCache, pages: PagedCache, *slots) -> RingCache:
        self.compile_count += 1
        return cache_copies.read_pages(self.config, ring, pages, *slots)

    def _write(self, ring: RingCache, pages: PagedCache, *copies) -> PagedCache:
        self.compile_count += 1
        return cache_copies.write_pages(self.config, ring, pages, *copies)


def make_programs(
    config: RolloutConfig, model: TransformerConfig, mesh: Mesh, strict: bool, routes: bool
) -> Programs:
    """Return the programs of `rollout.cache`; "auto", if it is a ring, keeps turns."""
    paged = uses_pages(config, model, mesh, strict)
    shared = model, mesh, config.dtype, config.cache_dtype or config.dtype, config.chunk, strict
    keeps = config.cache == "auto" and not paged
    kept = KeptPrograms(*shared, config.page, routes) if keeps else None
    return Programs(*shared, config.page if paged else 0, routes, kept)


def kept_programs(programs: Programs, max_tokens: int) -> Programs | None:
    """Return the programs that keep turns of at most so many tokens; None = the ring alone is faster."""
    work = flops.forward_flops(programs.config, max_tokens, max_tokens / 2)
    return programs.kept if work >= MIN_PREFILL_FLOPS else None


class KeptTurnsManager(PagedCacheManager):
    """The ring cache, and the pages of conversations that wait for their environment.

    A slot has pages if its turn began with kept ones.
    """

    def __init__(self, programs: Programs, shapes: ProgramShapes):
        num_slots = shapes.slot_counts[-1]
        super().__init__(programs.kept, num_slots, shapes.num_pages, shapes.cache_lengths)
        self.ring = RingCacheManager(programs, shapes)
        self.unread = np.zeros(num_slots, bool)  # slots whose pages are not in the ring yet
        self.written = np.zeros(num_slots, np.int32)  # tokens of a slot that its pages hold
        self.starts = np.zeros(num_slots, np.int32)  # positions before the last chunk
        self.steps: jax.Array | int = 0  # of the last chunk
        self.copies: list[list[tuple[int, int, int]]] = [[] for _ in self.pools]  # `cache_copies.write_pages`

    def allocate(
        self,
        slot: int,
        prompt_key: bytes,
        num_context: int,
        max_new_tokens: int,
        conversation: Hashable = None,
    ) -> bool:
        """Give the slot the kept pages of the conversation, and pages for the rest of its context.

        Returns: True, since every slot has separate columns of the ring.
        """
        shard = self.shard_of(slot)
        kept, total = self.kept[shard].get(conversation), pages_for(num_context - 1, self.page_size)
        if kept and self._make_room(shard, total - len(kept.pages), conversation):
            del self.kept[shard][conversation]
            pages = kept.pages + self.pools[shard].allocate(total - len(kept.pages))
            self.slots[slot] = SlotPages(pages, total, None, kept.num_tokens)
            self.unread[slot], self.written[slot] = True, num_context - 1
        else:
            self.drop(conversation)
            self.slots[slot], self.written[slot] = SlotPages([], 0, None), 0
        return True

    def keep(self, slot: int, conversation: Hashable, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of a slot whose turn has ended, if there are enough pages."""
        shard, own = self.shard_of(slot), self.slots[slot]
        missing = pages_for(num_tokens, self.page_size) - len(own.pages)
        if not self._make_room(shard, missing, conversation):
            self.free(slot)
            return
        self.slots[slot] = None
        pages = own.pages + self.pools[shard].allocate(missing)
        self.kept[shard][conversation] = KeptPages(pages, num_tokens)
        first, local = self.written[slot] // self.page_size, slot % (len(self.slots) // len(self.pools))
        for i, page in enumerate(pages[first:], first):
            self.copies[shard].append((local, page, i * self.page_size - self.starts[slot]))

    def needs_prompt(self, slot: int) -> bool:
        """Return True: every slot has its own copy of the prompt."""
        return True

    def insert(self, batch: PrefillBatch, rows: np.ndarray) -> None:
        """Copy prompt rows[s] of the batch into slot s of the ring (row -1 = the slot is unchanged)."""
        self.ring.insert(batch, rows)

    def reserve(self, state: SlotState, steps: int) -> None:
        """Copy turns that have ended out of the ring, and make it long enough for `steps` more tokens."""
        self._write_pages()
        self.ring.reserve(state, steps)

    def available_steps(self, state: SlotState) -> int:
        """Return the tokens that each slot can still take."""
        return self.ring.available_steps(state)

    def decode(self, weights, state: SlotState, *args, **options) -> ChunkOutput:
        """Copy the pages of turns that begin into the ring, and generate a chunk."""
        self._read_pages(state)
        chunk = self.ring.decode(weights, state, *args, **options)
        self.starts, self.steps = state.positions.copy(), chunk.steps
        return chunk

    def reorder(self, old_slots: np.ndarray) -> None:
        """Refuse: conversations come back to all slots."""
        raise AssertionError("the slots of conversations are never fewer")

    def _read_pages(self, state: SlotState) -> None:
        if not self.unread.any():
            return
        self.table_width = pages_for(self.ring.cache.length, self.page_size)
        slots = self._table(), state.positions.copy(), self.unread.copy()
        self.ring.cache = self.programs.read(self.ring.cache, self.cache, *slots)
        self.unread[:] = False

    def _write_pages(self) -> None:
        counts = np.array([len(copies) for copies in self.copies], np.int32)
        if not counts.any():
            return
        per_shard = len(self.slots) // len(self.pools)
        rows = np.zeros((len(counts), max_copies(per_shard, self.lengths, self.page_size), 3), np.int32)
        for shard, copies in enumerate(self.copies):
            rows[shard, : len(copies)] = np.reshape(copies, (-1, 3))
            copies.clear()
        ring = self.ring.cache
        start = np.int32((int(ring.cursor) - int(self.steps)) % ring.length)
        self.cache = self.programs.write(ring, self.cache, start, rows.reshape(-1, 3), counts)


def max_copies(num_slots: int, lengths: tuple[int, ...], page_size: int) -> int:
    """Return the pages of the longest turns of so many slots."""
    return num_slots * pages_for(lengths[-1], page_size)
