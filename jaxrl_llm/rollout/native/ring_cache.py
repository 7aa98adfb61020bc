"""The ring KV cache on the host: as long as the next chunk needs, with as many slots as are in use."""

from __future__ import annotations

import jax
import numpy as np

from jaxrl_llm.models.decode import init_ring_cache
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.shapes import ProgramShapes, round_up
from jaxrl_llm.rollout.native.slots import ChunkInputs, ChunkOutput, PrefillBatch, SlotState
from jaxrl_llm.sharding.rules import bytes_per_device, with_shardings


class RingLayout:
    """The ring as a layout of `CacheManager`: every slot has its own columns, for the longest sequence."""

    def __init__(self, programs: Programs, shapes: ProgramShapes):
        self.programs, self.shapes, self.cache = programs, shapes, None

    def reserve(self, state: SlotState, steps: int) -> None:
        """Make the cache long enough for `steps` more tokens."""
        needed, num_slots = int(state.positions[state.active].max()) + steps, len(state.active)
        if self.cache is None:
            length = round_up(self.shapes.cache_lengths, needed)
            self.cache = self.programs.empty_cache(num_slots, length)
        for length in self.shapes.cache_lengths:
            if self.cache.length < length and self.cache.length < needed:
                self._resize(np.arange(num_slots, dtype=np.int32), length)

    def insert(self, batch: PrefillBatch, rows: np.ndarray) -> None:
        """Copy prompt rows[s] of the batch into slot s (row -1 = the slot is unchanged)."""
        if (rows >= 0).any():
            prompts = self.programs.gather(batch.kv, rows.copy(), length=self.shapes.max_prefill_length)
            self.cache = self.programs.insert(self.cache, prompts, rows >= 0)

    def reorder(self, old_slots: np.ndarray) -> None:
        """Renumber the slots, each within its shard: slot s was old_slots[s]."""
        self._resize(old_slots, self.cache.length)

    def available_steps(self, state: SlotState) -> int:
        """Return the tokens that each slot can still take."""
        return self.cache.length - int(state.positions[state.active].max())

    def decode(self, weights, state: SlotState, inputs: ChunkInputs, **options) -> ChunkOutput:
        """Generate a chunk."""
        self.cache, chunk = self.programs.decode(weights, self.cache, state, inputs, **options)
        return chunk

    def _resize(self, old_slots: np.ndarray, length: int) -> None:
        per_shard = self.cache.k[0].shape[-4] // self.programs.num_shards
        self.cache = self.programs.resize(self.cache, (old_slots % per_shard).astype(np.int32), length=length)


def ring_bytes(programs: Programs, shapes: ProgramShapes) -> int:
    """Return the memory on one device of the longest ring and the one that it grows from."""
    sizes = []
    for length in shapes.cache_lengths[-2:]:
        sizes_of = programs.config, shapes.slot_counts[-1], length, programs.cache_dtype, programs.strict
        ring = jax.eval_shape(lambda of=sizes_of: init_ring_cache(*of))
        sizes.append(bytes_per_device(with_shardings(ring, programs.shardings["ring"])))
    return sum(sizes)
