"""Weights to real SGLang servers on a CPU, of the interpreter JAXRL_SGLANG_PYTHON, by every transport."""

import contextlib
import functools
import os
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest
from real_sglang import MODEL, NEEDED, engine_on, started
from servers_shared import KEY, TOKENIZER, native
from test_sglang_real import requests

from jaxrl_llm import models
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.bridge.transports.process_group import GroupTransport
from jaxrl_llm.learn.scoring import sequence_scorer
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

pytestmark = NEEDED
GREEDY = SamplingConfig(temperature=0.0)
TRANSPORTS = ["disk", "http", "group"]
BUCKET = 40_000  # bytes: some ten of the model's


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Two servers; the last test kills one."""
    with started(tmp_path_factory.mktemp("sglang")) as servers:
        yield servers


@pytest.fixture
def make(launched, tmp_path):
    """make(transport, **settings) -> an engine on both servers."""
    with contextlib.ExitStack() as closing:
        yield lambda transport, **settings: engine_by(transport, launched.urls, tmp_path, closing, **settings)


def engine_by(name, urls, folder, closing, **settings):
    """An engine whose weights go by the transport of this name."""
    source = WeightSource(MODEL, "float32", BUCKET)
    if name == "disk":
        transport = DiskTransport(folder / "weights", "float32", TOKENIZER)
    elif name == "http":
        transport = HttpTransport(source, KINDS["sglang"])
    else:
        transport = GroupTransport(source, KINDS["sglang"], python=sys.executable, timeout=60.0)
    engine = engine_on(urls, transport, **settings)
    closing.callback(engine.pool.close)
    if name == "group":
        closing.callback(transport.close)
    return engine


def weights(seed):
    return models.init(MODEL, jax.random.key(seed))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_pushes_and_the_text_is_that_of_the_native_engine(make, transport):
    check_two_pushes(make(transport), usable=2)


def check_two_pushes(engine, usable):
    for seed in (0, 1):
        metrics = engine.publish(weights(seed), seed)
        print({name: float(f"{value:.3g}") for name, value in metrics.items()})
        assert metrics["bridge/probe_mean_abs"] < 1e-5 and metrics["servers/usable"] == usable
        mine, theirs = (
            engine.generate(requests(), GREEDY, KEY),
            native(weights(seed), GREEDY, requests(), MODEL),
        )
        for a, b in zip(mine, theirs, strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist() and set(a.versions) == {seed}
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
def test_a_push_during_generation_gives_each_token_the_version_that_wrote_it(make, transport, pause):
    """In one response the old version, then the new one; where no old keys are left, its log-probs are those
    of the new weights on all that stands before."""
    engine = make(transport, pause=pause, timeout=120.0)
    made = responses_over_a_push(engine)
    score = sequence_scorer("float32", make_mesh(MeshConfig(), jax.devices()[:1]))
    for t in made:
        ids = np.concatenate([t.prompt_ids, t.response_ids])
        for version in set(t.versions):
            said = score(weights(version % 2), ids)
            wrote = t.versions == version
            difference = np.abs(t.logprobs - said[len(t.prompt_ids) - 1 : len(ids) - 1])[wrote].max()
            mixed = pause == "in_place" and version % 2 and not wrote.all()
            assert difference > 1e-3 if mixed else difference < 1e-4, (version, difference)


def responses_over_a_push(engine):
    """Four responses, one or more of two versions: `weights(0)` has the even ones, `weights(1)` the odd ones.

    A server may end its responses before the push begins: then all is done again.
    """
    rng = np.random.default_rng(1)
    todo = [Request(rng.integers(2, 120, 5).astype(np.int32), i, 1, 160) for i in range(4)]
    for old in (10, 12, 14, 16, 18):
        engine.publish(weights(0), old)
        made = []
        work = functools.partial(engine.generate, todo, SamplingConfig(ignore_eos=True), KEY)
        thread = threading.Thread(target=lambda made=made, work=work: made.extend(work()))
        thread.start()
        while not all(server.inflight for server in engine.pool.servers):
            time.sleep(0.01)
        time.sleep(0.1)
        metrics = engine.publish(weights(1), old + 1)
        thread.join()
        print({name: float(f"{value:.3g}") for name, value in metrics.items()})
        assert metrics["servers/usable"] == 2 and metrics["bridge/probe_mean_abs"] < 1e-5
        assert len(made) == 4 and not engine.pool.retried
        for t in made:
            assert len(t.response_ids) == 160 and set(t.versions) <= {old, old + 1}
            assert (np.diff(t.versions) >= 0).all()
        if any(len(set(t.versions)) == 2 for t in made):
            return made
    raise AssertionError("each push came after the responses")


@pytest.mark.parametrize("transport", ["http", "group"])
def test_a_session_that_a_killed_trainer_left_open_is_ended_first(make, transport):
    engine = make(transport)
    for server in engine.pool.servers:
        for path, body in (("/pause_generation", {"mode": "retract"}), ("/begin_weight_update", {})):
            engine.pool.run(engine.pool.request(server, path, body))
    metrics = engine.publish(weights(2), 2)
    assert metrics["servers/usable"] == 2 and metrics["bridge/probe_mean_abs"] < 1e-5


@pytest.mark.parametrize("transport", ["group", "http"])
def test_a_server_killed_in_a_push_is_left_out(make, launched, transport):
    """The first kill meets both servers, the second one finds the killed one gone."""
    engine = make(transport, timeout=60.0)
    process, parts = launched.processes[1], engine.publisher.transport.parts
    gone = process.poll() is not None
    if not gone:
        assert engine.publish(weights(3), 3)["servers/usable"] == 2

    def killing(params, label):
        for i, part in enumerate(parts(params, label)):
            if i == 2 and not gone:
                os.killpg(process.pid, signal.SIGKILL)
            yield part

    engine.publisher.transport.parts = killing
    metrics = engine.publish(weights(4), 4)
    print(transport, engine.pool.describe())
    assert metrics["servers/usable"] == 1 and metrics["bridge/probe_mean_abs"] < 1e-5
    assert [server.usable for server in engine.pool.servers] == [True, False]
    mine, theirs = engine.generate(requests(), GREEDY, KEY), native(weights(4), GREEDY, requests(), MODEL)
    assert [t.response_ids.tolist() for t in mine] == [t.response_ids.tolist() for t in theirs]
