"""The paged KV cache on the host: the number of pages, and the pages of each slot (vLLM's block manager).

Prefix sharing: the pages of a prompt are written once and shared by its responses, with reference counts. The
last page, if it is not full, is copied for each response, which continues in the copy. A response is admitted
only if its longest continuation fits beside the longest continuations of all running responses, so nothing is
ever preempted, and no result depends on the size of the cache.

Conversations: the pages of an ended turn are kept while the environment answers, and the next turn prefills
only new tokens; if the history is rewritten, the tokens after the point where it is. Kept pages are not
reserved: if running responses need pages, pages of unused prompts are freed first, then pages of
conversations, least recently used first; such a conversation is prefilled from its start. A cache serves one
call of `generate`, so one version of the weights.

States of recurrent layers are in rows beside the pages: a slot, a prompt and a kept conversation have one
each. They suffice for all slots and their prompts; unused ones are freed like pages. A state cannot go back
to an earlier token: if a slot has read tokens after the end of a turn (a stop string), the turn is not kept,
and a rewritten history is prefilled from its start.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_kernels.dispatch import choose
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.mla import cache_dims
from jaxrl_llm.models.paged import NO_PAGE, NULL_PAGE
from jaxrl_llm.models.slot_states import NULL_ROW
from jaxrl_llm.rollout.checks import ring_problem, unpaged
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.shapes import num_copies, pages_for, round_up, state_rows
from jaxrl_llm.rollout.native.slots import ChunkInputs, ChunkOutput, PrefillBatch, RowsToExtend, SlotState


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
    row: int = NULL_ROW  # of the state after the prompt
    num_active: int = 0  # its responses that are in slots
    cached: bool = False


class SlotPages(NamedTuple):
    """The pages of a slot."""

    pages: list[int]  # in order; grows
    max_pages: int  # reserved for it
    prompt: CachedPrompt | None  # None: kept pages of the turn before
    num_kept: int = 0  # tokens in the kept pages
    row: int = NULL_ROW  # of its state


class KeptPages(NamedTuple):
    """The pages of a conversation whose environment answers."""

    pages: list[int]
    num_tokens: int  # in them
    row: int = NULL_ROW  # of the state after these tokens


class PagedLayout:
    """Pages as a layout of `CacheManager`: the page tables of all slots, and the cache itself.

    Args:
        num_slots: of all shards together.
        num_pages: of each shard.
        lengths: lengths in tokens that a row of the page table may have, ascending.
    """

    def __init__(self, programs: Programs, num_slots: int, num_pages: int, lengths: tuple[int, ...]):
        self.programs, self.page_size, self.lengths = programs, programs.page_size, lengths
        num_shards, rows = programs.num_shards, state_rows(num_slots, programs.num_shards)
        self.cache = programs.empty_cache(num_shards * num_pages, self.page_size, rows)
        self.pools = [PagePool(num_pages) for _ in range(num_shards)]
        self.rows = [PagePool(rows // num_shards) for _ in range(num_shards)]  # of states
        self.prompts: list[dict[bytes, CachedPrompt]] = [{} for _ in self.pools]
        self.kept: list[dict[Hashable, KeptPages]] = [{} for _ in self.pools]  # least recently used first
        self.slots: list[SlotPages | None] = [None] * num_slots
        # (slot, page: source, target, row of the state: source, target)
        self.pending_copies: list[tuple[int, int, int, int, int]] = []
        self.table_width = 0

    def allocate(
        self,
        slot: int,
        prompt_key: bytes,
        num_context: int,
        max_new_tokens: int,
        *,
        conversation: Hashable = None,
    ) -> bool:
        """Give the slot its first pages, or the conversation's kept pages, and reserve all pages it may need.

        Returns: whether the pages sufficed; otherwise nothing has changed.
        """
        shard = self.shard_of(slot)
        pool, prompts = self.pools[shard], self.prompts[shard]
        # A conversation continues on its kept pages.
        total = pages_for(num_context + max_new_tokens - 1, self.page_size)
        if conversation in self.kept[shard]:
            return self.resume(slot, conversation, total)
        # Full pages of the prompt are shared; its last page is copied.
        shared = (num_context - 1) // self.page_size
        first = pages_for(num_context - 1, self.page_size)
        is_new = prompt_key not in prompts
        if not self.make_room(shard, total - shared + first * is_new, prompt_key, rows=1 + is_new):
            return False
        self.drop(conversation)  # its pages are in another shard
        if is_new:
            prompts[prompt_key] = CachedPrompt(pool.allocate(first), self.allocate_row(shard))
        prompt, row = prompts[prompt_key], self.allocate_row(shard)
        prompt.num_active += 1
        pages, copy = prompt.pages[:shared], (NULL_PAGE, NO_PAGE)
        pool.share(pages)
        if shared < first:
            pages = [*pages, *pool.allocate(1)]
            copy = prompt.pages[-1], pages[-1]
        if shared < first or row:
            self.pending_copies.append((slot, *copy, prompt.row, row))
        self.slots[slot] = SlotPages(pages, total, prompt, row=row)
        return True

    def resume(self, slot: int, conversation: Hashable, max_pages: int) -> bool:
        """Give the slot the pages kept of the conversation, and reserve `max_pages` in all.

        Returns: whether there were enough; otherwise nothing has changed.
        """
        shard = self.shard_of(slot)
        kept = self.kept[shard][conversation]
        if not self.make_room(shard, max_pages - len(kept.pages), conversation):
            return False
        del self.kept[shard][conversation]
        self.slots[slot] = SlotPages(kept.pages, max_pages, None, kept.num_tokens, kept.row)
        return True

    def free(self, slot: int) -> None:
        """Free the pages of a slot whose response has ended, and the row of its state."""
        self._free_row(self.shard_of(slot), self.slots[slot].row)
        self._free(slot, 0)

    def keep(self, slot: int, conversation: Hashable, num_tokens: int) -> None:
        """Keep the pages of a slot whose turn has ended, up to the first `num_tokens` tokens."""
        row, pages = self.slots[slot].row, self._free(slot, pages_for(num_tokens, self.page_size))
        self.kept[self.shard_of(slot)][conversation] = KeptPages(pages, num_tokens, row)

    def cut(self, conversation: Hashable, num_tokens: int) -> None:
        """Free the kept pages of a conversation after its first `num_tokens` tokens: a fork follows them.

        The fork writes to the page that it begins in, so a page that a prompt shares is freed as a whole. A
        state cannot go back to an earlier token: such a conversation is dropped.
        """
        shard = self.kept_in(conversation)
        if shard is None or num_tokens >= (kept := self.kept[shard][conversation]).num_tokens:
            return
        pool = self.pools[shard]
        if pool.ref_counts[kept.pages[num_tokens // self.page_size]] > 1:
            num_tokens -= num_tokens % self.page_size
        if not num_tokens or self.programs.has_states:
            self.drop(conversation)
            return
        num_pages = pages_for(num_tokens, self.page_size)
        pool.free(kept.pages[num_pages:])
        self.kept[shard][conversation] = kept._replace(pages=kept.pages[:num_pages], num_tokens=num_tokens)

    def drop(self, conversation: Hashable) -> None:
        """Free the kept pages of a conversation, if any."""
        for shard, kept in enumerate(self.kept):
            if conversation in kept:
                self._release(shard, kept.pop(conversation))

    def kept_in(self, conversation: Hashable) -> int | None:
        """Return the shard that keeps pages of the conversation, or None."""
        return next((shard for shard, kept in enumerate(self.kept) if conversation in kept), None)

    def is_scarce(self, shard: int) -> bool:
        """Return whether fewer than half of the shard's pages are free: kept ones are then used first."""
        pool = self.pools[shard]
        return 2 * len(pool.free_pages) < len(pool.ref_counts)

    def num_kept(self, slot: int) -> int:
        """Return the tokens in the slot's pages when its turn began; 0 = it began with a prompt."""
        return self.slots[slot].num_kept

    def needs_prompt(self, slot: int) -> bool:
        """Return whether the slot's prompt is not in the cache yet."""
        prompt = self.slots[slot].prompt
        return prompt is not None and not prompt.cached

    def insert(self, batch: PrefillBatch, rows: np.ndarray) -> None:
        """Write prompt rows[s] of the batch to the pages of slot s (row -1 = nothing to write).

        Then copy the last page of prompts that are now there for the slots that continue it.
        """
        if (rows >= 0).any():
            width = pages_for(batch.kv[0][0].shape[-1], self.page_size)
            tables = np.full((len(self.pools), len(batch.lengths), width), NULL_PAGE, np.int32)
            states = np.full(tables.shape[:2], NULL_ROW, np.int32)
            for slot in np.flatnonzero(rows >= 0):
                prompt = self.slots[slot].prompt
                tables[self.shard_of(slot), rows[slot], : len(prompt.pages)] = prompt.pages
                states[self.shard_of(slot), rows[slot]] = prompt.row
                prompt.cached = True
            self.cache = self.programs.write_pages(
                self.cache,
                batch.kv,
                batch.lengths,
                tables.reshape(-1, width),
                self._of_states(states.ravel()),
            )
        ready = [copy for copy in self.pending_copies if self.slots[copy[0]].prompt.cached]
        self._copy_pages(ready)
        self.pending_copies = [copy for copy in self.pending_copies if copy not in ready]

    def _copy_pages(self, copies: Sequence[tuple[int, ...]]) -> None:
        """Copy pages and states, in as many calls as the shard with most of them needs.

        Args:
            copies: some of `pending_copies`.
        """
        shards = [
            [places for slot, *places in copies if self.shard_of(slot) == i] for i in range(len(self.pools))
        ]
        rows = num_copies(len(self.slots), len(shards)) // len(shards)
        for start in range(0, max(map(len, shards)), rows):
            arrays = np.full((len(shards), rows, 4), (NULL_PAGE, NO_PAGE, NULL_ROW, NULL_ROW), np.int32)
            for array, places in zip(arrays, shards, strict=True):
                some = places[start : start + rows]
                array[: len(some)] = np.reshape(some, (-1, 4))
            sources, targets, *states = arrays.reshape(-1, 4).T
            self.cache = self.programs.copy_pages(self.cache, sources, targets, *map(self._of_states, states))

    def extend(
        self, weights, slots: Sequence[int], tokens: np.ndarray, lengths: np.ndarray
    ) -> jax.Array | None:
        """Prefill tokens after the kept pages of slots; return their routes.

        Args:
            slots: of each row, -1 = none; with equally many rows for each shard, the first shard's first.
            tokens, lengths: see `Programs.extend`.
        """
        table = np.full((len(slots), pages_for(self.lengths[-1], self.page_size)), NULL_PAGE, np.int32)
        starts, states = np.zeros(len(slots), np.int32), np.full(len(slots), NULL_ROW, np.int32)
        for row, slot in enumerate(slots):
            if slot >= 0:
                own = self.slots[slot]
                table[row, : len(own.pages)], starts[row], states[row] = own.pages, own.num_kept, own.row
        rows = RowsToExtend(table, tokens, lengths, starts, self._of_states(states))
        self.cache, routes = self.programs.extend(weights, self.cache, rows)
        jax.block_until_ready(self.cache)
        return routes

    def reserve(self, state: SlotState, steps: int) -> None:
        """Allocate pages for `steps` more tokens of each active slot, or up to its limit."""
        tokens = state.positions + np.minimum(steps, state.limits - state.counts)
        for slot in np.flatnonzero(state.active):
            own = self.slots[slot]
            missing = pages_for(tokens[slot], self.page_size) - len(own.pages)
            own.pages.extend(self.pools[self.shard_of(slot)].allocate(missing))
            assert len(own.pages) <= own.max_pages, "more pages than were reserved"
        self.table_width = pages_for(round_up(self.lengths, tokens[state.active].max()), self.page_size)

    def available_steps(self, state: SlotState) -> int:
        """Return the tokens that each slot can still take: what `reserve` allocated."""
        return self.programs.chunk

    def decode(self, weights, state: SlotState, inputs: ChunkInputs, **options) -> ChunkOutput:
        """Generate a chunk, with drafts if texts are given."""
        run = self.programs.decode if inputs.texts is None else self.programs.decode_drafts
        inputs = inputs._replace(table=self.table(), states=self.rows_of_slots())
        self.cache, chunk = run(weights, self.cache, state, inputs, **options)
        return chunk

    def reorder(self, old_slots: np.ndarray) -> None:
        """Renumber the slots, each within its shard: slot s was old_slots[s]."""
        self.slots = [self.slots[s] for s in old_slots]

    def table(self) -> np.ndarray:
        """Return the page table, int32 [S, N]: pages of each slot in order, then NULL_PAGE."""
        table = np.full((len(self.slots), self.table_width), NULL_PAGE, np.int32)
        for slot, own in enumerate(self.slots):
            if own:
                table[slot, : len(own.pages)] = own.pages
        return table

    def rows_of_slots(self) -> np.ndarray | None:
        """Return the row of each slot's state, int32 [S]; None if the model has no states."""
        return self._of_states(np.array([own.row if own else NULL_ROW for own in self.slots], np.int32))

    def shard_of(self, slot: int) -> int:
        """Return the shard of a slot."""
        return slot * len(self.pools) // len(self.slots)

    def _free(self, slot: int, num_pages: int) -> list[int]:
        """Free a slot and all of its pages but the first `num_pages`, which are returned."""
        own = self.slots[slot]
        if own.prompt:
            own.prompt.num_active -= 1
        self.pools[self.shard_of(slot)].free(own.pages[num_pages:])
        self.slots[slot] = None
        return own.pages[:num_pages]

    def allocate_row(self, shard: int) -> int:
        """Return a free row for a state; NULL_ROW if the model has no states."""
        return self.rows[shard].allocate(1)[0] if self.programs.has_states else NULL_ROW

    def _free_row(self, shard: int, row: int) -> None:
        self.rows[shard].free([row] if row != NULL_ROW else [])

    def _of_states(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the rows of states that a program is called with: None if the model has no states."""
        return rows if self.programs.has_states else None

    def _release(self, shard: int, unused: CachedPrompt | KeptPages) -> None:
        """Free the pages and the row of a prompt or conversation."""
        self.pools[shard].free(unused.pages)
        self._free_row(shard, unused.row)

    def make_room(self, shard: int, needed: int, spared: Hashable, rows: int = 0) -> bool:
        """Drop unused prompts and conversations until this many pages are unreserved.

        Args:
            spared: prompt or conversation that stays.
            rows: of states that have to be free, too, if the model has states.

        Returns: whether the pages suffice; otherwise nothing is dropped.
        """
        pool, prompts, kept = self.pools[shard], self.prompts[shard], self.kept[shard]
        unused = [(prompts, key) for key, prompt in prompts.items() if not prompt.num_active]
        unused = [(owner, key) for owner, key in [*unused, *((kept, key) for key in kept)] if key != spared]
        pages = np.array([page for owner, key in unused for page in owner[key].pages], np.int32)
        references = np.bincount(pages, minlength=len(pool.ref_counts))
        freed = np.sum((references > 0) & (references == pool.ref_counts))
        free_rows, rows = self.rows[shard].free_pages, rows * self.programs.has_states
        if self._unreserved(shard) + freed < needed or len(free_rows) + len(unused) < rows:
            return False
        for owner, key in unused:
            if self._unreserved(shard) >= needed and len(free_rows) >= rows:
                break
            self._release(shard, owner.pop(key))
        return True

    def _unreserved(self, shard: int) -> int:
        """Return the free pages of a shard that are not reserved for running responses."""
        per_shard = len(self.slots) // len(self.pools)
        running = [own for own in self.slots[shard * per_shard :][:per_shard] if own]
        reserved = sum(own.max_pages - len(own.pages) for own in running)
        return len(self.pools[shard].free_pages) - reserved


def uses_pages(config: RolloutConfig, model: TransformerConfig, mesh: Mesh, strict: bool = False) -> bool:
    """Resolve `rollout.cache`: "auto" is paged for 8 bits, for drafts, and if a kernel reads pages, but for
    models with states, of which pages need twice as many."""
    if problem := ring_problem(config, model):
        raise ConfigError(problem)
    if unpaged(model):
        return False
    dtype = jnp.dtype(config.cache_dtype or config.dtype)
    if config.cache != "auto" or dtype.itemsize == 1 or config.draft_tokens:
        return config.cache != "ring"
    if strict or model.recurrent_kind:  # strict: plain JAX
        return False
    heads, size = cache_dims(model)
    pages = jax.ShapeDtypeStruct((1, heads, config.page, size), dtype)
    q = jax.ShapeDtypeStruct((1, model.num_heads, size), jnp.dtype(config.dtype))
    with jax.set_mesh(mesh):
        return choose("decode_attention", q, pages, jax.ShapeDtypeStruct((1, 1), jnp.int32))[0] != "reference"
