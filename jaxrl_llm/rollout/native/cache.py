"""The cache of all slots behind one manager, whatever its layout.

A slot is allocated; its prompt is inserted, or its kept turn extended; it is decoded in chunks; then it is
finished. The layout holds the arrays and moves them. Only programs and layouts look into the arrays, so the
state of recurrent layers is one more leaf of what prefill returns and decoding replaces: `insert` copies it
from the prompt's row to each slot that continues the prompt, `reorder` picks it by slot, and `finish` and
`allocate` keep it with a conversation.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import jax
import numpy as np

from jaxrl_llm.rollout.native.kept import RingTurns
from jaxrl_llm.rollout.native.paged_cache import PagedLayout
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.ring_cache import RingLayout
from jaxrl_llm.rollout.native.shapes import ProgramShapes
from jaxrl_llm.rollout.native.slots import ChunkInputs, ChunkOutput, PrefillBatch, SlotState


class CacheManager:
    """The cache of one call of `generate`, so of one version of the weights.

    Args:
        conversations: turns that end may come back.

    Attributes:
        layout: the arrays that decoding reads: a ring, or pages.
        pages: pages that outlive a turn: the layout itself, or those beside the ring; None = nothing does.
        turns: copies between the ring and the pages; None = there are none.
    """

    def __init__(self, programs: Programs, shapes: ProgramShapes, conversations: bool = False):
        self.pages: PagedLayout | None = None
        self.turns: RingTurns | None = None
        make_pages = functools.partial(
            PagedLayout,
            num_slots=shapes.slot_counts[-1],
            num_pages=shapes.num_pages,
            lengths=shapes.cache_lengths,
        )
        if programs.page_size:
            self.layout = self.pages = make_pages(programs)
            return
        self.layout = RingLayout(programs, shapes)
        if conversations and programs.kept and shapes.num_pages:
            self.pages = make_pages(programs.kept)
            self.turns = RingTurns(self.layout, self.pages)

    def allocate(
        self,
        slot: int,
        prompt_key: bytes,
        *,
        num_context: int,
        max_new_tokens: int,
        conversation: Hashable = None,
    ) -> bool:
        """Give a response or the next turn of a conversation a slot, with its kept tokens if there are any.

        Args:
            prompt_key: equal for equal contexts, which may share pages.
            num_context: tokens of the context; decoding reads the last one.

        Returns: whether there is room for all its tokens; otherwise nothing has changed.
        """
        if self.turns:
            self.turns.resume(slot, num_context, conversation)
            return True
        if self.pages is None:  # each slot of the ring has its own columns
            return True
        return self.pages.allocate(slot, prompt_key, num_context, max_new_tokens, conversation=conversation)

    def finish(
        self, slot: int, conversation: Hashable = None, num_tokens: int = 0, *, num_read: int = 0
    ) -> None:
        """End a slot; the tokens of a conversation that it has read are kept for the next turn.

        Args:
            num_read: tokens that the slot has read: if a stop string has ended the turn, perhaps its last
                token and others. Decoding reads the last token again if the observation is empty, and a state
                cannot go back: such a conversation is not kept.
        """
        is_past = self.layout.programs.has_states and num_read >= num_tokens
        if self.pages and (conversation is None or is_past):
            self.pages.free(slot)
        elif self.pages:
            (self.turns or self.pages).keep(slot, conversation, min(num_tokens, num_read))

    def drop(self, conversation: Hashable) -> None:
        """Forget the kept tokens of a conversation, if there are any."""
        if self.pages:
            self.pages.drop(conversation)

    def cut(self, conversation: Hashable, num_tokens: int) -> None:
        """Forget the kept tokens of a conversation after the first `num_tokens`: a fork follows them."""
        if self.pages:
            self.pages.cut(conversation, num_tokens)

    def kept_in(self, conversation: Hashable) -> int | None:
        """Return the shard that keeps tokens of the conversation; None = none does."""
        return self.pages.kept_in(conversation) if self.pages else None

    def is_scarce(self, shard: int) -> bool:
        """Return whether conversations with kept tokens are to be admitted first: pages are few."""
        return self.pages is not None and self.pages.is_scarce(shard)

    def num_kept(self, slot: int) -> int:
        """Return the tokens that were kept when the slot's turn began; 0 = it begins with a prompt."""
        return self.pages.num_kept(slot) if self.pages else 0

    def shard_of(self, slot: int) -> int:
        """Return the shard of a slot with kept tokens."""
        return self.pages.shard_of(slot)

    def needs_prompt(self, slot: int) -> bool:
        """Return whether the slot's prompt is still to be inserted."""
        return self.layout is not self.pages or self.pages.needs_prompt(slot)

    def reserve(self, state: SlotState, steps: int) -> None:
        """Make room for `steps` more tokens of each active slot."""
        if self.turns:
            self.turns.write()
        self.layout.reserve(state, steps)

    def insert(self, batch: PrefillBatch, rows: np.ndarray) -> None:
        """Insert prompt rows[s] of the batch into slot s (row -1 = the slot is unchanged)."""
        self.layout.insert(batch, rows)

    def extend(
        self, weights, slots: Sequence[int], tokens: np.ndarray, lengths: np.ndarray
    ) -> jax.Array | None:
        """Prefill tokens after the kept ones of slots; see `PagedLayout.extend`."""
        return self.pages.extend(weights, slots, tokens, lengths)

    def available_steps(self, state: SlotState) -> int:
        """Return the tokens that each slot can still take."""
        return self.layout.available_steps(state)

    def decode(self, weights, state: SlotState, inputs: ChunkInputs, **options) -> ChunkOutput:
        """Generate a chunk; arguments as of `Programs.decode`."""
        if self.turns:
            self.turns.read(state)
            self.turns.starts = state.positions.copy()
        chunk = self.layout.decode(weights, state, inputs, **options)
        if self.turns:
            self.turns.steps = chunk.steps
        return chunk

    def reorder(self, old_slots: np.ndarray) -> None:
        """Renumber the slots, each within its shard: slot s was old_slots[s]."""
        self.layout.reorder(old_slots)
