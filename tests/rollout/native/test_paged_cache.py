"""The paged cache: the text of the ring, in less memory; which slot uses which pages."""

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
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import Reply, SamplingConfig
from jaxrl_llm.rollout.native import paged_cache
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.native.paged_cache import PagedCacheManager, check_pages
from jaxrl_llm.rollout.native.programs import PrefillBatch
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.structs import Episode

FEWEST = 11
"""Pages of 8 that a response to the longest prompt needs: 79 tokens in 10, the prompt's last page twice."""
SCARCE = {"cache": "paged", "page": 8, "slots": 3, "chunk": 5, "prefill_tokens": 32, "pages": FEWEST}


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_the_text_is_that_of_the_ring(temperature):
    """Slots are refilled, most pages short, responses end early, and prompts wait for pages."""
    got = engine(**SCARCE).generate(requests(), SamplingConfig(temperature=temperature), KEY)
    assert_same(got, base(temperature))


def test_the_text_is_the_same_on_eight_devices():
    """Slots over data and fsdp, each shard with its own pages; kv heads over tensor."""
    sharded = engine((2, 2, 2), cache="paged", page=8, slots=4, chunk=16)
    assert_same(sharded.generate(requests(), SamplingConfig(), KEY), base())


class Echo:
    """Replies to the first two turns with three tokens."""

    patience = 10.0

    def reply(self, prompt_index, response_index, conversation, ids, start):
        future = Future()
        turn = (conversation or 0) + 1
        future.set_result(Reply([5, 6, 7], turn == 3, Episode(), turn))
        return future


def test_later_turns_read_the_observations():
    """Log-probs of all turns are those of the training forward."""
    sampling = SamplingConfig(stop_tokens=tuple(range(1, 128, 4)))
    turned = engine(**SCARCE).generate(requests(), sampling, KEY, Echo())
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

    def empty_cache(self, pages, page_size):
        return (pages, page_size)

    def write_pages(self, cache, prompts, lengths, tables):
        self.written = tables.tolist()
        return cache

    def copy_pages(self, cache, sources, targets):
        self.copied = [pair for pair in zip(sources.tolist(), targets.tolist(), strict=True) if any(pair)]
        return cache


def test_prompts_share_pages_and_the_last_one_is_copied():
    programs = FakePrograms(num_shards=1, page_size=4, chunk=8)
    cache = PagedCacheManager(programs, num_slots=3, num_pages=12, lengths=(32,))
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
    assert cache.allocate(0, b"c", 30, 3) and len(cache.prompts[0]) == 1


def test_pages_for_a_chunk_are_those_it_can_fill():
    programs = FakePrograms(num_shards=1, page_size=4, chunk=8)
    cache = PagedCacheManager(programs, num_slots=2, num_pages=12, lengths=(16, 32))
    cache.allocate(0, b"a", 5, 20)
    cache.allocate(1, b"b", 1, 2)
    state = SimpleNamespace(
        positions=np.array([4, 0]), limits=np.array([20, 2]), counts=np.array([0, 0]), active=np.ones(2, bool)
    )
    cache.reserve(state, 8)
    assert [len(own.pages) for own in cache.slots] == [3, 1]  # 12 tokens; 2 tokens
    assert cache._table().tolist() == [[*cache.slots[0].pages, 0], [*cache.slots[1].pages, 0, 0, 0]]


def test_pages_leave_room_for_what_the_trainer_will_hold(monkeypatch):
    """Until the first publish; a page is 2 layers x 2 arrays x 2 heads x 8 tokens x 8 numbers of 4 bytes."""
    weights = sum(x.size * 4 for x in jax.tree.leaves(params()))
    free = 5_000 + weights + 100 * 2048 / paged_cache.MEMORY_FRACTION
    monkeypatch.setattr(paged_cache, "free_device_bytes", lambda programs: free)
    config = RolloutConfig(slots=4, cache="paged", page=8)
    narrow = NativeEngine(config, MODEL, make_mesh(MeshConfig(), jax.devices()[:1]), resident=5_000)
    assert narrow._make_shapes(100, 100, False).num_pages == 100 + 1
    narrow.publish(params(), 1)
    assert narrow._make_shapes(100, 100, False).num_pages > 101


def test_auto_is_a_ring_on_a_cpu():
    assert new_engine(slots=2).programs.page_size == 0
    assert new_engine(slots=2, cache_dtype="int8").programs.page_size == 128  # a ring has no scales
