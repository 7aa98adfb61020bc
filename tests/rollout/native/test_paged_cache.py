"""The paged cache: the text of the ring, in less memory; whose pages are whose."""

import functools
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import (
    KEY,
    MODEL,
    assert_same,
    base,
    engine,
    expected_logprobs,
    new_engine,
    params,
    requests,
)

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import paged
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.engine import Reply
from jaxrl_llm.rollout.native import page_memory, shapes
from jaxrl_llm.rollout.native.cache import CacheManager
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.native.page_memory import check_pages
from jaxrl_llm.rollout.native.paged_cache import PagedLayout
from jaxrl_llm.rollout.native.slots import PrefillBatch
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.structs import Episode

FEWEST = 11
"""Pages of 8 that a response to the longest prompt needs: 79 tokens in 10, the prompt's last page twice."""
SCARCE = {"cache": "paged", "page": 8, "slots": 3, "chunk": 5, "prefill_tokens": 32, "pages": FEWEST}


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_the_text_is_that_of_the_ring(temperature):
    """Slots are refilled, most pages short, responses end early, and prompts wait for pages."""
    got = engine(**SCARCE).generate(requests(), SamplingConfig(temperature=temperature), KEY)
    assert_same(got, base(temperature))


class Echo:
    """Replies to the first two turns with three tokens, or `ids`."""

    patience = 10.0

    ids = (5, 6, 7)

    def __init__(self, ids=ids):
        self.ids = ids

    def reply(self, prompt_index, response_index, conversation, ids, *, start):
        future = Future()
        turn = (conversation or 0) + 1
        future.set_result(Reply(list(self.ids), turn == 3, Episode(), turn))
        return future


ROOMY = {"cache": "paged", "page": 8, "slots": 15, "chunk": 5}
"""A slot and pages for every conversation."""


class Late(Echo):
    """Replies to no first turn before all of them have ended."""

    def __init__(self, conversations):
        self.conversations, self.held = conversations, []

    def reply(self, prompt_index, response_index, conversation, ids, *, start):
        reply = super().reply(prompt_index, response_index, conversation, ids, start=start)
        if conversation:
            return reply
        self.held.append((Future(), reply.result()))
        if len(self.held) == self.conversations:
            for future, value in self.held:
                future.set_result(value)
        return self.held[-1][0]


def talk(engine, dialogue=None):
    sampling = SamplingConfig(stop_tokens=tuple(range(1, 128, 4)))
    return engine.generate(requests(), sampling, KEY, dialogue or Echo())


@functools.cache
def talked():
    """(trajectories, metrics) of conversations whose pages are all kept."""
    return talk(engine(**ROOMY)), engine(**ROOMY).metrics


def test_each_token_of_a_conversation_is_read_once():
    """Those of prompts but the last, and those of replies; the groups of the same prompt share it."""
    turned, metrics = talked()
    prompts = sum(len(ids) - 1 for ids in {tuple(t.prompt_ids.tolist()) for t in turned})
    assert metrics["rollout/prefill_tokens"] == prompts + sum((t.mask == 0).sum() for t in turned)
    kept = [
        len(t.prompt_ids) + start - 1 for t in turned for start in np.flatnonzero(np.diff(t.mask) < 0) + 1
    ]
    assert metrics["rollout/reused_tokens"] == sum(kept)


def test_scarce_pages_change_nothing_but_what_is_read_again():
    late = Late(sum(t.episode is not None for t in talked()[0]))
    assert_same(talk(engine(**SCARCE), late), talked()[0], atol=3e-5)
    few, all_of_them = engine(**SCARCE).metrics, talked()[1]
    assert 0 < few["rollout/reused_tokens"] < all_of_them["rollout/reused_tokens"]
    assert few["rollout/prefill_tokens"] > all_of_them["rollout/prefill_tokens"]


def test_planned_conversations_extend_pages():
    """40 + 40 tokens, a row for each of 15 slots; 10 columns of pages. Else there is no such program."""
    arguments, sampling = (params(), 40, 40, 5), SamplingConfig()
    program = engine(**ROOMY).largest_calls(*arguments, sampling=sampling, turns=True)["extend"]
    table, tokens, *_ = program.args[2]
    assert tokens.shape == (15, 80) and table.shape == (15, 10)
    assert "extend" not in engine(**ROOMY).largest_calls(*arguments, sampling=sampling, turns=False)


def test_new_weights_use_no_page_of_older_ones():
    """Nor does a call after another one."""
    again = new_engine(**ROOMY)
    again.programs = engine(**ROOMY).programs
    again.publish(jax.tree.map(lambda w: w * 1.1, params()), 0)
    talk(again)
    again.publish(params(), 1)
    for one, other in zip(talk(again), talked()[0], strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.slow
def test_the_text_is_the_same_on_eight_devices():
    """Slots over data and fsdp, each shard with its own pages; kv heads over tensor."""
    sharded = engine((2, 2, 2), cache="paged", page=8, slots=4, chunk=16)
    assert_same(talk(sharded), talked()[0])
    assert sharded.metrics["rollout/reused_tokens"] > 0


def test_later_turns_read_the_observations():
    """Log-probs of all turns are those of the training forward."""
    turned, _ = talked()
    assert sum((t.mask == 0).sum() == 6 for t in turned) >= 8  # two observations of three tokens
    for t in turned:
        expected = expected_logprobs(t.prompt_ids, t.response_ids)[np.arange(len(t.mask)), t.response_ids]
        np.testing.assert_allclose(t.logprobs, np.where(t.mask, expected, 0.0), atol=3e-5)


def test_a_response_that_cannot_fit_alone_is_refused():
    check_pages(requests(), 8, FEWEST + 1)
    with pytest.raises(UserError, match=r"prompt 13: 40 prompt .* max_tokens=40 take 11 pages of 8 t.* 10:"):
        check_pages(requests(), 8, FEWEST)


def test_8_bit_pages_are_close():
    """The first log-prob reads the prompt from pages."""
    [one] = engine(cache="paged", page=8, slots=1, cache_dtype="int8").generate(
        [requests()[0]._replace(num_responses=1, max_tokens=8)], SamplingConfig(temperature=0.0), KEY
    )
    assert 0 < abs(one.logprobs[0] - base(0.0)[0].logprobs[0]) < 0.05


@pytest.mark.parametrize(("dtype", "error"), [(jnp.int8, 0.5 / 127), (jnp.float8_e4m3fn, 2**-4)])
def test_8_bits_by_hand(dtype, error):
    """The largest of a row is exact, zeros stay zeros, nothing is off by more than half a step."""
    x = jnp.array([[3.0, -1.0, 0.7, 0.01], [0, 0, 0, 0]])
    narrow, scale = jax.jit(paged.quantize, static_argnums=1)(x, dtype)
    back = np.asarray(narrow, np.float32) * np.asarray(scale)[:, None]
    np.testing.assert_allclose(back[0, 0], 3.0, rtol=1e-6)
    assert (back[1] == 0).all() and np.abs(back - x).max() <= 3 * error


class FakePrograms(SimpleNamespace):
    """Records the calls of the device functions."""

    has_states = False

    def empty_cache(self, pages, page_size, rows):
        return (pages, page_size)

    def write_pages(self, cache, prompts, lengths, *places):
        self.written = places[0].tolist()
        return cache

    def copy_pages(self, cache, sources, targets, *rows):
        pairs = zip(sources.tolist(), targets.tolist(), strict=True)
        self.copied += [pair for pair in pairs if pair[1] != paged.NO_PAGE]
        return cache


def test_prompts_share_pages_and_the_last_one_is_copied():
    programs = FakePrograms(num_shards=1, page_size=4, chunk=8, copied=[])
    cache = PagedLayout(programs, num_slots=3, num_pages=12, lengths=(32,))
    # 10 tokens to read, the last by decode: two full pages and one of a token. 6 more: 15 in the cache.
    assert cache.allocate(0, b"a", 10, 6) and cache.allocate(1, b"a", 10, 6)
    assert cache.slots[0].pages == [1, 2, 4] and cache.slots[1].pages == [1, 2, 5]
    batch = PrefillBatch(((np.zeros((1, 1, 1, 12)),), None), {b"a": 0}, np.array([9]))
    cache.insert(batch, np.array([0, 0, -1]))
    assert programs.written == [[1, 2, 3]] and programs.copied == [(3, 4), (3, 5)]
    assert len(cache.pools[0].free_pages) == 6 and not cache.needs_prompt(1)
    # Each of the two may take one more page, so 4 are free for others: b needs its 2, and 3 of its own.
    assert not cache.allocate(2, b"b", 6, 8)
    cache.free(0)
    assert sorted(cache.pools[0].free_pages) == [4, 6, 7, 8, 9, 10, 11]
    assert cache.allocate(2, b"b", 6, 8)
    cache.free(1)
    cache.free(2)
    assert len(cache.pools[0].free_pages) == 6  # the prompts stay cached until their pages are needed
    assert cache.allocate(0, b"c", 30, 3) and list(cache.prompts[0]) == [b"b", b"c"]


@pytest.mark.parametrize(("num_context", "shared"), [(4, 0), (5, 1), (6, 1), (8, 1), (9, 2)])
def test_only_full_pages_of_a_prompt_are_shared(num_context, shared):
    """The last token of the context is written by decoding: its page must belong to one slot."""
    programs = FakePrograms(num_shards=1, page_size=4, chunk=8, copied=[])
    cache = PagedLayout(programs, num_slots=2, num_pages=12, lengths=(32,))
    assert cache.allocate(0, b"a", num_context, 6) and cache.allocate(1, b"a", num_context, 6)
    assert len({*cache.slots[0].pages} & {*cache.slots[1].pages}) == shared == (num_context - 1) // 4


def test_copies_of_two_shards_in_calls_of_two_each(monkeypatch):
    """Three slots of the first shard and one of the second continue a prompt whose last page is not full."""
    monkeypatch.setattr(shapes, "MAX_COPIES", 2)
    programs = FakePrograms(num_shards=2, page_size=4, chunk=8, copied=[], calls=[])
    programs.copy_pages = lambda cache, *copies: programs.calls.append(np.stack(copies[:2]).tolist())
    cache = PagedLayout(programs, num_slots=6, num_pages=12, lengths=(32,))
    for slot in (0, 1, 2, 4):
        assert cache.allocate(slot, b"a", 6, 2)
    batch = PrefillBatch(((np.zeros((1, 1, 1, 8)),), None), {b"a": 0}, np.array([5]))
    cache.insert(batch, np.array([0, 0, 0, -1, 0, -1]))
    none = paged.NO_PAGE
    assert programs.calls == [
        [[2, 2, 2, 0], [3, 4, 3, none]],
        [[2, 0, 0, 0], [5, none, none, none]],
    ]


def test_kept_pages_by_hand():
    """Of three turns that have ended, those that no response needs stay, the latest longest."""
    programs = FakePrograms(num_shards=1, page_size=4, chunk=8, copied=[])
    cache = PagedLayout(programs, num_slots=3, num_pages=12, lengths=(32,))
    for slot, name in enumerate("abc"):  # 8 tokens in the cache after the turn
        assert cache.allocate(slot, name.encode(), 1, 8)
        state = SimpleNamespace(
            positions=np.zeros(3, int),
            limits=np.full(3, 8),
            counts=np.zeros(3, int),
            active=np.arange(3) == slot,
        )
        cache.reserve(state, 8)
    for slot, tokens in ((1, 8), (0, 4), (2, 5)):  # a's second page holds nothing that counts
        cache.keep(slot, "abc"[slot], tokens)
    assert [(name, own.num_tokens, len(own.pages)) for name, own in cache.kept[0].items()] == [
        ("b", 8, 2), ("a", 4, 1), ("c", 5, 2)
    ]  # fmt: skip
    assert len(cache.pools[0].free_pages) == 6
    assert not cache.allocate(0, b"d", 1, 45)  # 12 pages, and there are 11: nothing is dropped for it
    assert len(cache.kept[0]) == 3
    first = cache.kept[0]["a"].pages[0]
    assert cache.allocate(0, b"a", 8, 25, conversation="a")  # 8 pages, one of them its own: b's go, c's stay
    assert cache.slots[0].pages == [first] and cache.num_kept(0) == 4 and not cache.needs_prompt(0)
    assert list(cache.kept[0]) == ["c"]
    cache.drop("c")
    cache.free(0)
    assert sorted(cache.pools[0].free_pages) == list(range(1, 12))


def test_a_conversation_frees_no_page_that_a_running_response_shares():
    """Of 11 pages slot 1 has two, shared with "one", and one reserved; "one" has a third: 8 can be free."""
    cache = PagedLayout(FakePrograms(num_shards=1, page_size=4, chunk=8), 2, 12, lengths=(32,))
    assert cache.allocate(0, b"a", 9, 4) and cache.allocate(1, b"a", 9, 4)
    numbers = {"positions": np.full(2, 8), "limits": np.full(2, 4), "counts": np.zeros(2, int)}
    cache.reserve(SimpleNamespace(active=np.array([True, False]), **numbers), 4)
    cache.keep(0, "one", 12)
    assert cache.kept[0]["one"].pages == [1, 2, 3] and cache.slots[1].pages == [1, 2]
    assert not cache.allocate(0, b"b", 1, 36) and "one" in cache.kept[0]  # 9 pages
    assert cache.allocate(0, b"b", 1, 32) and not cache.kept[0]


@pytest.mark.parametrize(
    ("keep", "tokens", "pages"), [(11, 11, 3), (10, 10, 3), (8, 8, 2), (7, 4, 1), (4, 4, 1), (3, 0, 0)]
)
def test_pages_of_a_fork_by_hand(keep, tokens, pages):
    """11 tokens in pages of 4, of which the first two are the prompt's: a fork would write to them."""
    programs = FakePrograms(num_shards=1, page_size=4, chunk=8, copied=[])
    cache = PagedLayout(programs, num_slots=1, num_pages=12, lengths=(32,))
    assert cache.allocate(0, b"a", 10, 6)
    cache.keep(0, "one", 11)
    cache.cut("one", keep)
    assert cache.kept[0].get("one", ((), 0))[:2] == ([1, 2, 4][:pages] if pages else (), tokens)
    assert (cache.pools[0].ref_counts[1:5] == [1 + (pages > 0), 1 + (pages > 1), 1, pages > 2]).all()
    if pages:
        programs.has_states = True  # of which none is of an earlier token
        cache.cut("one", 1)
    assert not cache.kept[0]


def test_rows_of_states_by_hand():
    """Two slots have four rows and a null row: of slots and prompts, then of conversations that wait."""
    programs = FakePrograms(num_shards=1, page_size=4, chunk=8, copied=[], has_states=True, kept=None)
    cache = CacheManager(programs, SimpleNamespace(slot_counts=(2,), num_pages=20, cache_lengths=(32,)))
    allocate = lambda slot, prompt, **more: cache.allocate(
        slot, prompt, num_context=5, max_new_tokens=8, **more
    )
    free = lambda: sorted(cache.pages.rows[0].free_pages)
    assert allocate(0, b"a") and allocate(1, b"a") and free() == [4]
    assert [copy[3:] for copy in cache.pages.pending_copies] == [(1, 2), (1, 3)]  # without a page to copy
    cache.finish(0, "one", 9, num_read=8)
    assert cache.pages.kept[0]["one"].row == 2
    assert allocate(0, b"b") and free() == []  # prompt and slot took the free row and that of "one"
    assert not cache.pages.kept[0] and [own.row for own in cache.pages.slots] == [4, 3]
    cache.finish(0, "two", 9, num_read=8)
    cache.finish(1, "three", 9, num_read=9)  # its state has a token too many
    assert list(cache.pages.kept[0]) == ["two"] and free() == [3]
    assert allocate(1, b"", conversation="two") and cache.num_kept(1) == 8 and cache.pages.slots[1].row == 4
    cache.finish(1)
    assert free() == [3, 4]


def test_pages_for_a_chunk_are_those_it_can_fill():
    programs = FakePrograms(num_shards=1, page_size=4, chunk=8, copied=[])
    cache = PagedLayout(programs, num_slots=2, num_pages=12, lengths=(16, 32))
    cache.allocate(0, b"a", 5, 20)
    cache.allocate(1, b"b", 1, 2)
    state = SimpleNamespace(
        positions=np.array([4, 0]), limits=np.array([20, 2]), counts=np.array([0, 0]), active=np.ones(2, bool)
    )
    cache.reserve(state, 8)
    assert [len(own.pages) for own in cache.slots] == [3, 1]  # 12 tokens; 2 tokens
    assert cache.table().tolist() == [[*cache.slots[0].pages, 0], [*cache.slots[1].pages, 0, 0, 0]]


def test_pages_leave_room_for_what_the_trainer_will_hold(monkeypatch):
    """Until the first publish; a page is 2 layers x 2 arrays x 2 heads x 8 tokens x 8 numbers of 4 bytes."""
    weights = sum(x.size * 4 for x in jax.tree.leaves(params()))
    free = 5_000 + weights + 100 * 2048 / page_memory.MEMORY_FRACTION
    monkeypatch.setattr(page_memory, "free_device_bytes", lambda programs: free)
    config = RolloutConfig(slots=4, cache="paged", page=8)
    narrow = NativeEngine(config, MODEL, make_mesh(MeshConfig(), jax.devices()[:1]), resident=5_000)
    assert narrow._make_shapes(100, 100, False).num_pages == 100 + 1
    narrow.publish(params(), 1)
    assert narrow._make_shapes(100, 100, False).num_pages > 101


def test_auto_is_a_ring_on_a_cpu():
    assert new_engine(slots=2).programs.page_size == 0
    assert new_engine(slots=2, cache_dtype="int8").programs.page_size == 128  # a ring has no scales
