"""The paged cache: what the ring writes, in less memory; who has which page."""

import functools
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_native import KEY
from test_native import requests as native_requests

from jaxrl_llm import models
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.models import TransformerConfig, decode, paged
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import Reply, Request, SamplingConfig
from jaxrl_llm.rollout.native import page_budget
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.native.paged_cache import PagedMemory
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.structs import Episode

TINY = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, max_position=128, sliding_window=11, window_layers=(True, False),
)  # fmt: skip
PAGE = 8
FEWEST = 9
"""Pages that one response to the longest prompt needs: 63 tokens in 8, the last one of its prompt twice."""


@functools.cache
def params():
    return models.init(TINY, jax.random.key(0))


def new_engine(mesh=(1, 1, 1), **settings):
    mesh = make_mesh(MeshConfig(*mesh), jax.devices()[: int(np.prod(mesh))])
    return NativeEngine(RolloutConfig(**settings), TINY, mesh, make_tokenizer())


@functools.cache
def engine(cache, mesh=(1, 1, 1), **settings):
    built = new_engine(mesh, cache=cache, page=PAGE, **settings)
    built.publish(params(), version=3)
    return built


@functools.cache
def requests():
    """The last one again: its samples share the pages of the other's prompt."""
    four = native_requests()
    return [*four, Request(four[-1].prompt_ids, 14, 3, 24)]


@functools.cache
def ring(temperature):
    return engine("ring", slots=4).generate(requests(), SamplingConfig(temperature=temperature), KEY)


def assert_same(found, expected, atol=2e-5):
    assert [t.response_ids.tolist() for t in found] == [t.response_ids.tolist() for t in expected]
    assert [t.finish for t in found] == [t.finish for t in expected]
    for t, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(t.logprobs, other.logprobs, atol=atol)


SCARCE = {"slots": 5, "chunk": 5, "prefill_tokens": 32, "pages": FEWEST}


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_writes_what_the_ring_writes(temperature):
    """Slots are refilled, most pages short, samples end early, and prompts wait for pages."""
    found = engine("paged", **SCARCE).generate(requests(), SamplingConfig(temperature=temperature), KEY)
    assert_same(found, ring(temperature))
    assert {t.finish for t in found} == {"stop", "length"} or temperature == 0


def test_writes_the_same_on_eight_devices():
    """Slots over data and fsdp, each share with its own pages; kv heads over tensor."""
    found = engine("paged", (2, 2, 2), slots=8, chunk=16).generate(requests(), SamplingConfig(), KEY)
    assert_same(found, ring(1.0))


class Echo:
    """Answers the first two turns with three tokens."""

    patience = 10.0

    def reply(self, prompt_index, response_index, talk, ids, start):
        future = Future()
        turn = (talk or 0) + 1
        future.set_result(Reply([5, 6, 7], turn == 3, Episode(), turn))
        return future


def test_later_turns_read_what_was_said():
    sampling = SamplingConfig(stop_tokens=tuple(range(1, 64, 4)))
    expected = engine("ring", slots=4).generate(requests(), sampling, KEY, Echo())
    assert any(5 in t.response_ids and (t.mask == 0).sum() >= 6 for t in expected)
    assert_same(engine("paged", **SCARCE).generate(requests(), sampling, KEY, Echo()), expected)


def test_a_response_that_cannot_fit_alone_is_refused():
    small = engine("paged", slots=2, pages=FEWEST - 1)
    with pytest.raises(ValueError, match=r"request 3: 40 prompt tokens \+ max_tokens=24 take 9 pages of 8"):
        small.generate(requests(), SamplingConfig(), KEY)
    with pytest.raises(ValueError, match="cache_dtype=int8 needs"):
        RolloutConfig(cache="ring", cache_dtype="int8")


def test_8_bit_pages_are_close():
    greedy = SamplingConfig(temperature=0.0)
    found = engine("paged", slots=5, cache_dtype="int8").generate(requests()[:1], greedy, KEY)
    gaps = [abs(t.logprobs[0] - other.logprobs[0]) for t, other in zip(found, ring(0.0), strict=False)]
    assert 0 < max(gaps) < 0.05


@pytest.mark.parametrize(("dtype", "error"), [(jnp.int8, 0.5 / 127), (jnp.float8_e4m3fn, 2**-4)])
def test_8_bits_by_hand(dtype, error):
    """The largest of a row is exact, zeros stay zeros, nothing is off by more than half a step."""
    x = jnp.array([[3.0, -1.0, 0.7, 0.01], [0, 0, 0, 0]])
    narrow, scale = paged.quantize(x, dtype)
    back = narrow.astype(jnp.float32) * scale[:, None]
    np.testing.assert_allclose(back[0, 0], 3.0, rtol=1e-6)
    assert (back[1] == 0).all() and float(jnp.abs(back - x).max()) <= 3 * error


def test_nothing_compiles_after_warm_up():
    busy = new_engine(slots=4, chunk=8, prefill_tokens=64, cache="paged", page=PAGE, pages=2 * FEWEST)
    busy.warm_up(40, 24)
    busy.publish(params(), 4)
    before = busy.compile_count()
    busy.generate(requests(), SamplingConfig(), KEY)
    busy.generate(requests()[1:2], SamplingConfig(), KEY)
    assert busy.compile_count() == before


@pytest.mark.parametrize("lanes", [1, 128])
def test_a_scanned_model_keeps_its_pages_in_place(monkeypatch, lanes):
    """Layers beyond UNROLLED share one scan; the tokens one by one equal the ring's, also in wider pages."""
    monkeypatch.setattr(decode, "UNROLLED", 1)
    weights = decode.decode_weights(params(), jnp.float32)
    old = decode.ring_cache(TINY, 2, 24, jnp.float32)
    with monkeypatch.context() as there:
        there.setattr(paged.target, "device", lambda: ("tpu" if lanes > 1 else "cpu", ""))
        new = paged.paged_cache(TINY, 7, PAGE, jnp.float32)
    assert new.k.shape[3] == max(TINY.head_dim, lanes)
    table, active = jnp.array([[3, 1, 6], [2, 5, 4]], jnp.int32), jnp.ones(2, bool)
    one = jax.jit(lambda cache, *args: decode.decode(TINY, weights, cache, *args))
    other = jax.jit(lambda cache, *args: paged.decode(TINY, weights, cache, table, *args, active))
    for t in range(20):
        args = jnp.array([t, 63 - t]), jnp.full(2, t)
        (expected, old), (found, new) = one(old, *args), other(new, *args)
        np.testing.assert_allclose(found, expected, atol=2e-5)


class FakePrograms(SimpleNamespace):
    """Records what is asked of the device."""

    def empty_cache(self, pages, page):
        return (pages, page)

    def write(self, cache, prompts, lengths, numbers):
        self.written = numbers.tolist()
        return cache

    def copy(self, cache, sources, targets):
        self.copied = [pair for pair in zip(sources.tolist(), targets.tolist(), strict=True) if any(pair)]
        return cache


def test_prompts_share_pages_and_the_last_one_is_copied():
    programs = FakePrograms(ways=1, page=4, chunk=8)
    memory = PagedMemory(programs, slots=3, pages=12, lengths=(32,))
    # 10 tokens to read, the last by decode: two full pages and one of a token. 6 to write: 15 in the cache.
    assert memory.admit(0, b"a", 10, 6) and memory.admit(1, b"a", 10, 6)
    assert memory.seats[0].pages == [1, 2, 4] and memory.seats[1].pages == [1, 2, 5]
    prompts = (None, (np.zeros((1, 1, 12, 1)),))
    memory.insert(prompts, np.array([9]), np.array([0, 0, -1]))
    assert programs.written == [[1, 2, 3]] and programs.copied == [(3, 4), (3, 5)]
    assert len(memory.pools[0].free) == 6 and not memory.wants(1)
    # Each of the two may take one more page, so 4 are free for others: b needs its 2, and 3 of its own.
    assert not memory.admit(2, b"b", 6, 8)
    memory.release(0)
    assert sorted(memory.pools[0].free) == [4, 6, 7, 8, 9, 10, 11]
    assert memory.admit(2, b"b", 6, 8)
    memory.release(1)
    memory.release(2)
    assert len(memory.pools[0].free) == 6  # the prompts stay while nobody wants their room
    assert memory.admit(0, b"c", 30, 3) and len(memory.prompts[0]) == 1


def test_pages_for_a_chunk_are_those_it_can_fill():
    programs = FakePrograms(ways=1, page=4, chunk=8)
    memory = PagedMemory(programs, slots=2, pages=12, lengths=(16, 32))
    memory.admit(0, b"a", 5, 20)
    memory.admit(1, b"b", 1, 2)
    slots = SimpleNamespace(
        positions=np.array([4, 0]), limits=np.array([20, 2]), counts=np.array([0, 0]), active=np.ones(2, bool)
    )
    memory.lengthen(slots, 8)
    assert [len(seat.pages) for seat in memory.seats] == [3, 1]  # 12 tokens; 2 tokens
    assert memory._table().tolist() == [[*memory.seats[0].pages, 0], [*memory.seats[1].pages, 0, 0, 0]]


def test_pages_leave_room_for_what_the_trainer_will_hold(monkeypatch):
    """Until the first publish; a page is 2 layers x 2 arrays x 2 heads x 8 tokens x 8 numbers of 4 bytes."""
    weights = sum(x.size * 4 for x in jax.tree.leaves(params()))
    monkeypatch.setattr(
        page_budget, "free_bytes", lambda programs: 5_000 + weights + 100 * 2048 / page_budget.SHARE
    )
    config, mesh = (
        RolloutConfig(slots=4, cache="paged", page=PAGE),
        make_mesh(MeshConfig(), jax.devices()[:1]),
    )
    narrow = NativeEngine(config, TINY, mesh, resident=5_000)
    assert narrow._make_sizes(100, 100, False).pages == 100 + 1
    narrow.publish(params(), 1)
    assert narrow._make_sizes(100, 100, False).pages > 101


def test_auto_is_a_ring_on_a_cpu():
    assert new_engine(slots=2).programs.page == 0
    assert new_engine(slots=2, cache_dtype="int8").programs.page == 128  # a ring has no scales
    with pytest.raises(ValueError, match="pages must be at least 1, not 0"):
        RolloutConfig(pages=0)
