"""Kept turns of the ring cache: conversations wait in pages for their environment's answer.

After a turn, its tokens are copied from the ring into pages. On the next turn, new tokens are prefilled after
the cached pages; all pages are then copied to the ring for decoding. So each token is prefilled once, as with
the paged cache, and decoded as fast as with the ring: without a kernel, every decoding step from pages would
gather all of them. Pages hold nothing else. If they are too few, the least recently used conversations are
dropped, and prefilled from their start; so are all conversations if this takes almost no time.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.models import TransformerConfig, flops
from jaxrl_llm.models.slot_states import NULL_ROW
from jaxrl_llm.rollout.checks import unpaged
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.native.paged_cache import KeptPages, PagedLayout, SlotPages, uses_pages
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.ring_cache import RingLayout
from jaxrl_llm.rollout.native.shapes import pages_for
from jaxrl_llm.rollout.native.slots import SlotState

MIN_PREFILL_FLOPS = 2**28
"""FLOPs of the prefill of the longest conversation below which turns are not kept: some ten milliseconds of a
CPU core. Copies and small batches of observations then take longer than to prefill again."""


def make_programs(
    config: RolloutConfig, model: TransformerConfig, mesh: Mesh, strict: bool, *, routes: bool
) -> Programs:
    """Return the programs of `rollout.cache`; "auto", if it is a ring, keeps turns, if the model's cache
    can be in pages (`unpaged`)."""
    paged = uses_pages(config, model, mesh, strict)
    make = functools.partial(
        Programs,
        model,
        mesh,
        config.dtype,
        config.cache_dtype or config.dtype,
        chunk=config.chunk,
        strict=strict,
        routes=routes,
    )
    keeps = config.cache == "auto" and not paged and not unpaged(model)
    kept = make(page_size=config.page) if keeps else None
    return make(page_size=config.page if paged else 0, kept=kept)


def kept_programs(programs: Programs, max_tokens: int) -> Programs | None:
    """Return the programs that keep turns of at most so many tokens; None = the ring alone is faster."""
    work = flops.forward_flops(programs.config, max_tokens, max_tokens / 2)
    return programs.kept if work >= MIN_PREFILL_FLOPS else None


class RingTurns:
    """Conversations of the ring cache, kept in pages while they wait for their environment.

    A slot has pages if its turn began with kept ones.
    """

    def __init__(self, ring: RingLayout, pages: PagedLayout):
        self.ring, self.pages = ring, pages
        num_slots = len(pages.slots)
        self.unread = np.zeros(num_slots, bool)  # slots whose pages are not in the ring yet
        self.written = np.zeros(num_slots, np.int32)  # tokens of a slot that its pages hold
        self.starts = np.zeros(num_slots, np.int32)  # positions before the last chunk
        self.steps: jax.Array | int = 0  # of the last chunk
        # Of each shard, as `cache_copies.write_pages` takes them.
        self.copies: list[list[tuple[int, int, int]]] = [[] for _ in pages.pools]
        self.rows = np.full(num_slots, NULL_ROW, np.int32)  # for the states of turns that have ended

    def resume(self, slot: int, num_context: int, conversation: Hashable) -> None:
        """Give the slot the pages kept of the conversation, and pages for the rest of its context."""
        pages, shard = self.pages, self.pages.shard_of(slot)
        total = pages_for(num_context - 1, pages.page_size)
        if conversation in pages.kept[shard] and pages.resume(slot, conversation, total):
            own = pages.slots[slot].pages
            own.extend(pages.pools[shard].allocate(total - len(own)))
            self.unread[slot], self.written[slot] = True, num_context - 1
        else:
            pages.drop(conversation)
            pages.slots[slot], self.written[slot] = SlotPages([], 0, None), 0

    def keep(self, slot: int, conversation: Hashable, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of a slot whose turn has ended, if there are enough pages."""
        pages, shard = self.pages, self.pages.shard_of(slot)
        own = pages.slots[slot].pages
        missing, row = pages_for(num_tokens, pages.page_size) - len(own), pages.slots[slot].row
        if not pages.make_room(shard, missing, conversation, rows=row == NULL_ROW):
            pages.free(slot)
            return
        pages.slots[slot] = None
        own = own + pages.pools[shard].allocate(missing)
        row = pages.allocate_row(shard) if row == NULL_ROW else row
        of_shard = self.rows.reshape(len(pages.pools), -1)[shard]  # a view
        of_shard[of_shard == row] = NULL_ROW  # of a turn of this chunk that `make_room` has dropped
        self.rows[slot] = row
        pages.kept[shard][conversation] = KeptPages(own, num_tokens, row)
        first, local = self.written[slot] // pages.page_size, slot % (len(pages.slots) // len(pages.pools))
        for i, page in enumerate(own[first:], first):
            self.copies[shard].append((local, page, i * pages.page_size - self.starts[slot]))

    def read(self, state: SlotState) -> None:
        """Copy the pages of turns that begin into the ring, before a chunk."""
        if self.unread.any():
            self.pages.table_width = pages_for(self.ring.cache.length, self.pages.page_size)
            self.ring.cache = self.pages.programs.read(
                self.ring.cache,
                self.pages.cache,
                self.pages.table(),
                state.positions.copy(),
                self.unread.copy(),
                self.pages.rows_of_slots(),
            )
            self.unread[:] = False

    def write(self) -> None:
        """Copy turns that have ended out of the ring, before it changes."""
        counts = np.array([len(copies) for copies in self.copies], np.int32)
        if not counts.any():
            return
        pages, ring = self.pages, self.ring.cache
        most = max_copies(len(pages.slots) // len(pages.pools), pages.lengths, pages.page_size)
        rows = np.zeros((len(counts), most, 3), np.int32)
        for shard, copies in enumerate(self.copies):
            rows[shard, : len(copies)] = np.reshape(copies, (-1, 3))
            copies.clear()
        start = np.int32((int(ring.cursor) - int(self.steps)) % ring.length)
        states = self.rows.copy() if pages.programs.has_states else None
        pages.cache = pages.programs.write(ring, pages.cache, start, rows.reshape(-1, 3), counts, states)
        self.rows[:] = NULL_ROW


def max_copies(num_slots: int, lengths: tuple[int, ...], page_size: int) -> int:
    """Return the pages of the longest turns of so many slots."""
    return num_slots * pages_for(lengths[-1], page_size)
