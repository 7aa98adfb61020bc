"""Continuous batching on the host, with programs made of numpy; and stop strings."""

import dataclasses
from collections import Counter, deque
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from slow_cases import with_slow

from jaxrl_llm.models.decode import RingCache
from jaxrl_llm.models.paged import PagedCache
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Reply, Request
from jaxrl_llm.rollout.native.compile import call_all
from jaxrl_llm.rollout.native.conversations import TurnQueue
from jaxrl_llm.rollout.native.page_memory import pages_required
from jaxrl_llm.rollout.native.schedule import Scheduler, throughput
from jaxrl_llm.rollout.native.shapes import make_shapes
from jaxrl_llm.rollout.native.slots import ChunkOutput
from jaxrl_llm.rollout.partial import new_responses
from jaxrl_llm.rollout.turns import stop_end
from jaxrl_llm.structs import Episode

VOCAB = 50
PLAIN = SamplingConfig()


def zeros(*shape):
    """An array of any shape that takes no memory."""
    return np.broadcast_to(np.float32(0), shape)


class FakePrograms:
    """Programs that decode random tokens. `calls` are all calls, by what makes a compiled program.

    The route of a token, [1, 1], is the token."""

    route, has_states = np.zeros((1, 1), np.uint8), False

    def __init__(self, num_shards=1, chunk=8, page_size=0, kept_page_size=0):
        self.num_shards, self.chunk, self.page_size = num_shards, chunk, page_size
        self.kept = FakePrograms(num_shards, chunk, kept_page_size) if kept_page_size else None
        self.rng, self.calls, self.prefilled = np.random.default_rng(0), Counter(), []
        self.prefill_shapes, self.extended = [], []  # (rows, tokens); (position, tokens)

    def count(self, name, *args, **static):
        shapes = [(np.shape(x), np.asarray(x).dtype.name) for x in jax.tree.leaves(args)]
        self.calls[str((name, shapes, static))] += 1

    def all_calls(self):
        return set(self.calls) | {f"kept {call}" for call in (self.kept.calls if self.kept else ())}

    def empty_cache(self, count, length, rows=0):
        self.count("empty_cache", count=count, length=length)
        if self.page_size:
            return PagedCache(zeros(count, length), zeros(count, length), None, None)
        return self.ring(count, length)

    def ring(self, slots, length):
        return RingCache((zeros(slots, 1, 1, length),), (zeros(slots, 1, length, 1),), np.int32(0))

    def prefill(self, weights, tokens, lengths):
        self.count("prefill", tokens, lengths)
        self.prefilled += [row[len(row) - n :].tolist() for row, n in zip(tokens, lengths, strict=True) if n]
        self.prefill_shapes.append(tokens.shape)
        rows, width = tokens.shape
        kv = (zeros(rows, 1, 1, width),), (zeros(rows, 1, width, 1),)
        return kv, tokens[..., None, None].astype(np.uint8)

    def gather(self, prompts, rows, *, length):
        self.count("gather", prompts, rows, length=length)
        return (zeros(len(rows), 1, 1, length),), (zeros(len(rows), 1, length, 1),)

    def insert(self, cache, prompts, chosen):
        self.count("insert", cache, prompts, chosen)
        return cache

    def resize(self, cache, old_slots, *, length):
        self.count("resize", cache, old_slots, length=length)
        return self.ring(len(old_slots), length)

    def write_pages(self, cache, prompts, lengths, *places):
        self.count("write_pages", cache, prompts, lengths, *places)
        return cache

    def extend(self, weights, cache, extended):
        self.count("extend", cache, extended)
        rows = zip(extended.starts, extended.tokens, extended.lengths, strict=True)
        self.extended += [(int(start), row[:n].tolist()) for start, row, n in rows if n]
        return cache, extended.tokens[..., None, None].astype(np.uint8)

    def read(self, ring, pages, *slots):
        """All tokens of a turn that begins are in its pages."""
        table, lengths, chosen, _ = slots
        self.count("read", ring, pages, table, lengths, chosen)
        for row, n in zip(table[chosen], lengths[chosen], strict=True):
            assert (row[: -(-n // self.page_size)] > 0).all()
        return ring

    def write(self, ring, pages, *copies):
        self.count("write", ring, pages, *copies)
        return pages

    def copy_pages(self, cache, sources, targets, *rows):
        self.count("copy_pages", cache, sources, targets)
        return cache

    def uniforms(self, slots):
        self.count("uniforms", slots)
        return zeros(self.chunk, len(slots.tokens))

    def decode(self, weights, cache, slots, inputs, *, filters):
        self.count("decode", cache, slots, inputs, filters=filters)
        stop = inputs.stop
        active, counts, step = slots.active.copy(), slots.counts.copy(), 0
        tokens = self.rng.integers(1, VOCAB, (self.chunk, len(active)))
        busiest = lambda: active.reshape(self.num_shards, -1).sum(axis=1).max()
        while step < stop.max_steps and busiest() > stop.min_active:
            counts += active
            active &= ~np.isin(tokens[step], stop.token_ids) & (counts < slots.limits)
            step += 1
        logprobs = np.zeros(tokens.shape, np.float32)
        read = np.concatenate([slots.tokens[None], tokens[:-1]])[..., None, None].astype(np.uint8)
        return cache, ChunkOutput(
            tokens, logprobs, None, read, produced=counts - slots.counts, active=active, steps=np.int32(step)
        )

    def decode_drafts(self, weights, cache, slots, inputs, **static):
        """All drafts are wrong."""
        self.count("decode_drafts", cache, slots, inputs, **static)
        cache, chunk = self.decode(weights, cache, slots, inputs._replace(texts=None), filters=None)
        return cache, chunk._replace(drafts=np.array([5, 0], np.int32))


class Replies:
    """Three tokens as the reply to each turn before the fourth."""

    patience = 10.0

    def reply(self, prompt_index, response_index, conversation, ids, *, start):
        future, turn = Future(), (conversation or 0) + 1
        future.set_result(Reply([5, 6, 7], turn == 4, Episode(turns=turn), turn))
        return future


def run(programs, shapes, requests, stop_ids=(1,), *, turns=False, sampling=PLAIN):
    """(finished responses, metrics)"""
    responses = new_responses(requests, jax.random.key(0))
    queue = TurnQueue(Replies(), responses, lambda value: value, VOCAB) if turns else None
    scheduler = Scheduler(shapes, programs, None, responses, stop_ids=stop_ids, turns=queue)
    scheduler.run(sampling, str)
    return responses, throughput([scheduler], 1.0)


def random_requests(rng, max_prompt, max_response):
    prompts = [rng.integers(1, VOCAB, rng.integers(1, max_prompt + 1)) for _ in range(rng.integers(1, 9))]
    prompts += prompts[: rng.integers(0, 3)]  # some twice
    number = lambda top: int(rng.integers(1, top + 1))
    return [Request(p, i, number(5), number(max_response)) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("turns", [False, True], ids=["", "turns"])
@pytest.mark.parametrize("num_shards", with_slow([1, 2], {1}))
@pytest.mark.parametrize(
    ("page_size", "kept", "draft_tokens"),
    [(0, 0, 0), (0, 8, 0), pytest.param(8, 0, 0, marks=pytest.mark.slow), (8, 0, 2)],
    ids=["ring", "kept", "paged", "drafts"],
)
def test_every_call_has_a_shape_that_ahead_of_time_compilation_knows(
    page_size, kept, draft_tokens, num_shards, *, turns
):
    """30 calls of `generate` with prompts of 1 to 150 tokens and responses of 1 to 100, in any number."""
    shapes = make_shapes(
        150,
        100,
        12,
        num_shards,
        prefill_tokens=512,
        turns=turns,
        draft_tokens=draft_tokens,
        draft_slots=12 if turns else 5,
    )
    if page_size or kept:  # three sequences of the longest at once
        pages = pages_required(shapes, num_shards, page_size or kept) * 3 * num_shards // 12
        shapes = dataclasses.replace(shapes, num_pages=pages + 1)
    samplings = [PLAIN, SamplingConfig(top_p=0.9, stop_tokens=tuple(range(1000, 1009)))]  # 8 ids, then 16
    ahead = FakePrograms(num_shards, page_size=page_size, kept_page_size=kept)
    call_all(ahead, shapes, None, samplings, eos_ids=(1,))
    assert max(ahead.calls.values()) <= 4 + 2 * bool(draft_tokens)  # few are called twice
    programs = FakePrograms(num_shards, page_size=page_size, kept_page_size=kept)
    rng = np.random.default_rng(1)
    for i in range(30):
        requests = random_requests(rng, 150, 100)
        sampling = samplings[i % 2]
        ends = sampling.stop_ids((1,))
        responses, _ = run(programs, shapes, requests, ends, turns=turns, sampling=sampling)
        assert {r.finish for r in responses} <= {"stop", "length"}
        for r in responses:
            assert 1 <= len(r.ids) <= r.request.max_tokens and len(r.logprobs) == len(r.ids)
            assert (r.finish == "stop") == (r.ids[-1] == 1) or turns
            assert np.ravel(r.routes).tolist() == [*r.request.prompt_ids, *r.ids][:-1]  # the last is not read
    assert programs.all_calls() <= ahead.all_calls()
    assert len(programs.all_calls()) > len(ahead.all_calls()) / 2  # and most of them are of use


def test_a_prompt_is_read_once_for_all_its_responses():
    """And without its last token, which decode reads; two groups of the same prompt share it."""
    programs, prompt = FakePrograms(), np.array([3, 4, 5])
    requests = [Request(prompt, 0, 4, 5), Request(np.array([9]), 1, 4, 5), Request(prompt, 2, 4, 5)]
    run(programs, make_shapes(3, 5, 4, 1, prefill_tokens=512), requests)
    assert programs.prefilled == [[3, 4]]  # and of [9] nothing is left to read


def test_few_prompts_are_read_in_batches_that_they_fill():
    """Batches of 1, 4 and 16 rows of 64 tokens: 8 prompts are two of 4, but 2 are one of 4."""
    for count, wanted in ((8, [(4, 64), (4, 64)]), (2, [(4, 64)]), (12, [(16, 64)])):
        programs = FakePrograms()
        requests = [Request(np.arange(40) + i, i, 1, 5) for i in range(count)]
        run(programs, make_shapes(64, 5, 16, 1, prefill_tokens=1024), requests)
        assert programs.prefill_shapes == wanted
        assert len(programs.prefilled) == count


def test_turns_read_all_that_came_before():
    """Four turns and three observations of [5, 6, 7]; the last one's token 1 ends each turn."""
    programs = FakePrograms(chunk=4)
    [response], _ = run(
        programs, make_shapes(2, 200, 1, 1, prefill_tokens=512, turns=True),
        [Request(np.array([3, 4]), 0, 1, 200)], tuple(range(1, VOCAB)), turns=True,
    )  # fmt: skip
    assert [end - start for start, end in response.observed] == [3, 3, 3]
    assert response.observed == [(1, 4), (5, 8), (9, 12)] and len(response.ids) == 13
    assert response.episode.turns == 4 and response.finish == "stop"
    context = [3, 4, *response.ids]
    assert programs.prefilled == [context[:1], context[:5], context[:9], context[:13]]


@pytest.mark.parametrize("sizes", [{"page_size": 8}, {"kept_page_size": 8}], ids=["paged", "kept"])
def test_turns_on_pages_read_only_what_came_since(sizes):
    """The token that ended a turn, which decode has not read, and the observation but its last token."""
    programs = FakePrograms(chunk=4, **sizes)
    shapes = dataclasses.replace(make_shapes(2, 200, 1, 1, prefill_tokens=512, turns=True), num_pages=40)
    requests = [Request(np.array([3, 4]), 0, 1, 200)]
    [response], metrics = run(programs, shapes, requests, tuple(range(1, VOCAB)), turns=True)
    assert response.observed == [(1, 4), (5, 8), (9, 12)] and len(response.ids) == 13
    context = [3, 4, *response.ids]
    assert programs.prefilled == [context[:1]]
    assert (programs.kept or programs).extended == [(at, context[at : at + 3]) for at in (2, 6, 10)]
    assert np.ravel(response.routes).tolist() == context[:-1]
    assert metrics["rollout/prefill_tokens"] == 1 + 3 * 3 and metrics["rollout/reused_tokens"] == 2 + 6 + 10


def test_each_turn_has_a_key_of_its_own():
    """The first turn has the key of the response, turn n fold_in(key, 2^32 - 1 - n)."""
    drawn = []

    class Recorded(FakePrograms):
        def uniforms(self, slots):
            drawn.append(slots.keys[0].tolist())
            return super().uniforms(slots)

    shapes, requests = (
        make_shapes(2, 200, 1, 1, prefill_tokens=512, turns=True),
        [Request(np.array([3, 4]), 0, 1, 200)],
    )
    run(Recorded(chunk=4), shapes, requests, tuple(range(1, VOCAB)), turns=True)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 0)
    keys = [key, *(jax.random.fold_in(key, 2**32 - 1 - turn) for turn in (1, 2, 3))]
    assert drawn == [jax.random.key_data(one).tolist() for one in keys]


def test_a_reply_without_a_conversation_leaves_it_as_it_was():
    asked = []

    class Short(Replies):
        def reply(self, prompt_index, response_index, conversation, ids, *, start):
            asked.append(conversation)
            future, new = Future(), {1: {}, 2: None}.get(len(asked), "end")
            future.set_result(Reply([5], len(asked) == 3, Episode(), new))
            return future

    [response] = new_responses([Request(np.array([3]), 0, 1, 50)], jax.random.key(0))
    queue = TurnQueue(Short(), [response], lambda value: value, VOCAB)
    for _ in range(3):
        queue.send(response)
        queue.collect(block=True)
    assert asked == [None, {}, {}] and response.conversation == "end"


def test_a_turn_goes_to_the_shard_of_its_pages_and_where_they_are_few_before_what_has_none():
    programs = FakePrograms(num_shards=2, page_size=8)
    shapes = dataclasses.replace(make_shapes(2, 50, 4, 2, prefill_tokens=512, turns=True), num_pages=40)
    waiting = new_responses([Request(np.array([3]), 0, 5, 50)], jax.random.key(0))
    queue = TurnQueue(Replies(), waiting, lambda value: value, VOCAB)
    scheduler = Scheduler(shapes, programs, None, waiting, stop_ids=(1,), turns=queue)
    where = {waiting[3]: 1, waiting[4]: 0}
    scheduler.cache.kept_in = where.get
    assert [waiting.index(scheduler._next_for(shard)) for shard in (0, 1)] == [0, 0]  # there is room
    scheduler.cache.is_scarce = lambda shard: True
    assert [waiting.index(scheduler._next_for(shard)) for shard in (0, 1)] == [4, 3]
    del where[waiting[4]], where[waiting[3]]
    assert waiting.index(scheduler._next_for(0)) == 0
    scheduler.waiting = deque([waiting[3]])
    where[waiting[3]] = 1
    assert scheduler._next_for(0) is waiting[3]  # no slot stays empty


def occupancy(slots, limits, chunk):
    """Tokens a slot and step, where response i has limits[i] tokens."""
    requests = [Request(np.array([3]), i, 1, n) for i, n in enumerate(limits)]
    programs = FakePrograms(chunk=chunk)
    responses, metrics = run(
        programs, make_shapes(1, max(limits), slots, 1, prefill_tokens=512), requests, stop_ids=()
    )
    assert [len(r.ids) for r in responses] == limits
    assert metrics["rollout/tokens"] == sum(limits)
    return metrics["rollout/slot_occupancy"]


def test_slots_are_refilled_and_halved_by_hand():
    # Two slots: 2 and 8 tokens; the chunk ends when the first has finished, the third takes its slot.
    assert occupancy(2, [2, 8, 6], chunk=8) == 1.0
    # No response waits: two steps of 2 slots, then 6 of one slot.
    assert occupancy(2, [2, 8], chunk=8) == 10 / (2 * 2 + 6 * 1)
    # Four slots, all but one done after 1 token: the chunk ends, and one slot is left for 7 steps.
    assert occupancy(4, [1, 1, 1, 8], chunk=8) == 11 / (4 + 7)
    # A chunk of one token never waits for the host's next look.
    assert occupancy(1, [3, 4], chunk=1) == 1.0


decode = lambda ids: "".join(chr(i) for i in ids)
ids_of = lambda text: [ord(c) for c in text]


def test_cut_right_after_the_token_that_completes_the_string():
    assert stop_end(ids_of("abc END def END"), 0, ("END",), decode) == 7


def test_a_string_across_two_chunks_is_found():
    ids = ids_of("abc END d")
    assert stop_end(ids[:5], 0, ("END",), decode) is None
    assert stop_end(ids, 5, ("END",), decode) == 7


def test_the_first_of_several_strings_wins():
    assert stop_end(ids_of("a\n\nb###"), 0, ("###", "\n\n"), decode) == 3


def test_text_of_earlier_turns_ends_nothing():
    assert stop_end(ids_of("END abc"), 0, ("END",), decode, turn_start=3) is None


def test_a_token_that_overshoots_is_kept_whole():
    words = {1: "x E", 2: "ND. More", 3: " text"}
    assert stop_end([1, 2, 3], 0, ("END",), lambda ids: "".join(words[i] for i in ids)) == 2


def test_only_the_tail_is_decoded():
    seen = []
    stop_end(list(range(1000)), 990, ("ab",), lambda ids: seen.append(len(ids)) or "")
    assert max(seen) == 10 + 4 * 2 + 4
