"""The pool on a real vLLM server on a CPU, of the interpreter JAXRL_VLLM_PYTHON (`make test-vllm`)."""

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import threading
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from lora_models import with_random_adapters
from servers_shared import (
    GREEDY,
    KEY,
    TOKENIZER,
    engine_for,
    ids,
    native,
    one_device,
    one_percent_moved,
    requests,
    score_of,
    served_logprobs,
    until,
)
from test_turns import PROMPTS, Script

from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.bridge import vllm
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.servers import Receiver
from jaxrl_llm.bridge.transports.delta import DeltaTransport
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.bridge.transports.process_group import GroupTransport
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.template import ChatConfig
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.dialogue import Conversations
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.experience.rollouts import RolloutSource
from jaxrl_llm.hf.export import save_description
from jaxrl_llm.models import LoraConfig, TransformerConfig
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig, ServersConfig
from jaxrl_llm.rollout.engine import GenerationCall, Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.servers import auth
from jaxrl_llm.rollout.servers.health import run_health_checks
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.rollout.servers.launch import ServerProcesses, free_ports, is_up

PYTHON = os.environ.get("JAXRL_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="JAXRL_VLLM_PYTHON names no interpreter with vLLM")
FLAGS = "--enforce-eager --max-model-len 256"
API_KEY = "tell-me-4711"
LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    auth.API_KEY: API_KEY,
}
UNTIED = TransformerConfig(
    vocab_size=264, hidden_size=64, mlp_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    initializer_range=0.3, max_position=256, tie_embeddings=False,
)  # fmt: skip
ROLLOUT = RolloutConfig(engine="vllm", launch=1, slots=8)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def launched(request, tmp_path_factory):
    """(server process, model): one server, started as a run starts it, that demands a key."""
    model, folder = dataclasses.replace(UNTIED, tie_embeddings=request.param), tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in CPU.items():
            environment.setenv(name, value)
        shell = save_description(model, folder / "shell", TOKENIZER, "float32")
        settings = ServersConfig(python=PYTHON, flags=FLAGS)
        flags = vllm.vllm_lora_flags(LORA.rank, 2)
        processes = ServerProcesses(ROLLOUT, settings, shell, folder, flags=flags)
        try:
            processes.wait()
            yield processes, model
        finally:
            processes.close()


@pytest.fixture
def make(launched, tmp_path):
    """make(transport, model, encode, changes, ...) -> an engine on the server."""
    closing = []
    (url,), plain = launched[0].urls, launched[1]

    def engine(transport="disk", model=None, changes=False, **settings):
        encode = settings.pop("encode", vllm.with_tied_head if plain.tie_embeddings else None)
        made = DiskTransport(tmp_path / "weights", "float32", TOKENIZER, encode)
        source, kind = WeightSource(plain, "float32", 50_000, encode), KINDS["vllm"]
        if transport == "http":
            made = DeltaTransport(source, kind) if changes else HttpTransport(source, kind)
        settings = {"patience": 0.0, "timeout": 120.0} | settings
        if transport == "group":
            delta = DeltaTransport(source, kind, vllm.announce_piece) if changes else None
            made = GroupTransport(source, kind, python=PYTHON, timeout=settings["timeout"], delta=delta)
        folder = tmp_path / "adapters"
        one = engine_for([url], made, model or plain, 8, rollout=ROLLOUT, folder=folder, **settings)
        if changes:
            one.pool.start(run_health_checks(one.pool))
        closing.extend([one.pool, made] if transport == "group" else [one.pool])
        return one

    yield engine
    for one in reversed(closing):
        one.close()


@functools.cache
def params_of(model, seed):
    return models.init(model, jax.random.key(seed))


@pytest.mark.parametrize("transport", ["http", "disk", "group"])
def test_greedy_text_and_log_probs_after_each_push_are_the_native_engines(make, launched, transport):
    engine, model = make(transport), launched[1]
    for version in (1, 2):
        params = params_of(model, version)
        assert engine.publish(params, version)["bridge/probe_mean_abs"] < 1e-4
        mine, theirs = engine.generate(requests(), GREEDY, KEY), native(params, GREEDY, model=model)
        for a, b in zip(mine, theirs, strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist() and a.finish == b.finish
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
            assert set(a.versions) == {version}
    assert not engine.check_logprobs(params, mine)


def test_sampled_log_probs_are_of_the_softmax_at_that_temperature(make, launched):
    engine, model = make(), launched[1]
    params = params_of(model, 3)
    engine.publish(params, 3)
    made = engine.generate(requests(tokens=24), SamplingConfig(temperature=0.7), KEY)
    assert len({tuple(t.response_ids.tolist()) for t in made}) > 3
    again = engine.generate(requests(tokens=24), SamplingConfig(temperature=0.7), KEY)
    assert ids(again) == ids(made)
    for t in made:
        said = score_of(model)(params, np.concatenate([t.prompt_ids, t.response_ids]), 0.7)
        start = len(t.prompt_ids) - 1
        np.testing.assert_allclose(t.logprobs, said[start : start + len(t.response_ids)], atol=1e-4)


@pytest.mark.parametrize("pause", ["retract", "abort"])
def test_responses_in_flight_continue_under_new_weights(make, launched, monkeypatch, pause):
    """Each token has the log-prob of the weights that its version names.

    The push has nothing left to do but to pause the server when the responses begin: what it does before
    (probe, gathering, writing) has taken longer than all of them on a busy machine.
    """
    engine, model = make(pause=pause), launched[1]
    engine.publish(params_of(model, 4), 4)
    sampling, newer = SamplingConfig(temperature=1.0, ignore_eos=True), params_of(model, 5)
    # More than the server runs at once; after the first the others have long to go.
    asked = [Request(r.prompt_ids, i, 1, 230 if i else 10) for i, r in enumerate(requests(12, 1) * 3)]
    transport, connected, started = engine.publisher.transport, threading.Event(), []
    connect, gather = transport.connect, transport.parts

    async def connect_and_tell(receiver):
        await connect(receiver)
        connected.set()

    def parts_amid_responses(params, label):
        parts = list(gather(params, label))
        assert connected.wait(60.0)
        started.append(engine.start(GenerationCall(asked, sampling, KEY)))
        until(lambda: any(response.ids for response in started[0].responses), 60.0)
        yield from parts

    monkeypatch.setattr(transport, "connect", connect_and_tell)
    monkeypatch.setattr(transport, "parts", parts_amid_responses)
    engine.publish(newer, 5)
    made = started[0].result()
    assert any(len(set(t.versions.tolist())) == 2 for t in made)
    for t, request in zip(made, asked, strict=True):
        assert len(t.response_ids) == request.max_tokens
        said = score_of(model)(newer, np.concatenate([t.prompt_ids, t.response_ids]))
        new = t.versions == 5
        np.testing.assert_allclose(t.logprobs[new], said[len(t.prompt_ids) - 1 :][new], atol=1e-4)


def test_conversations_are_those_of_the_native_engine(make, launched):
    engine, model = make(), launched[1]
    params = params_of(model, 6)
    theirs = NativeEngine(RolloutConfig(slots=4, chunk=8), model, one_device(), TOKENIZER)
    asked = [Request(p.ids, i, 1, 120) for i, p in enumerate(PROMPTS)]
    with Conversations(Script(), EnvConfig(name="x"), TOKENIZER, ChatConfig()) as made:

        def talk(engine):
            engine.publish(params, 6)
            if engine is theirs:
                return engine.generate(asked, GREEDY, KEY, made.dialogue(PROMPTS, KEY))
            return engine.start(GenerationCall(asked, GREEDY, KEY, made.dialogue(PROMPTS, KEY))).result()

        for a, b in zip(talk(engine), talk(theirs), strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist() and a.episode == b.episode
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_adapters_are_pushed_alone(make, launched):
    model = launched[1]
    engine = make(model=with_lora(model, LORA))
    for version in (1, 2):
        params = with_random_adapters(params_of(model, 0), LORA, version)
        assert engine.publish(params, version)["bridge/probe_mean_abs"] < 1e-3
        mine = engine.generate(requests(), GREEDY, KEY)
        assert ids(mine) == ids(native(params, GREEDY, model=params.config))


def test_a_refused_update_leaves_the_old_weights_and_the_server_goes_on(make, launched):
    engine, model = make(patience=30.0), launched[1]
    params = params_of(model, 7)
    engine.publish(params, 7)
    before = engine.generate(requests(), GREEDY, KEY)
    server = engine.pool.servers[0]
    ask = lambda route, body: engine.pool.run(engine.pool.request(server, route, body))
    for info, message in (
        ({"folder": "/nowhere"}, "has no safetensors files"),
        ({"tensors": "AAAA", "hashes": {"x": ""}}, "failed"),
    ):
        ask("/start_weight_update", {})
        with pytest.raises(ServerError, match=message):
            ask("/update_weights", {"update_info": info})
    assert ids(engine.generate(requests(), GREEDY, KEY)) == ids(before)
    assert engine.publish(params_of(model, 8), 8)["servers/usable"] == 1


@pytest.mark.parametrize("fault", ["killed", "hangs", "corrupt"])
def test_a_broken_broadcast_leaves_the_old_weights_and_the_next_push_makes_another_group(
    make, launched, fault
):
    """The relay is killed, or hangs, or sends other bytes; then a group is left open."""
    engine, model = make("group"), launched[1]
    engine.publish(params_of(model, 18), 1)
    before = scores_and_checksums(engine)
    transport, (server,) = engine.publisher.transport, engine.pool.servers
    relays, transport.timeout = transport._relays, 5.0
    relay = relays[server.url]
    if fault == "corrupt":
        send = relay.send
        relay.send = lambda parts: send([*parts[:-1], bytes(parts[-1])[::-1]])
    else:
        os.kill(relay._process.pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    message = {
        "killed": "process group|/update_weights",
        "hangs": "in 5 s .* was silent",
        "corrupt": "answered 500 to /update_weights",
    }
    with pytest.raises(ServerError, match=message[fault]):
        engine.publish(params_of(model, 19), 2)
    assert not relays
    transport.timeout = 60.0
    after = scores_and_checksums(engine)
    np.testing.assert_array_equal(before[0], after[0])
    assert before[1] == after[1]
    params = params_of(model, 20)
    assert engine.publish(params, 3)["servers/usable"] == 1
    assert ids(engine.generate(requests(), GREEDY, KEY)) == ids(native(params, GREEDY, model=model))
    relays[server.url].kill()
    assert make("group").publish(params_of(model, 21), 4)["servers/usable"] == 1


def scores_and_checksums(engine):
    """Log-probs of 199 tokens, and the server's own checksums of its parameters."""
    receiver = Receiver(engine.pool, engine.pool.servers[0])
    sums = engine.pool.run(receiver.request("/weight_checker", {"action": "checksum"}))
    return served_logprobs(engine, 200, UNTIED.vocab_size), sums


@pytest.mark.parametrize("transport", ["http", "group"])
def test_fifty_pushes_of_changes_leave_what_a_full_push_leaves(make, launched, transport):
    params = params_of(launched[1], 13)
    engine = make(transport, changes=True)
    assert engine.publish(params, 0)["bridge/full_pushes"] == 1
    for version in range(1, 51):
        params = one_percent_moved(params, version)
        metrics = engine.publish(params, version)
        assert metrics["bridge/full_pushes"] == 0 and metrics["bridge/sent_fraction"] < 0.05
        assert metrics["bridge/probe_mean_abs"] < 1e-4
    changed = scores_and_checksums(engine)
    other = make(transport)
    assert other.publish(params, 51)["bridge/sent_fraction"] == 1
    full = scores_and_checksums(other)
    np.testing.assert_array_equal(changed[0], full[0])
    assert changed[1] == full[1]


def test_refused_changes_leave_the_old_weights_and_all_of_them_follow(make, launched):
    """The first piece of a push whose trainer was killed then; and a server that is another process."""
    engine, params = make("http", changes=True, patience=60.0), params_of(launched[1], 14)
    engine.publish(params, 0)
    before = scores_and_checksums(engine)
    lost = next(engine.publisher.transport.parts(one_percent_moved(params, 1), "lost"))
    receiver = Receiver(engine.pool, engine.pool.servers[0], info={"weight_backend": vllm.BACKEND})
    ask = lambda work: engine.pool.run(work)
    ask(receiver.request("/start_weight_update", {}))
    ask(KINDS["vllm"].send_bucket(receiver, lost.content.changes, last=False, options={}))
    ask(receiver.request("/finish_weight_update", {}))
    after = scores_and_checksums(engine)
    np.testing.assert_array_equal(before[0], after[0])
    assert before[1] == after[1]
    engine.publisher.transport._label = "0-1"  # as if the push had not started: its changes are refused
    params = one_percent_moved(params, 2)
    metrics = engine.publish(params, 1)
    assert metrics["bridge/full_pushes"] == 1 and metrics["bridge/probe_mean_abs"] < 1e-4
    assert engine.publish(one_percent_moved(params, 3), 2)["bridge/full_pushes"] == 0


def test_a_tied_head_that_stays_behind_is_found(make, launched):
    if not launched[1].tie_embeddings:
        pytest.skip("the head is a tensor of its own")
    engine = make(encode=None)
    failed = []
    for version in (9, 10):
        try:
            engine.publish(params_of(launched[1], version), version)
        except ServerError as error:
            failed.append(str(error))
    assert failed and all("log-probs differ from the trainer's" in text for text in failed)


@pytest.mark.parametrize("transport", ["disk", "group"])
def test_a_killed_server_is_started_again_and_gets_the_weights(make, launched, transport):
    processes, model = launched
    engine = make(transport, patience=600.0)
    engine.publish(params_of(model, 11), 11)
    os.killpg(processes.processes[0].pid, signal.SIGKILL)
    processes.processes[0].wait()
    processes.wait()
    params = params_of(model, 12)
    assert engine.publish(params, 12)["servers/usable"] == 1
    assert ids(engine.generate(requests(), GREEDY, KEY)) == ids(native(params, GREEDY, model=model))


def test_a_call_without_the_right_key_is_refused_and_the_key_is_in_no_log(make, launched, monkeypatch):
    engine, params = make(), params_of(launched[1], 15)
    for key in ("", "wrong"):
        monkeypatch.setenv(auth.API_KEY, key)
        with pytest.raises(UserError, match=r"answered 401 to /v1/models: .*set JAXRL_SERVER_API_KEY"):
            engine.pool.check_reachable(lambda info: "")
        with pytest.raises(ServerError, match=r"no vLLM server can be used: .*set JAXRL_SERVER_API_KEY"):
            engine.publish(params, 15)
    monkeypatch.setenv(auth.API_KEY, API_KEY)
    engine.pool.check_reachable(lambda info: "")
    assert engine.publish(params, 16)["servers/usable"] == 1
    assert API_KEY not in launched[0].logs[0].read_text(errors="replace")


@pytest.mark.parametrize("policy", ["round_robin", "consistent_hash"])
def test_vllms_own_router_passes_requests_on(make, launched, tmp_path, policy):
    """vllm-router in front of the server: it gets the requests, and the server itself the weights."""
    router, model = Path(PYTHON).with_name("vllm-router"), launched[1]
    if not router.is_file():
        pytest.skip(f"no {router}")
    (port,) = free_ports(1)
    command = [router, "--port", str(port), "--worker-urls", *launched[0].urls, "--policy", policy]
    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or is_up(address, "/health"), 60.0)
        engine, params = make(router=address), params_of(model, 16)
        engine.pool.check_reachable(lambda info: "")
        engine.publish(params, 17)
        mine, theirs = engine.generate(requests(), GREEDY, KEY), native(params, GREEDY, model=model)
        assert ids(mine) == ids(theirs) and not engine.check_logprobs(params, mine)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


class Numbers:
    """A loader: prompt i is the tokens i + 2 and 3."""

    def batch(self, draw, size):
        numbers = range(draw * size, (draw + 1) * size)
        return [Prompt(Example(None, str(i)), np.array([i + 2, 3], np.int32), i) for i in numbers]

    def epochs(self, position):
        return {}


def test_over_sampling_trains_each_prompt_once_with_the_log_probs_of_its_weights(make, launched):
    """Four steps of three prompts, six in progress, each step of other weights; random tokens end them."""
    engine, model = make("http", changes=True), launched[1]
    ends = SamplingConfig(temperature=1.0, stop_tokens=(50,))

    def score(prompts, trajectories):
        for trajectory in trajectories:
            trajectory.reward, trajectory.components = 0.0, (0.0,)
        return {}

    source = RolloutSource(
        Numbers(), engine, score, grpo.Config(), ends, KEY,
        prompts=3, responses=4, max_tokens=200, max_staleness=2, oversample=2.0, steps=4,
    )  # fmt: skip
    params, steps = [params_of(model, 17)], []
    for step in range(4):
        steps.append(source.next(step, params[step], step, lambda name: contextlib.nullcontext()))
        params.append(one_percent_moved(params[step], step))
    # Of three groups that are carried over, each response counts; no token is older than two steps.
    assert [found.metrics["oversample/carried"] for found in steps] == [12, 12, 12, 0]
    assert max(found.metrics["staleness/max"] for found in steps) <= 2
    trained = [t for found in steps for t in found.trajectories]
    assert Counter(int(t.prompt_ids[0]) - 2 for t in trained) == dict.fromkeys(range(12), 4)
    assert any(len(set(t.versions.tolist())) > 1 for t in trained)
    for t in trained:
        newest = t.versions.max()
        said = score_of(model)(params[newest], np.concatenate([t.prompt_ids, t.response_ids]))
        new = t.versions == newest
        np.testing.assert_allclose(t.logprobs[new], said[len(t.prompt_ids) - 1 :][new], atol=1e-4)
