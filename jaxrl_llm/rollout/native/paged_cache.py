"""Who has which pages of the paged cache: handed out, shared and taken back on the host.

A prompt's pages are written once and shared by its samples, the last one, if it is not full, copied for
each, as it goes on writing there. A sample enters only if its longest response surely fits with those of
all who are in: nobody ever stops for want of memory, and no result depends on how much there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.paged import NOBODYS
from jaxrl_llm.rollout.native.programs import Chunk, Programs, Slots
from jaxrl_llm.rollout.native.shapes import at_least, pages_of


class Pool:
    """The pages of one device share: how many users each has. Page NOBODYS is never given out."""

    def __init__(self, pages: int):
        self.users = np.zeros(pages, np.int32)
        self.free = list(range(pages - 1, NOBODYS, -1))

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(count)]
        self.users[taken] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        self.users[pages] += 1

    def give(self, pages: Sequence[int]) -> None:
        """One user less; without any they are free again."""
        for page in pages:
            self.users[page] -= 1
            assert self.users[page] >= 0, f"page {page} given back twice"
            if not self.users[page]:
                self.free.append(page)


@dataclass(eq=False)
class Prompt:
    """Pages of a prompt that samples share."""

    pages: list[int]
    sitting: int = 0  # its samples that are in slots
    written: bool = False


class Seat(NamedTuple):
    """What a slot has."""

    pages: list[int]  # in order; grows
    most: int  # that it will ever have
    prompt: Prompt


class PagedMemory:
    """Pages of the slots of one `Generation`, and the cache itself.

    Args:
        slots: of all device shares together.
        pages: of each device share.
        lengths: tokens that a row of the page table may be long, ascending.
    """

    def __init__(self, programs: Programs, slots: int, pages: int, lengths: tuple[int, ...]):
        self.programs, self.page, self.lengths = programs, programs.page, lengths
        self.cache = programs.empty_cache(programs.ways * pages, programs.page)
        self.pools = [Pool(pages) for _ in range(programs.ways)]
        self.prompts: list[dict[bytes, Prompt]] = [{} for _ in self.pools]
        self.seats: list[Seat | None] = [None] * slots
        self.copies: list[tuple[int, int, int]] = []  # (slot, source, target) to be done
        self.width = 0

    def admit(self, slot: int, identity: bytes, context: int, room: int) -> bool:
        """Give the slot what it needs at first, if all that it may ever need is there."""
        way = self._way(slot)
        pool, prompts = self.pools[way], self.prompts[way]
        shared, total = (context - 1) // self.page, pages_of(context + room - 1, self.page)
        first = pages_of(context - 1, self.page)
        needed = total - shared + (0 if identity in prompts else first)
        if self._unpromised(way) < needed:
            for name in [n for n, prompt in prompts.items() if not prompt.sitting and n != identity]:
                pool.give(prompts.pop(name).pages)
        if self._unpromised(way) < needed:
            return False
        prompt = prompts.get(identity) or prompts.setdefault(identity, Prompt(pool.take(first)))
        prompt.sitting += 1
        pages = prompt.pages[:shared]
        pool.share(pages)
        if shared < first:
            pages = [*pages, *pool.take(1)]
            self.copies.append((slot, prompt.pages[-1], pages[-1]))
        self.seats[slot] = Seat(pages, total, prompt)
        return True

    def release(self, slot: int) -> None:
        """The sample has left."""
        seat = self.seats[slot]
        seat.prompt.sitting -= 1
        self.pools[self._way(slot)].give(seat.pages)
        self.seats[slot] = None

    def wants(self, slot: int) -> bool:
        """Whether the slot's prompt has yet to be written."""
        return not self.seats[slot].prompt.written

    def insert(self, prompts, lengths: np.ndarray, rows: np.ndarray) -> None:
        """Write prompts[rows[s]] for the slots that want it (row -1 = does not), then copy the last pages of
        prompts for those who will write there."""
        if (rows >= 0).any():
            width = pages_of(prompts[1][0].shape[-2], self.page)
            numbers = np.full((len(self.pools), len(lengths), width), NOBODYS, np.int32)
            for slot in np.flatnonzero(rows >= 0):
                prompt = self.seats[slot].prompt
                numbers[self._way(slot), rows[slot], : len(prompt.pages)] = prompt.pages
                prompt.written = True
            self.cache = self.programs.write(self.cache, prompts, lengths, numbers.reshape(-1, width))
        ends = np.full((2, len(self.seats)), NOBODYS, np.int32)
        ready = [copy for copy in self.copies if self.seats[copy[0]].prompt.written]
        for slot, *pages in ready:
            ends[:, slot] = pages
        if ready:
            self.cache = self.programs.copy(self.cache, *ends)
        self.copies = [copy for copy in self.copies if copy not in ready]

    def lengthen(self, slots: Slots, steps: int) -> None:
        """Pages for `steps` more tokens of each, as far as it goes on so long."""
        tokens = slots.positions + np.minimum(steps, slots.limits - slots.counts)
        for slot in np.flatnonzero(slots.active):
            seat = self.seats[slot]
            seat.pages.extend(
                self.pools[self._way(slot)].take(pages_of(tokens[slot], self.page) - len(seat.pages))
            )
            assert len(seat.pages) <= seat.most, "more pages than were promised"
        self.width = pages_of(at_least(self.lengths, tokens[slots.active].max()), self.page)

    def room(self, slots: Slots) -> int:
        """Tokens that every slot can still take: what `lengthen` was asked for."""
        return self.programs.chunk

    def decode(self, weights, slots: Slots, *args, **options) -> Chunk:
        run = self.programs.decode
        self.cache, chunk = run(weights, self.cache, slots, *args, self._table(), **options)
        return chunk

    def _table(self) -> np.ndarray:
        """int32 [S, N], pages of each slot in order, then NOBODYS."""
        table = np.full((len(self.seats), self.width), NOBODYS, np.int32)
        for slot, seat in enumerate(self.seats):
            if seat:
                table[slot, : len(seat.pages)] = seat.pages
        return table

    def keep(self, order: np.ndarray) -> None:
        """Renumber the slots, each within its device share: slot s was order[s]."""
        self.seats = [self.seats[s] for s in order]

    def _way(self, slot: int) -> int:
        return slot * len(self.pools) // len(self.seats)

    def _unpromised(self, way: int) -> int:
        """Free pages that nobody in a slot may need."""
        share = len(self.seats) // len(self.pools)
        seats = [seat for seat in self.seats[way * share :][:share] if seat]
        return len(self.pools[way].free) - sum(seat.most - len(seat.pages) for seat in seats)
