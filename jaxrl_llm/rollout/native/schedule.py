"""One call of `generate` on the host: which sample sits in which slot, and how large the cache is.

The device runs a chunk of tokens; then the host reads what was written, gives free slots to waiting
samples, and fits the cache (`ring_memory.py`, `paged_memory.py`). While samples wait, a chunk ends early
once an eighth of those that write have ended; when none wait, once half of the slots are free, and the slots
are halved: a few long responses do not pay for the many that have ended. A ring holds no more tokens than
the longest sequence needs by the end of the chunk, pages no more than each sequence needs.
Sizes come from short ladders (`sizes.py`), so programs are few and are compiled once: samples enter only
while all slots are there, and slots and lengths change one rung at a time.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np

from jaxrl_llm.models.decode import DecodeWeights
from jaxrl_llm.rollout.engine import PartialResponse, SamplingConfig
from jaxrl_llm.rollout.native.conversations import Talks
from jaxrl_llm.rollout.native.paged_cache import PagedMemory
from jaxrl_llm.rollout.native.programs import Chunk, Ends, Programs, Slots
from jaxrl_llm.rollout.native.ring_cache import RingMemory
from jaxrl_llm.rollout.native.sampling import Draw
from jaxrl_llm.rollout.native.shapes import Sizes, at_least
from jaxrl_llm.rollout.native.stopping import stop_end
from jaxrl_llm.structs import Metrics


class Generation:
    """The schedule of one call. With `talks`, a turn that ends is answered while others decode."""

    def __init__(
        self,
        chunk: int,
        sizes: Sizes,
        programs: Programs,
        weights: DecodeWeights,
        samples,
        stop_ids,
        talks: Talks | None = None,
    ):
        self.chunk, self.sizes, self.programs, self.weights = chunk, sizes, programs, weights
        self.waiting: deque[PartialResponse] = deque(samples)
        self.stop_ids, self.talks = frozenset(stop_ids), talks
        size = sizes.slots[-1]
        self.occupants: list[PartialResponse | None] = [None] * size
        self.slots = empty_slots(size, samples[0].key if samples else np.zeros(2, np.uint32))
        paged = PagedMemory(programs, size, sizes.pages, sizes.lengths) if programs.page else None
        self.memory = paged or RingMemory(programs, sizes)
        self.prompts, self.prompt_rows = None, {}  # the last prefilled batch: KV, prompt -> row
        self.prompt_lengths = np.zeros(0, np.int32)
        self.prefill_seconds, self.slot_steps = 0.0, 0

    def run(self, sampling: SamplingConfig, decode_fn: Callable[[Sequence[int]], str]) -> Metrics:
        """Finish every sample."""
        start, tokens = time.perf_counter(), 0
        stops = () if sampling.ignore_eos else sampling.stop
        while self._take_replies() or self.waiting or self.slots.active.any():
            self._assign()
            if not self.slots.active.any():
                continue  # the replies that came ended their conversations
            self.memory.lengthen(self.slots, min(self.chunk, self._remaining()))
            self._fill()
            self._shrink()
            chunk = self._decode(sampling)
            tokens += int(chunk.produced.sum())
            self._harvest(chunk, stops, decode_fn)
        seconds = time.perf_counter() - start
        return {
            "rollout/tokens": tokens,
            "rollout/seconds": seconds,
            "rollout/tokens_per_second": tokens / max(seconds, 1e-9),
            "rollout/prefill_share": self.prefill_seconds / max(seconds, 1e-9),
            "rollout/slot_occupancy": tokens / max(self.slot_steps, 1),
        }

    def _take_replies(self) -> bool:
        """The answered conversations wait for a slot. Returns whether others are still unanswered."""
        if self.talks is None:
            return False
        busy = bool(self.waiting) or self.slots.active.any()
        self.waiting += self.talks.collect(block=not busy)
        return self.talks.waiting > 0

    def _assign(self) -> None:
        """Waiting samples to free slots, evenly over the devices."""
        share = len(self.occupants) // self.programs.ways
        free = [s for s, occupant in enumerate(self.occupants) if occupant is None]
        for slot in sorted(free, key=lambda s: (s % share, s)):
            if not self.waiting:
                break
            sample = self.waiting[0]
            context, key = sample.context, self.talks.key_of(sample) if self.talks else sample.key
            room = sample.request.max_tokens - len(sample.ids)
            if not self.memory.admit(slot, _identity(sample), len(context), room):
                continue  # another device may have room
            self.waiting.popleft()
            self.occupants[slot] = sample
            values = (context[-1], len(context) - 1, 0, room, True, key)
            for array, value in zip(self.slots, values, strict=True):
                array[slot] = value

    def _shrink(self) -> None:
        """Drop slots once no sample waits for them, or can come back for its next turn."""
        if self.waiting or self.talks:
            return
        ways, size = self.programs.ways, len(self.occupants)
        busiest = self.slots.active.reshape(ways, -1).sum(axis=1).max() * ways
        for slots in reversed(self.sizes.slots):
            if busiest <= slots < size:
                self.memory.keep(self._keep_active(slots))

    def _keep_active(self, size: int) -> np.ndarray:
        """Renumber to `size` slots, none leaves its device. Returns the old slot of each."""
        ways, old = self.programs.ways, len(self.occupants)
        active = self.slots.active.reshape(ways, -1)
        # Active slots first, in order; the others follow and fill up.
        order = np.argsort(~active, axis=1, kind="stable")[:, : size // ways].astype(np.int32)
        flat = (order + np.arange(ways)[:, None] * (old // ways)).ravel()
        self.occupants = [self.occupants[s] for s in flat]
        self.slots = Slots(*(array[flat] for array in self.slots))
        return flat

    def _fill(self) -> None:
        """Prefill the prompts of new samples, each once for its group, and copy them into the slots."""
        rows = np.full(len(self.occupants), -1, np.int32)
        fresh = np.flatnonzero(self.slots.active & (self.slots.counts == 0))
        ahead = [self.occupants[s] for s in fresh] + list(itertools.islice(self.waiting, 8 * len(rows)))
        for i, slot in enumerate(fresh):
            if not self.memory.wants(slot):
                continue
            prompt = _identity(self.occupants[slot])
            if prompt not in self.prompt_rows:
                self.memory.insert(self.prompts, self.prompt_lengths, rows)
                rows[:] = -1
                self._prefill(ahead[i:])
            rows[slot] = self.prompt_rows[prompt]
        self.memory.insert(self.prompts, self.prompt_lengths, rows)

    def _prefill(self, samples: list[PartialResponse]) -> None:
        """One forward over the first prompts of these, as many as fit."""
        start = time.perf_counter()
        widths = [width for width, _ in self.sizes.prompts]
        batch: dict[bytes, np.ndarray] = {}
        longest = 0
        for sample in samples:
            ids = sample.context
            longer = max(longest, len(ids) - 1)  # decode reads the last one
            room = dict(self.sizes.prompts)[at_least(widths, longer)][-1]
            if len(batch | {_identity(sample): ids}) > room:
                break
            batch[_identity(sample)], longest = ids[:-1], longer
        width = at_least(widths, longest)
        tokens = np.zeros((at_least(dict(self.sizes.prompts)[width], len(batch)), width), np.int32)
        lengths = np.zeros(len(tokens), np.int32)
        for row, ids in enumerate(batch.values()):
            lengths[row] = len(ids)
            tokens[row, width - len(ids) :] = ids
        self.prompts = jax.block_until_ready(self.programs.prefill(self.weights, tokens, lengths))
        self.prompt_rows = {prompt: row for row, prompt in enumerate(batch)}
        self.prompt_lengths = lengths
        self.prefill_seconds += time.perf_counter() - start

    def _decode(self, sampling: SamplingConfig) -> Chunk:
        size, ways = len(self.occupants), self.programs.ways
        steps = min(self.chunk, self.memory.room(self.slots), self._remaining())
        if self.talks or self.waiting:  # an eighth of those that write; turns are answered meanwhile
            busiest = int(self.slots.active.reshape(ways, -1).sum(axis=1).max())
            idle = busiest - max(1, busiest // 8)
        else:
            idle = max([n for n in self.sizes.slots if n < size], default=0) // ways
        uniform = self.programs.uniforms(self.slots)
        draw, ends = make_draw(sampling), make_ends(self.stop_ids, steps, idle)
        chunk = self.memory.decode(
            self.weights, self.slots, uniform, draw, ends, filtered=is_filtered(sampling)
        )
        chunk = Chunk(*jax.device_get(chunk))
        self.slot_steps += int(chunk.steps) * size
        return chunk

    def _harvest(self, chunk: Chunk, stops: Sequence[str], decode_fn) -> None:
        """Hand what was written to the samples; free the slots of those that ended."""
        tokens, logprobs = chunk.tokens.T.tolist(), chunk.logprobs.T.tolist()
        slots = self.slots
        slots.positions[:] += chunk.produced
        slots.counts[:] += chunk.produced
        slots.active[:] = chunk.active
        for s in np.flatnonzero(chunk.produced):
            sample, produced = self.occupants[s], int(chunk.produced[s])
            checked = len(sample.ids)
            sample.append(tokens[s][:produced], logprobs[s][:produced])
            slots.tokens[s] = sample.ids[-1]
            end = stop_end(sample.ids, checked, stops, decode_fn, sample.turn_start) if stops else None
            if end is not None:
                del sample.ids[end:], sample.logprobs[end:]
                slots.active[s] = False
            stopped = end is not None or sample.ids[-1] in self.stop_ids
            if not slots.active[s]:
                sample.finish = "stop" if stopped else "length"
                self.occupants[s] = None
                self.memory.release(s)
                if stopped and self.talks:
                    self.talks.ask(sample)

    def _remaining(self) -> int:
        return int((self.slots.limits - self.slots.counts)[self.slots.active].max())


def make_draw(sampling: SamplingConfig) -> Draw:
    return Draw(
        np.float32(sampling.temperature),
        np.int32(sampling.top_k),
        np.float32(sampling.top_p),
        np.float32(sampling.min_p),
    )


def is_filtered(sampling: SamplingConfig) -> bool:
    """Whether top-k, top-p or min-p may drop a token."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def make_ends(stop_ids: Collection[int], steps: int, idle: int) -> Ends:
    """The ids padded to a multiple of 8: few shapes."""
    stop = np.full(-(-max(len(stop_ids), 1) // 8) * 8, -1, np.int32)
    stop[: len(stop_ids)] = sorted(stop_ids)
    return Ends(stop, np.int32(steps), np.int32(idle))


def empty_slots(size: int, key: np.ndarray) -> Slots:
    """Nobody in any slot; `key` says how large keys are."""
    ints = lambda: np.zeros(size, np.int32)
    keys = np.zeros((size, len(key)), key.dtype)
    return Slots(ints(), ints(), ints(), ints(), np.zeros(size, bool), keys)


def _identity(sample: PartialResponse) -> bytes:
    """Equal for equal prompts: they share one prefill whatever group they are of."""
    return sample.context.tobytes()
