"""Decode threads on a CPU: the same responses, nothing compiled after warm-up, one error ends all."""

import itertools
import os
import threading
import time

import jax
import numpy as np
import pytest
from small_engine import EOS, KEY, LIMIT, MODEL, new_engine, params, requests

from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.native import decode_threads
from jaxrl_llm.rollout.native.decode_threads import divide, num_decode_threads, run_decode_threads
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

SLOTS = 16  # two threads of eight


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)


def nothing():
    """Do nothing before a chunk."""


def test_items_are_divided_in_order_into_parts_of_equal_length():
    assert divide("abcdefg", 2) == ["abc", "defg"] and divide([], 2) == [[], []]
    for count, parts in ((1, 2), (5, 3), (64, 2)):
        divided = divide(list(range(count)), parts)
        assert list(itertools.chain(*divided)) == list(range(count)) and len(divided) == parts
        assert max(map(len, divided)) - min(map(len, divided)) <= 1


def test_lanes_are_for_two_cores_of_one_cpu_and_slots_enough(two_cores, monkeypatch):
    one, eight = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]), make_mesh(MeshConfig())
    assert [num_decode_threads(one, slots) for slots in (1, 8, 15, 16, 64, 512)] == [1, 1, 1, 2, 2, 2]
    assert eight.size == 8 and num_decode_threads(eight, 64) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert num_decode_threads(one, 64) == 1
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert num_decode_threads(one, 64) == 2


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_two_lanes_generate_what_one_does(two_cores, monkeypatch, strict):
    config, mesh = RolloutConfig(slots=SLOTS, chunk=8), make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    outputs = []
    for most in (2, 1):
        monkeypatch.setattr(decode_threads, "MAX_DECODE_THREADS", most)
        one = NativeEngine(config, MODEL, mesh, eos_ids=[EOS], strict=strict)
        one.publish(params(), 3)
        outputs.append((one.generate(requests(), SamplingConfig(), KEY), one.metrics, one._shapes))
    (two, metrics, shapes), (alone, metrics_alone, _) = outputs
    assert shapes.decode_threads == 2 and shapes.slot_counts[-1] == SLOTS // 2
    for got, expected in zip(two, alone, strict=True):
        np.testing.assert_array_equal(got.response_ids, expected.response_ids)
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=0 if strict else 2e-5, rtol=0)
        assert got.versions.tolist() == [3] * len(got.response_ids)
    assert metrics["rollout/tokens"] == metrics_alone["rollout/tokens"] == sum(len(t.logprobs) for t in two)
    assert 0 < metrics["rollout/slot_occupancy"] <= 1 and 0 < metrics["rollout/prefill_share"] < 1


@pytest.mark.slow
def test_lanes_compile_nothing_after_warm_up(two_cores):
    one = new_engine(slots=SLOTS, chunk=8)
    one.warm_up(40, LIMIT)
    one.publish(params(), 0)
    before = one.compile_count()
    one.generate(requests(), SamplingConfig(), KEY)
    assert one.compile_count() == before


def test_conversations_and_pages_have_one_decode_thread(two_cores):
    assert new_engine(slots=SLOTS)._make_shapes(40, LIMIT, False).decode_threads == 2
    assert new_engine(slots=SLOTS)._make_shapes(40, LIMIT, True).decode_threads == 1
    assert new_engine(slots=SLOTS, cache="paged")._make_shapes(40, LIMIT, False).decode_threads == 1


def test_lanes_run_at_once_on_the_device_of_their_caller():
    both = threading.Barrier(2, timeout=10)

    def run(part, before_chunk):
        both.wait()
        return part, jax.config.jax_default_device

    device = jax.devices()[3]
    with jax.default_device(device):
        assert run_decode_threads(["a", "b"], run, nothing) == [("a", device), ("b", device)]
    assert run_decode_threads(["alone"], lambda part, _: (part, threading.current_thread()), nothing) == [
        ("alone", threading.current_thread())
    ]


def test_the_error_of_a_lane_ends_the_others_and_is_raised():
    chunks = []

    def run(part, before_chunk):
        if part == "fails":
            raise ValueError("its own")
        while True:
            before_chunk()
            chunks.append(part)
            time.sleep(0.01)

    with pytest.raises(ValueError, match="its own"):
        run_decode_threads(["goes on", "fails"], run, nothing)
    number = len(chunks)
    time.sleep(0.05)
    assert len(chunks) == number


def test_what_ends_a_call_ends_its_threads():
    def run(part, before_chunk):
        while True:
            before_chunk()
            time.sleep(0.01)

    def closed():
        raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed"):
        run_decode_threads("ab", run, closed)


def test_an_interrupt_of_the_waiting_thread_ends_the_threads(monkeypatch):
    ended = []

    def run(part, before_chunk):
        try:
            while True:
                before_chunk()
                time.sleep(0.01)
        finally:
            ended.append(part)

    def interrupted(futures):
        raise KeyboardInterrupt

    monkeypatch.setattr(decode_threads, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_decode_threads("ab", run, nothing)
    assert sorted(ended) == ["a", "b"]
