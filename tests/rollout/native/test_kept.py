"""The ring cache with kept turns: the text of the ring, and each token of a conversation is read once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import with_slow
from small_engine import MODEL, assert_same, engine, new_engine, params
from test_paged_cache import Late, talk, talked
from test_schedule import FakePrograms

from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.native import kept
from jaxrl_llm.rollout.native.cache import CacheManager
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.native.shapes import ProgramShapes
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh


@pytest.fixture(autouse=True)
def keep_all(monkeypatch):
    """However short the conversations."""
    monkeypatch.setattr(kept, "MIN_PREFILL_FLOPS", 0)


KEPT = {"page": 8, "slots": 15, "chunk": 5}
"""A slot and pages for every conversation; auto, which on a CPU is the ring."""


def test_each_token_is_read_once_and_the_text_is_that_of_both_caches():
    turned, metrics = talk(engine(**KEPT)), engine(**KEPT).metrics
    assert_same(turned, talked()[0], atol=3e-5)
    for name in ("prefill_tokens", "reused_tokens"):
        assert metrics[f"rollout/{name}"] == talked()[1][f"rollout/{name}"]
    ring = engine(cache="ring", slots=15, chunk=5)
    assert_same(talk(ring), turned, atol=3e-5)
    assert ring.metrics["rollout/reused_tokens"] == 0


@pytest.mark.slow
def test_conversations_without_pages_are_read_again():
    """Three slots for fifteen conversations, whose first turns all end before the first reply."""
    few = engine(page=8, slots=3, chunk=5, pages=14)
    late = Late(sum(t.episode is not None for t in talked()[0]))
    assert_same(talk(few, late), talked()[0], atol=3e-5)
    assert 0 < few.metrics["rollout/reused_tokens"] < talked()[1]["rollout/reused_tokens"]
    assert few.metrics["rollout/prefill_tokens"] > talked()[1]["rollout/prefill_tokens"]


@pytest.mark.parametrize("cache", with_slow(["auto", "paged"], {"paged"}))
def test_more_pages_than_slots_need_keep_the_conversations_that_wait_for_a_slot(cache):
    """As above, with 13 pages (96 tokens, and one that is a copy) for each of the fifteen."""
    roomy = engine(cache=cache, page=8, slots=3, chunk=5, pages=15 * 13)
    late = Late(sum(t.episode is not None for t in talked()[0]))
    assert_same(talk(roomy, late), talked()[0], atol=3e-5)
    for name in ("prefill_tokens", "reused_tokens"):
        assert roomy.metrics[f"rollout/{name}"] == talked()[1][f"rollout/{name}"]


@pytest.mark.slow
def test_eight_devices_keep_turns_and_compile_nothing_after_warm_up():
    """Slots over data and fsdp, each shard with its own pages; kv heads over tensor."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    sharded = NativeEngine(RolloutConfig(page=8, slots=4, chunk=16, prefill_tokens=64), MODEL, mesh)
    sampling = SamplingConfig(stop_tokens=tuple(range(1, 128, 4)))
    sharded.warm_up(40, 40, [sampling], turns=True)
    sharded.publish(params(), 0)
    before = sharded.compile_count()
    assert_same(talk(sharded), talked()[0], atol=3e-5)
    assert sharded.metrics["rollout/reused_tokens"] > 0
    assert sharded.compile_count() == before


def test_conversations_that_are_prefilled_in_no_time_are_not_kept(monkeypatch):
    """A token multiplies 2 x 7,680 weights; 96 of them attend to 48 keys of 4 heads of 8, in two layers."""
    short, long = new_engine(**KEPT), new_engine(**KEPT)
    work = 96 * (2 * 2 * 7_680 + 2 * 4 * 48 * 4 * 8)
    monkeypatch.setattr(kept, "MIN_PREFILL_FLOPS", work)
    assert long._make_shapes(48, 48, True).num_pages > 0
    monkeypatch.setattr(kept, "MIN_PREFILL_FLOPS", work + 1)
    assert short._make_shapes(48, 48, True).num_pages == 0


def test_planned_programs_keep_turns():
    """40 + 40 tokens take 10 pages, and one that is a copy; the ring has the tokens of 10."""
    calls = engine(**KEPT).largest_calls(params(), 40, 40, 5, sampling=SamplingConfig(), turns=True)
    ring, pages, table, *_ = calls["read_kept"].args
    assert ring.length == 80 and table.shape == (15, 10)
    assert pages.k.shape == (2 * (1 + 15 * 11), 2, 8, 8) and pages.k.dtype == jnp.float32
    assert calls["write_kept"].args[3].shape == (15 * 10, 3)
    assert "read_kept" not in engine(**KEPT).largest_calls(
        params(), 40, 40, 5, sampling=SamplingConfig(), turns=False
    )


def test_pages_of_turns_by_hand():
    """Pages of 4 tokens, of which there are 5; two slots, then conversation b needs a's pages."""
    programs = FakePrograms(kept_page_size=4)
    shapes = ProgramShapes(8, 8, (2,), (16,), prefill=((8, (1,)),), num_pages=6)
    cache = CacheManager(programs, shapes, conversations=True)
    pages, turns = cache.pages, cache.turns
    allocate = lambda slot, name, context, new: cache.allocate(
        slot, b"", num_context=context, max_new_tokens=new, conversation=name
    )
    assert allocate(0, "a", 4, 12) and allocate(1, "b", 4, 12)
    assert [cache.num_kept(slot) for slot in (0, 1)] == [0, 0] and len(pages.pools[0].free_pages) == 5
    turns.starts = np.array([3, 3], np.int32)
    cache.finish(0, "a", 9, num_read=6)  # both pages are written: 0 to 3, 4 to 7, relative to position 3
    assert pages.kept[0]["a"][:2] == ([1, 2], 6) and turns.copies == [[(0, 1, -3), (0, 2, 1)]]
    assert allocate(0, "a", 10, 6)  # 9 tokens to be read take a third page
    assert (
        pages.slots[0].pages == [1, 2, 3]
        and cache.num_kept(0) == 6
        and turns.unread.tolist() == [True, False]
    )
    turns.copies[0].clear()
    turns.starts = np.array([9, 9], np.int32)
    cache.finish(0, "a", 12, num_read=12)  # the first 9 are in the pages: the last page alone is written
    assert turns.copies == [[(0, 3, -1)]]
    cache.finish(1, "b", 10, num_read=10)  # three pages, and two are free
    assert list(pages.kept[0]) == ["b"] and len(pages.kept[0]["b"].pages) == 3
    assert allocate(0, "a", 13, 3) and cache.num_kept(0) == 0
    cache.drop("b")
    assert sorted(pages.pools[0].free_pages) == [1, 2, 3, 4, 5]
