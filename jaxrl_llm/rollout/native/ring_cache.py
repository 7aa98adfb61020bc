"""The ring cache of one `Generation`: as long as the next chunk needs, with as many slots as are in use."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.rollout.native.programs import Chunk, Programs, Slots
from jaxrl_llm.rollout.native.shapes import Sizes, at_least


class RingMemory:
    """Every slot has room for the longest sequence, whoever sits there."""

    def __init__(self, programs: Programs, sizes: Sizes):
        self.programs, self.sizes, self.cache = programs, sizes, None

    def admit(self, slot: int, identity: bytes, context: int, room: int) -> bool:
        """There is always room."""
        return True

    def release(self, slot: int) -> None:
        """Nothing to give back."""

    def wants(self, slot: int) -> bool:
        """Whether the slot's prompt has yet to be written: each has its own copy."""
        return True

    def lengthen(self, slots: Slots, steps: int) -> None:
        """Make the cache as long as `steps` more tokens need."""
        needed, size = int(slots.positions[slots.active].max()) + steps, len(slots.active)
        if self.cache is None:
            self.cache = self.programs.empty_cache(size, at_least(self.sizes.lengths, needed))
        for length in self.sizes.lengths:
            if self.cache.length < length and self.cache.length < needed:
                self._resize(np.arange(size, dtype=np.int32), length)

    def insert(self, prompts, lengths: np.ndarray, rows: np.ndarray) -> None:
        """Copy prompts[rows[s]] into slot s (row -1 = stays as it is)."""
        if (rows >= 0).any():
            spread = self.programs.spread(prompts, rows.copy(), width=self.sizes.width)
            self.cache = self.programs.insert(self.cache, spread, rows >= 0)

    def keep(self, order: np.ndarray) -> None:
        """Renumber the slots, each within its device share: slot s was order[s]."""
        self._resize(order, self.cache.length)

    def room(self, slots: Slots) -> int:
        """Tokens that every slot can still take."""
        return self.cache.length - int(slots.positions[slots.active].max())

    def decode(self, weights, slots: Slots, *args, **options) -> Chunk:
        self.cache, chunk = self.programs.decode(weights, self.cache, slots, *args, **options)
        return chunk

    def _resize(self, order: np.ndarray, length: int) -> None:
        share = self.cache.v[0].shape[-4] // self.programs.ways
        self.cache = self.programs.resize(self.cache, (order % share).astype(np.int32), length=length)
