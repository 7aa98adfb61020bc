"""Continuous batching: assign responses to slots, and decide when prompts are prefilled.

- **Chunked decoding.** The device decodes a chunk of tokens in one call (multi-step scheduling); then the
  host reads the tokens, looks for stop strings, frees slots of finished responses and admits waiting ones.
- **Early end of a chunk.** While responses wait, a chunk ends once an eighth of the running ones have
finished. When none waits, it ends once half of the slots are free, and the batch is halved, so that a few
long responses do not decode in a large batch.
- **Prefix sharing.** A prompt is prefilled once for all its responses, and prompts are prefilled in batches.
  In the paged cache its pages are shared; in the ring cache every slot gets a copy.
- **Conversations.** The pages of a turn are kept while the environment answers; the next turn prefills only
the observation after them, or the tokens from the point where the history is rewritten. A response goes to a
slot in the shard of its pages, and if pages are scarce, responses with kept pages go first. The ring cache
has pages only for this purpose (`kept.py`).
- **Cache growth.** The ring cache is as long as the longest sequence is at the end of the chunk, the paged
  cache holds the pages that each sequence needs (`cache.py`, `ring_cache.py`, `paged_cache.py`).
- **Compiled shapes.** All sizes are rungs of short ladders (`shapes.py`), so programs are few and each is
  compiled once: responses are admitted only before the batch shrinks, and sizes change one rung at a time.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxrl_llm.models.decode import DecodeWeights
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import PartialResponse
from jaxrl_llm.rollout.native.cache import CacheManager
from jaxrl_llm.rollout.native.conversations import TurnQueue
from jaxrl_llm.rollout.native.drafts import DraftMemory, DraftTexts
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.sampling import filters_of, make_params
from jaxrl_llm.rollout.native.shapes import ProgramShapes, round_up
from jaxrl_llm.rollout.native.slots import (
    ChunkInputs,
    ChunkOutput,
    PrefillBatch,
    SlotState,
    empty_slots,
    make_stop_conditions,
)
from jaxrl_llm.rollout.turns import Detokenize, cut_at_stop
from jaxrl_llm.structs import Metrics

MIN_FILLED = 0.75  # of the rows of a batch that prefills; with fewer, two smaller batches are run
MIN_PREFILL = 256  # tokens of a smaller batch of prompts: fewer take as long, for reading the weights does


class Scheduler:
    """The schedule of one call of `generate`.

    Args:
        responses: the responses to generate, in order of admission.
        stop_ids: token ids that end a response, or a turn.
        turns: queue of conversations, if any; an ended turn is answered while others decode.
        memory: responses of earlier calls, for drafts.
    """

    def __init__(
        self,
        shapes: ProgramShapes,
        programs: Programs,
        weights: DecodeWeights,
        responses: Sequence[PartialResponse],
        *,
        stop_ids: Sequence[int],
        turns: TurnQueue | None = None,
        memory: DraftMemory | None = None,
    ):
        self.shapes, self.programs, self.weights = shapes, programs, weights
        self.waiting: deque[PartialResponse] = deque(turns.open(responses) if turns else responses)
        self.stop_ids, self.turns = frozenset(stop_ids), turns
        num_slots = shapes.slot_counts[-1]
        self.running: list[PartialResponse | None] = [None] * num_slots  # by slot
        self.slots = empty_slots(num_slots, responses[0].key if responses else np.zeros(2, np.uint32))
        self.cache = CacheManager(programs, shapes, conversations=turns is not None)
        # The last prefill batch, from which slots are filled.
        self.prefilled = PrefillBatch(None, {}, np.zeros(0, np.int32))
        self.prompt_routes: dict[bytes, np.ndarray] = {}  # of all tokens of a prompt but the last
        self.prefill_seconds, self.slot_steps = 0.0, 0
        self.tokens, self.prefill_tokens, self.reused_tokens = 0, 0, 0
        self.drafts = DraftTexts(memory or DraftMemory(), responses, shapes.max_draft_texts)

    def run(
        self,
        sampling: SamplingConfig,
        detokenize: Detokenize,
        before_chunk: Callable[[], None] = lambda: None,
    ) -> None:
        """Finish all responses.

        Args:
            before_chunk: called before each chunk; an exception ends the call.
        """
        while self._collect_replies() or self.waiting or self.slots.active.any():
            before_chunk()
            self._admit()
            if not self.slots.active.any():
                continue  # the replies that came ended their conversations
            self.cache.reserve(self.slots, min(self.programs.chunk, self._remaining()))
            self._prefill()
            self._shrink()
            chunk = self._decode(sampling)
            self.tokens += int(chunk.produced.sum())
            self._process(chunk, sampling.stop_strings, detokenize)

    def _collect_replies(self) -> bool:
        """Queue conversations that have got a reply. Returns whether others still wait for theirs."""
        if self.turns is None:
            return False
        busy = bool(self.waiting) or self.slots.active.any()
        continued, ended = self.turns.collect(block=not busy)
        self.waiting += continued
        for response in ended:
            self.cache.drop(response)
        for response in continued:
            if response.forks and response.forks[-1].first == first_of_reply(response):
                self.cache.cut(response, response.forks[-1].keep)
        return self.turns.num_waiting > 0

    def _admit(self) -> None:
        """Assign waiting responses to free slots, evenly over the shards."""
        per_shard = len(self.running) // self.programs.num_shards
        free = [s for s, response in enumerate(self.running) if response is None]
        for slot in sorted(free, key=lambda s: (s % per_shard, s)):
            if not self.waiting:
                break
            response = self._next_for(slot // per_shard)
            context, key = response.context, self.turns.key_of(response) if self.turns else response.key
            max_new_tokens = response.tokens_left
            if not self.cache.allocate(
                slot,
                _prompt_key(response),
                num_context=len(context),
                max_new_tokens=max_new_tokens,
                conversation=response,
            ):
                continue  # another shard may have free slots
            self.waiting.remove(response)
            self.running[slot] = response
            values = (context[-1], len(context) - 1, 0, max_new_tokens, True, key)
            for array, value in zip(self.slots, values, strict=True):
                array[slot] = value

    def _next_for(self, shard: int) -> PartialResponse:
        """Return the waiting response to admit to the shard: not one whose pages another shard has, and where
        pages are scarce one that has some."""
        if self.turns is None:
            return self.waiting[0]
        order = {shard: 0, None: 1 if self.cache.is_scarce(shard) else 0}
        return min(self.waiting, key=lambda response: order.get(self.cache.kept_in(response), 2))

    def _prefill(self) -> None:
        """Prefill newly admitted responses: the tokens after their kept pages, or their whole context."""
        new = np.flatnonzero(self.slots.active & (self.slots.counts == 0))
        for slot in new:  # decode reads the last token, and returns its route
            response = self.running[slot]
            del response.routes[len(response.request.prompt_ids) + response.turn_start - 1 :]
        fresh = [slot for slot in new if not self.cache.num_kept(slot)]
        self._prefill_prompts(fresh)
        chunks = {s: self.running[s].context[self.cache.num_kept(s) : -1] for s in new if s not in fresh}
        self.reused_tokens += sum(map(self.cache.num_kept, chunks))
        ordered = sorted((slot for slot in chunks if len(chunks[slot])), key=lambda slot: len(chunks[slot]))
        while ordered:
            batch = self._first_batch(ordered, chunks)
            self._extend([[(slot, chunks[slot]) for slot in slots] for slots in batch])
            ordered = [slot for slot in ordered if not any(slot in slots for slots in batch)]

    def _first_batch(self, ordered: list[int], chunks: dict[int, np.ndarray]) -> list[list[int]]:
        """Return the first slots whose chunks fit into one batch of `Programs.extend`, by shard."""
        by_shard: list[list[int]] = [[] for _ in range(self.programs.num_shards)]
        counts_of, counts = dict(self.shapes.extend), ()
        for slot in ordered:
            slots, longer = by_shard[self.cache.shard_of(slot)], round_up(tuple(counts_of), len(chunks[slot]))
            if len(by_shard) * max(len(slots) + 1, *map(len, by_shard)) > counts_of[longer][-1]:
                break
            slots.append(slot)
            counts = counts_of[longer]
        rows = _filling(counts, len(by_shard) * max(map(len, by_shard)))
        return [slots[: rows // len(by_shard)] for slots in by_shard]

    def _extend(self, batch: list[list[tuple[int, np.ndarray]]]) -> None:
        """Run one forward over the tokens that follow the kept pages of slots: (slot, tokens) by shard."""
        start = time.perf_counter()
        widths = tuple(length for length, _ in self.shapes.extend)
        width = round_up(widths, max(len(ids) for rows in batch for _, ids in rows))
        num_rows = round_up(dict(self.shapes.extend)[width], len(batch) * max(map(len, batch)))
        tokens, lengths = np.zeros((num_rows, width), np.int32), np.zeros(num_rows, np.int32)
        slots = np.full(num_rows, -1, np.int32)
        for shard, members in enumerate(batch):
            for row, (slot, ids) in enumerate(members, shard * num_rows // len(batch)):
                slots[row], lengths[row], tokens[row, : len(ids)] = slot, len(ids), ids
        routes = self.cache.extend(self.weights, slots, tokens, lengths)
        if routes is not None:
            for slot, row, n in zip(slots, np.asarray(routes), lengths, strict=True):
                if slot >= 0:
                    add_routes(self.running[slot], row[:n])
        self.prefill_tokens += int(lengths.sum())
        self.prefill_seconds += time.perf_counter() - start

    def _prefill_prompts(self, new: list[int]) -> None:
        """Prefill the contexts of these slots, each once, and insert them into the cache."""
        rows = np.full(len(self.running), -1, np.int32)
        later = itertools.islice(self.waiting, 8 * len(rows))
        upcoming = [self.running[s] for s in new] + [r for r in later if self.cache.kept_in(r) is None]
        for i, slot in enumerate(new):
            if not self.cache.needs_prompt(slot):
                continue
            prompt = _prompt_key(self.running[slot])
            if prompt not in self.prefilled.rows:
                self.cache.insert(self.prefilled, rows)
                rows[:] = -1
                self._prefill_batch(upcoming[i:])
            rows[slot] = self.prefilled.rows[prompt]
        self.cache.insert(self.prefilled, rows)
        if self.programs.route is not None:
            for response in (self.running[slot] for slot in new):
                add_routes(response, self.prompt_routes[_prompt_key(response)])

    def _prefill_batch(self, responses: list[PartialResponse]) -> None:
        """Run one forward over the first prompts of these responses: as many as fit, and fill its rows."""
        start = time.perf_counter()
        # Take prompts as long as the batch stays within one shape.
        counts_of = dict(self.shapes.prefill)
        widths = tuple(counts_of)
        batch: dict[bytes, np.ndarray] = {}
        longest = 0
        for response in responses:
            ids, key = response.context, _prompt_key(response)
            longer = max(longest, len(ids) - 1)  # decode reads the last token
            if len(batch.keys() | {key}) > counts_of[round_up(widths, longer)][-1]:
                break
            batch[key], longest = ids[:-1], longer
        width = round_up(widths, longest)
        fewer = _filling(counts_of[width], len(batch))
        if fewer * width >= MIN_PREFILL:
            batch = dict(itertools.islice(batch.items(), fewer))
        width = round_up(widths, max(map(len, batch.values())))
        # Left-pad, run, and keep the routes of each prompt.
        tokens = np.zeros((round_up(counts_of[width], len(batch)), width), np.int32)
        lengths = np.zeros(len(tokens), np.int32)
        for row, ids in enumerate(batch.values()):
            lengths[row] = len(ids)
            tokens[row, width - len(ids) :] = ids
        kv, routes = jax.block_until_ready(self.programs.prefill(self.weights, tokens, lengths))
        if routes is not None:
            rows = zip(batch, np.asarray(routes), lengths, strict=False)
            self.prompt_routes |= {prompt: row[width - n :] for prompt, row, n in rows}
        self.prefill_tokens += int(lengths.sum())
        self.prefilled = PrefillBatch(kv, {prompt: row for row, prompt in enumerate(batch)}, lengths)
        self.prefill_seconds += time.perf_counter() - start

    def _shrink(self) -> None:
        """Drop slots once no response waits for one, or can come back for its next turn."""
        if self.waiting or self.turns:
            return
        busiest = self._busiest() * self.programs.num_shards
        for num_slots in reversed(self.shapes.slot_counts):
            if busiest <= num_slots < len(self.running):
                self.cache.reorder(self._compact(num_slots))

    def _compact(self, num_slots: int) -> np.ndarray:
        """Renumber the slots to fewer, each within its shard. Returns the old number of each."""
        num_shards, old = self.programs.num_shards, len(self.running)
        active = self.slots.active.reshape(num_shards, -1)
        # Active slots first, in order; inactive ones fill up.
        order = np.argsort(~active, axis=1, kind="stable")[:, : num_slots // num_shards].astype(np.int32)
        old_slots = (order + np.arange(num_shards)[:, None] * (old // num_shards)).ravel()
        self.running = [self.running[s] for s in old_slots]
        self.slots = SlotState(*(array[old_slots] for array in self.slots))
        return old_slots

    def _decode(self, sampling: SamplingConfig) -> ChunkOutput:
        """Decode a chunk on the device."""
        num_slots = len(self.running)
        steps = min(self.programs.chunk, self.cache.available_steps(self.slots), self._remaining())
        if self.turns or self.waiting:  # an eighth of the running ones; turns are answered meanwhile
            busiest = self._busiest()
            min_active = busiest - max(1, busiest // 8)
        else:
            smaller = [n for n in self.shapes.slot_counts if n < num_slots]
            min_active = max(smaller, default=0) // self.programs.num_shards
        uniform = self.programs.uniforms(self.slots)
        stop = make_stop_conditions(self.stop_ids, steps, min_active)
        inputs = ChunkInputs(uniform, make_params(sampling), stop)
        options = {"filters": filters_of(sampling)}
        if self.shapes.has_drafts(num_slots) and self.drafts.use():
            texts = self.drafts.texts(self.running, self.cache.layout.table_width * self.programs.page_size)
            inputs = inputs._replace(texts=texts)
            options["num_drafts"] = self.shapes.draft_tokens
        chunk = self.cache.decode(self.weights, self.slots, inputs, **options)
        chunk = ChunkOutput(*jax.device_get(chunk))
        self.slot_steps += int(chunk.steps) * num_slots
        if chunk.drafts is not None:
            self.drafts.record(int(chunk.produced.sum()), *chunk.drafts.tolist())
        return chunk

    def _process(self, chunk: ChunkOutput, stops: Sequence[str], detokenize: Detokenize) -> None:
        """Append the chunk's tokens to the responses; free the slots of ended responses."""
        tokens, logprobs = chunk.tokens.T.tolist(), chunk.logprobs.T.tolist()
        slots = self.slots
        # The device has advanced the slots.
        slots.positions[:] += chunk.produced
        slots.counts[:] += chunk.produced
        slots.active[:] = chunk.active
        for s in np.flatnonzero(chunk.produced):
            response, produced = self.running[s], int(chunk.produced[s])
            checked = len(response.ids)
            response.append(tokens[s][:produced], logprobs[s][:produced])
            response.routes.extend(() if chunk.routes is None else chunk.routes[:produced, s])
            response.kept.extend(() if chunk.kept is None else chunk.kept[:produced, s])
            slots.tokens[s] = response.ids[-1]
            # A stop string may end the response before the device's end.
            cut = cut_at_stop(response, checked, stops, detokenize)
            if cut:
                slots.active[s] = False
            stopped = cut or response.ids[-1] in self.stop_ids
            if not slots.active[s]:
                response.finish = "stop" if stopped else "length"
                self.running[s] = None
                if response.ended_turn and self.turns:
                    read = int(slots.positions[s])
                    self.cache.finish(s, response, response.num_present, num_read=read)
                    self.turns.send(response)
                else:
                    self.cache.finish(s)
                    if self.turns:
                        self.turns.end(response)

    def _remaining(self) -> int:
        """Return the largest number of tokens that an active slot may still generate."""
        return int((self.slots.limits - self.slots.counts)[self.slots.active].max())

    def _busiest(self) -> int:
        """Return the largest number of active slots in a shard."""
        return int(self.slots.active.reshape(self.programs.num_shards, -1).sum(axis=1).max())


def throughput(schedulers: Sequence[Scheduler], seconds: float) -> Metrics:
    """Return the metrics of schedulers that have run at the same time.

    Args:
        seconds: wall time of all.
    """
    total = lambda name: sum(getattr(scheduler, name) for scheduler in schedulers)
    tokens, accepted = total("tokens"), sum(scheduler.drafts.accepted for scheduler in schedulers)
    seconds = max(seconds, 1e-9)
    return {
        "rollout/tokens": tokens,
        "rollout/seconds": seconds,
        "rollout/tokens_per_second": tokens / seconds,
        "rollout/prefill_share": total("prefill_seconds") / len(schedulers) / seconds,
        "rollout/prefill_tokens": total("prefill_tokens"),
        "rollout/reused_tokens": total("reused_tokens"),
        "rollout/slot_occupancy": (tokens - accepted) / max(total("slot_steps"), 1),
    }


def add_routes(response: PartialResponse, routes: np.ndarray) -> None:
    """Add the routes that are missing before the present turn's first token is sampled.

    Args:
        routes: of tokens of the context up to the one before its last, which decoding reads.
    """
    missing = len(response.request.prompt_ids) + response.turn_start - 1 - len(response.routes)
    response.routes.extend(routes[len(routes) - missing :])


def first_of_reply(response: PartialResponse) -> int:
    """Return the number of the first token of the last reply, counted from the prompt's first."""
    return len(response.request.prompt_ids) + response.observed[-1][0]


def _filling(counts: tuple[int, ...], rows: int) -> int:
    """Return how many of `rows` to compute now: all, unless they would leave most of a batch empty."""
    if rows >= MIN_FILLED * round_up(counts, rows):
        return rows
    return max((count for count in counts if count <= rows), default=rows)


def _prompt_key(response: PartialResponse) -> bytes:
    """Return equal bytes for equal prompts: these share one prefill, whatever their groups."""
    return response.context.tobytes()
