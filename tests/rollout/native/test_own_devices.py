"""The native engine in a thread: what it generates depends on the order of the calls alone."""

import threading
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from random_weights import random_params
from small_engine import KEY, LIMIT, MODEL, assert_same, ids, new_engine

from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import RunError
from jaxrl_llm.forks import TurnRecord
from jaxrl_llm.models import shardings
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.engine import GenerationCall, PartialResponse, Reply, Request
from jaxrl_llm.rollout.meter import Meter
from jaxrl_llm.rollout.native.asynchronous import AsynchronousEngine
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.partial import is_complete, pack_responses, unpack_responses
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.structs import Episode

SETTINGS = {"slots": 4, "chunk": 8}


def trained(seed, mesh):
    """Weights of a trainer on these devices."""
    own = jax.tree.map(np.array, random_params(MODEL, seed))  # a test deletes them
    return jax.device_put(own, shardings(MODEL, mesh, TRAIN))


@pytest.fixture(scope="module")
def trainer():
    return make_mesh(MeshConfig(1, 2, 2), jax.devices()[:4])


def make_engine():
    """An engine on one device that the trainer does not use."""
    mesh = make_mesh(MeshConfig(), jax.devices()[6:7])
    return NativeEngine(RolloutConfig(**SETTINGS), MODEL, mesh, make_tokenizer())


@pytest.fixture
def engine():
    built = AsynchronousEngine(make_engine())
    yield built
    built.close()
    assert not built._thread.is_alive()


@pytest.fixture(scope="module")
def expected(trainer):
    """The responses of the weights 0, 1, 2 in the synchronous engine, on another device."""
    built = new_engine(**SETTINGS)

    def generate(seed):
        built.publish(random_params(MODEL, seed), seed)
        return built.generate(requests(), SamplingConfig(), jax.random.fold_in(KEY, seed))

    return [generate(seed) for seed in range(3)]


def requests():
    return [Request(np.arange(2, 2 + n, dtype=np.int32), n, 2, LIMIT) for n in (3, 5)]


@pytest.mark.slow
def test_each_call_has_the_weights_that_were_published_when_it_was_made(engine, trainer, expected):
    """The thread is held until all is queued: every call but the last has weights that are not the newest."""
    with pytest.raises(ValueError, match="call publish"):
        engine.start(GenerationCall(requests(), SamplingConfig(), KEY))
    gate, finish = threading.Event(), engine.engine.finish
    engine.engine.finish = lambda *args, **settings: (gate.wait(), finish(*args, **settings))[1]
    pending = []
    for seed in range(3):
        params = trained(seed, trainer)
        metrics = engine.publish(params, seed)
        assert metrics["rollout/publish_bytes"] == 4 * sum(w.size for w in jax.tree.leaves(params))
        pending.append(
            engine.start(GenerationCall(requests(), SamplingConfig(), jax.random.fold_in(KEY, seed)))
        )
        jax.tree.map(lambda w: w.delete(), params)  # as an update does that donates them
        engine.release_memory()
    gate.set()
    for seed, (queued, same) in enumerate(zip(pending, expected, strict=True)):
        trajectories = queued.result()
        assert_same(trajectories, same)
        assert all(set(t.versions) == {seed} for t in trajectories)
        assert queued.weights is None  # freed
    assert engine.usage()["rollout/tokens"] >= sum(map(len, ids(expected[2])))


def test_a_snapshot_is_complete_and_is_not_generated_again(engine, trainer, expected):
    engine.publish(trained(0, trainer), 0)
    key = jax.random.fold_in(KEY, 0)
    saved = engine.snapshot([engine.start(GenerationCall(requests(), SamplingConfig(), key))])
    (again,) = unpack_responses(pack_responses({3: saved}))[3]
    engine.engine.finish = None  # it would raise
    engine.publish(trained(1, trainer), 1)
    trajectories = engine.start(GenerationCall(requests(), SamplingConfig(), key, partial=again)).result()
    assert_same(trajectories, expected[0], atol=0)
    assert all(set(t.versions) == {0} and t.server == "" for t in trajectories)


@pytest.mark.slow
def test_unfinished_responses_of_another_engine_are_generated_anew(engine, trainer, expected):
    engine.publish(trained(0, trainer), 0)
    others = [PartialResponse([5], [-1.0], [9], "stop"), *(PartialResponse([5], [-1.0], [9]) for _ in "abc")]
    kept, *rest = engine.start(
        GenerationCall(requests(), SamplingConfig(), jax.random.fold_in(KEY, 0), partial=others)
    ).result()
    assert (kept.response_ids.tolist(), kept.versions.tolist()) == ([5], [9])
    assert_same(rest, expected[0][1:])


@pytest.mark.slow
def test_nothing_compiles_in_the_thread_after_a_warm_up(engine, trainer):
    engine.warm_up(5, LIMIT)
    count = engine.engine.compile_count()
    engine.publish(trained(0, trainer), 0)
    engine.generate(requests(), SamplingConfig(), KEY)
    assert engine.engine.compile_count() == count


def test_an_error_ends_the_thread_and_is_raised_by_every_later_call(engine, trainer):
    gate = threading.Event()

    def fail(*args, **settings):
        gate.wait()
        raise RunError("no memory")

    engine.publish(trained(0, trainer), 0)
    engine.engine.finish = fail
    first, second = (engine.start(GenerationCall(requests(), SamplingConfig(), KEY)) for _ in range(2))
    gate.set()
    for call in (
        first.result,
        second.result,
        lambda: engine.snapshot([second]),
        lambda: engine.publish(None, 1),
        lambda: engine.start(GenerationCall(requests(), SamplingConfig(), KEY)),
    ):
        with pytest.raises(RunError, match="no memory"):
            call()


def test_closing_ends_the_call_before_its_next_chunk(engine, trainer):
    started, gate, finish = threading.Event(), threading.Event(), engine.engine.finish

    def chunks(*args, before_chunk, **settings):
        def wait():
            started.set(), gate.wait()
            before_chunk()

        return finish(*args, before_chunk=wait, **settings)

    engine.engine.finish = chunks
    engine.publish(trained(0, trainer), 0)
    pending = engine.start(GenerationCall(requests(), SamplingConfig(), KEY))
    started.wait()
    threading.Thread(target=lambda: (engine._closed.wait(), gate.set())).start()
    engine.close()
    with pytest.raises(RunError, match="closed"):
        pending.result()


class Twice:
    """An environment that replies once, then ends the conversation; it counts its replies."""

    patience, replies = 60.0, 0

    def reply(self, prompt_index, response_index, conversation, ids, *, start):
        self.replies += 1
        turn = 1 + bool(conversation)
        records = (
            TurnRecord(
                len(ids), turn - 1, turn - 2, 0.5, calls=({"name": "f", "arguments": {"x": 1}},), state="s"
            ),
        )
        said = ({"role": "user", "content": "go on"},)
        episode = Episode(turn, reward=float(turn), messages=said * turn, records=records * turn)
        future = Future()
        future.set_result(Reply([7, 8], turn == 2, episode, turn))
        return future


def test_conversations_are_kept_with_their_rewards_and_have_no_second_environment(engine, trainer):
    sampling, env = SamplingConfig(stop_tokens=tuple(range(2, 128))), Twice()
    engine.publish(trained(0, trainer), 0)
    pending = engine.start(GenerationCall(requests(), sampling, KEY, env))
    (saved,) = unpack_responses(pack_responses({0: engine.snapshot([pending])}))[0]
    first, count = pending.result(), env.replies
    assert count == 8 and all(t.mask.tolist() == [1, 0, 0, 1] for t in first)
    again = engine.start(GenerationCall(requests(), sampling, KEY, env, partial=saved)).result()
    assert env.replies == count
    assert [t.episode for t in again] == [t.episode for t in first]
    assert {t.episode.reward for t in again} == {2.0} and {t.episode.turns for t in again} == {2}
    assert ids(again) == ids(first) and [t.answer for t in again] == [t.answer for t in first]


@pytest.mark.parametrize(
    ("finish", "observed", "turns", "with_env", "without"),
    [
        ("", [], None, False, False),
        ("stop", [], None, False, True),  # its turn waits for a reply
        ("stop", [], 1, True, True),
        ("stop", [(1, 2)], 1, False, True),
        ("stop", [(1, 2)], 2, True, True),
        ("length", [], None, True, True),
        ("length", [(1, 2)], None, False, True),  # of a file without episodes: its reward is not known
        ("length", [(1, 2)], 1, True, True),
    ],
)
def test_complete_responses(finish, observed, turns, with_env, *, without):
    episode = None if turns is None else Episode(turns)
    request = Request(np.zeros(1, np.int32), 0, 1, 3)
    response = PartialResponse([1, 2, 3], finish=finish, observed=observed, episode=episode, request=request)
    assert is_complete(response, turns=True) is with_env
    assert is_complete(response, turns=False) is without


def test_the_meter_counts_what_is_under_way():
    now = 0.0
    meter = Meter(lambda: now)
    now = 1.0
    with meter:
        now = 3.0
        assert meter.read()[1] == pytest.approx(1 / 3)
        now = 4.0
    now = 8.0
    assert meter.read()[1] == pytest.approx(4 / 5)
