"""The pool on vLLM servers: a fake one with the traps of the real one (docs/servers.md)."""

import base64
import copy
import dataclasses
import hashlib
import json
import os
import signal
import sys

import numpy as np
import pytest
from fake_vllm import FakeVLLM, cut
from lora_models import with_random_adapters
from safetensors.numpy import load
from servers_shared import GREEDY, KEY, MODEL, TOKENIZER, engine_for, ids, native, requests, until, weights
from slow_cases import with_slow

from jaxrl_llm.bridge import vllm
from jaxrl_llm.bridge.adapters import PREFIX
from jaxrl_llm.bridge.buckets import Bucket, WeightSource
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.bridge.transports.process_group import GroupTransport
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import RefusedError, ServerError, UserError
from jaxrl_llm.hf.names import hf_tensors
from jaxrl_llm.learn.config import RoutingConfig
from jaxrl_llm.models import LoraConfig
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.recipe.rules_recipe import RECIPE
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig, ServersConfig
from jaxrl_llm.rollout.engine import GenerationCall
from jaxrl_llm.rollout.servers import auth
from jaxrl_llm.rollout.servers.commands import server_command, server_environment, write_plugin
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.rollout.servers.launch import free_ports

KIND = KINDS["vllm"]
TIED = dataclasses.replace(MODEL, tie_embeddings=True)
ROLLOUT = RolloutConfig(engine="vllm", servers=("http://127.0.0.1:1",))
LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))


@pytest.fixture(scope="module")
def both():
    return [FakeVLLM(TIED), FakeVLLM(TIED)]


@pytest.fixture
def make(both, tmp_path):
    """make(transport, ...) -> an engine on both servers, which are as after a start."""
    closing = []

    def engine(transport="disk", model=TIED, encode=vllm.with_tied_head, urls=(), **settings):
        settings = {"patience": 0.0, "timeout": 60.0} | settings
        made = DiskTransport(tmp_path / "weights", "float32", TOKENIZER, encode)
        if transport != "disk":
            source = WeightSource(TIED, "float32", 12_000, encode)
            made = HttpTransport(source, KIND)
        if transport == "group":
            pytest.importorskip("torch")
            made = GroupTransport(source, KIND, python=sys.executable, timeout=settings["timeout"])
        urls = urls or [server.url for server in both]
        one = engine_for(urls, made, model, rollout=ROLLOUT, folder=tmp_path / "adapters", **settings)
        closing.extend([one.pool, made] if transport == "group" else [one.pool])
        return one

    for server in both:
        server.behave()
        server.plugin, server.max_model_len = True, 10**6
    yield engine
    for one in reversed(closing):
        one.close()


@pytest.mark.parametrize(
    ("transport", "plugin"),
    [
        ("http", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("group", True), ("disk", True), ("disk", False))
        ),
    ],
)
def test_it_writes_what_the_native_engine_writes_after_each_push(make, both, transport, plugin):
    for server in both:
        server.plugin = plugin
    engine = make(transport)
    for version in (1, 2):
        params = weights(version, TIED)
        metrics = engine.publish(params, version)
        assert metrics["bridge/probe_mean_abs"] < 1e-5 and metrics["servers/usable"] == 2
        mine, theirs = engine.generate(requests(), GREEDY, KEY), native(params, GREEDY, model=TIED)
        for a, b in zip(mine, theirs, strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist() and a.finish == b.finish
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
            assert set(a.versions) == {version}
    for server in both:
        assert not server.ignored and not server.paused and not server.active
        assert {query["mode"] for route, query, _ in server.calls if route == "/pause"} == {"keep"}


def test_a_key_that_is_missing_or_wrong_is_found_at_the_start(make, both, monkeypatch):
    """Before anything is sent: the routes for weights would take it without a key."""
    both[1].key = "right"
    engine = make()
    for key in ("", "wrong"):
        monkeypatch.setenv(auth.API_KEY, key)
        with pytest.raises(UserError, match=r"answered 401 to /v1/models: .*set JAXRL_SERVER_API_KEY"):
            engine.pool.check_reachable(lambda info: "")
    assert not any(route == "/pause" for route, *_ in both[1].calls)
    monkeypatch.setenv(auth.API_KEY, "right")
    engine.pool.check_reachable(lambda info: "")
    assert engine.publish(weights(1, TIED), 1)["servers/usable"] == 2


def test_the_probe_finds_a_tied_head_that_a_push_left_behind(make, both):
    """vLLM answers 200, moves the label and computes with the head of the push before."""
    for server in both:
        server.plugin = False
    engine = make(encode=None)
    with pytest.raises(ServerError, match=r"no vLLM server can be used: .*differ from the trainer's"):
        engine.publish(weights(1, TIED), 1)
    assert {server.label for server in both} == {"1-1"}


def test_a_server_that_failed_an_update_is_used_once_it_has_the_weights_and_a_probe(make, both):
    engine = make("http", patience=30.0)
    engine.publish(weights(1, TIED), 1)
    both[0].breaks_update = True
    assert engine.publish(weights(2, TIED), 2)["servers/usable"] == 1
    assert engine.pool.describe().count("answered 500 to /update_weights") == 1 and not both[0].paused
    assert engine.publish(weights(3, TIED), 3)["servers/usable"] == 2


def test_the_probe_finds_a_fused_layer_of_which_a_part_arrived(make, both):
    """vLLM fuses q, k and v: without k it keeps the old k beside the new q and v, and answers 200."""
    engine = make("http")
    engine.publish(weights(1, TIED), 1)
    both[1].drops = "0.self_attn.k_proj.weight"
    assert engine.publish(weights(2, TIED), 2)["servers/usable"] == 1
    assert both[1].label == both[0].label and "differ from the trainer's" in engine.pool.describe()
    assert {t.server for t in engine.generate(requests(), GREEDY, KEY)} == {both[0].url}


def test_an_engine_that_an_update_ended_is_left_out(make, both):
    for server in both:
        server.plugin = False
    engine = make()
    engine.publish(weights(1, TIED), 1)
    both[1].breaks_update = True
    assert engine.publish(weights(2, TIED), 2)["servers/usable"] == 1
    assert both[1].dead
    assert len(engine.generate(requests(), GREEDY, KEY)) == 6


def test_a_session_and_a_pause_that_a_killed_trainer_left_are_ended(make, both):
    for server in both:
        server.active = server.paused = True
    assert make("http").publish(weights(1, TIED), 1)["servers/usable"] == 2
    assert not any(server.active or server.paused for server in both)


@pytest.mark.parametrize("transport", with_slow(["http", "group"], {"group"}))
def test_weights_in_requests_and_groups_need_the_plugin(make, both, transport):
    for server in both:
        server.plugin = False
    with pytest.raises(ServerError, match="takes no weights in requests: start it with the plugin"):
        make(transport).publish(weights(1, TIED), 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's making
@pytest.mark.parametrize(
    ("signal_", "problem"), [(signal.SIGKILL, ""), (signal.SIGSTOP, "it was silent in its process group")]
)
def test_a_group_that_ends_or_hangs_is_one_servers_problem(make, both, signal_, problem):
    engine = make("group")
    assert engine.publish(weights(1, TIED), 1)["servers/usable"] == 2
    transport = engine.publisher.transport
    relays, transport.timeout = transport._relays, 3.0
    os.kill(relays[both[0].url]._process.pid, signal_)
    assert engine.publish(weights(2, TIED), 2)["servers/usable"] == 1
    assert not engine.pool.servers[0].usable and problem in engine.pool.describe()
    assert list(relays) == [both[1].url] and both[1].label == "2-2"
    assert not both[0].paused and both[0].label == "1-1"
    transport.timeout = 60.0
    assert engine.publish(weights(3, TIED), 3)["servers/usable"] == 2
    transport.close()
    assert not relays and [server.model.group for server in both] == [None, None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_server_that_cannot_reach_the_relays_port_is_left_out_with_the_reason(make, both, monkeypatch):
    engine = make("group", timeout=25.0)
    transport, join = engine.publisher.transport, KIND.join_group
    (closed,) = free_ports(1)

    async def join_at_closed_port(receiver, group):
        await join(receiver, group | {"master_port": closed} if receiver.server.url == both[0].url else group)

    monkeypatch.setattr(transport, "kind", copy.copy(KIND))
    monkeypatch.setattr(transport.kind, "join_group", join_at_closed_port)
    transport.timeout = 20.0  # of which the relays need some to import torch
    assert engine.publish(weights(1, TIED), 1)["servers/usable"] == 1
    assert (
        f"{both[0].url}: in 20 s (--servers.timeout) it did not join the process group at 127.0.0.1. The "
        "server's host must be able to connect to any port"
    ) in engine.pool.describe()
    assert list(transport._relays) == [both[1].url] and not both[0].paused


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_servers_whose_trainer_was_killed_or_that_are_other_processes_join_another_group(make, both):
    lost = make("group")
    lost.publish(weights(1, TIED), 1)
    for relay in lost.publisher.transport._relays.values():
        relay.kill()
    engine = make("group")
    assert engine.publish(weights(2, TIED), 1)["servers/usable"] == 2
    both[0].behave()
    assert engine.publish(weights(3, TIED), 2)["servers/usable"] == 2


def test_a_response_that_the_server_cut_without_a_word_is_refused(make, both):
    engine = make()
    engine.publish(weights(1, TIED), 1)
    for server in both:
        server.max_model_len = 12
    with pytest.raises(RefusedError, match=r"for length after .* of 12 tokens, .*--max-model-len of vLLM"):
        engine.generate(requests(), GREEDY, KEY)


def test_a_snapshot_aborts_all_requests_and_they_continue(make, both):
    engine = make()
    params = weights(1, TIED)
    engine.publish(params, 1)
    for server in both:
        server.held_back = 3
    pending = engine.start(GenerationCall(requests(), GREEDY, KEY))
    until(lambda: sum(server.waiting for server in both) == 6)
    for server in both:
        server.held_back = 0
    (copies,) = engine.snapshot([pending])
    assert max(len(copy.ids) for copy in copies) == 3
    assert ids(pending.result()) == ids(native(params, GREEDY, model=TIED))
    assert all("request_ids" not in body for s in both for route, _, body in s.calls if "abort" in route)


@pytest.mark.slow
def test_adapters_are_folders_which_requests_name_and_unused_ones_are_removed(make, both, tmp_path):
    engine = make(model=with_lora(TIED, LORA))
    for version in (1, 2, 3):
        params = with_random_adapters(weights(0, TIED), LORA, version)
        assert engine.publish(params, version)["bridge/probe_mean_abs"] < 1e-4
        mine = engine.generate(requests(), GREEDY, KEY)
        assert ids(mine) == ids(native(params, GREEDY, model=params.config))
        assert {v for t in mine for v in t.versions.tolist()} == {version}
    names = [server.model.adapters.keys() for server in both]
    assert names[0] == names[1] and len(names[0]) <= 2 and next(iter(names[0])).startswith(PREFIX)
    assert len(list((tmp_path / "adapters").iterdir())) <= 3
    assert sum(route == "/update_weights" for route, _, _ in both[0].calls) == 1  # the base


def test_unsuitable_servers_are_named_at_the_start(make, both):
    both[1].logprobs_mode = "raw_logprobs"
    with pytest.raises(UserError, match=r"reports raw_logprobs\. Start it with --logprobs-mode processed"):
        make().pool.check_reachable(lambda info: "")
    big = dataclasses.replace(LORA, rank=40)
    both[1].logprobs_mode = "processed_logprobs"
    engine = make(model=with_lora(TIED, big))
    with pytest.raises(UserError, match="--enable-lora --max-lora-rank 64 --max-loras 2 --max-cpu-loras 3"):
        engine.pool.check_reachable(engine.publisher.problem)


# -- forms


def test_a_request_gives_every_setting_and_a_reply_is_read_back():
    sampling = {"temperature": 0.7, "top_k": -1, "max_new_tokens": 5, "stop": ["x"], "sampling_seed": 9}
    body = {"input_ids": [3, 4], "sampling_params": sampling, "rid": "r", "extra_key": "7", "lora_path": "a"}
    asked = KIND.request_of(body)
    assert asked["sampling_params"] == {
        "max_tokens": 5, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop": ["x"], "stop_token_ids": [],
        "include_stop_str_in_output": True, "ignore_eos": False, "skip_special_tokens": False, "seed": 9,
        "logprobs": 0,
    }  # fmt: skip
    del asked["sampling_params"]
    assert asked == {"token_ids": [3, 4], "request_id": "r", "cache_salt": "7", "model": "a"}
    choice = {
        "finish_reason": "stop", "token_ids": [5, 6],
        "weight_versions": [{"version": "1", "start": 0, "end": 2}],
        "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -2.0}]},
    }  # fmt: skip
    reply = {
        "request_id": "generate-tokens-r", "choices": [choice],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2},
    }  # fmt: skip
    read = KIND.reply_of(reply, body)
    assert read["output_ids"] == [5, 6] and read["meta_info"] == {
        "id": "r", "prompt_tokens": 2, "completion_tokens": 2, "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.0, 5], [-2.0, 6]], "weight_versions": choice["weight_versions"],
    }  # fmt: skip
    cut(reply, 0)
    assert KIND.reply_of(reply, body)["meta_info"]["output_token_logprobs"] == []


def test_a_bucket_is_a_safetensors_file():
    tensors = [t for t in hf_tensors(MODEL) if t.name.endswith(("q_proj.weight", "norm.weight"))]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(tensor.shape).astype(np.float32) for tensor in tensors]
    packed = json.loads(b"{" + KIND.pack(Bucket(tensors, arrays, "float32")) + b"}")
    read = load(base64.b64decode(packed["tensors"]))
    assert read.keys() == packed["hashes"].keys() == {tensor.name for tensor in tensors}
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(read[tensor.name], array)
        assert packed["hashes"][tensor.name] == hashlib.sha256(array.tobytes()).hexdigest()


def test_the_head_is_sent_as_the_embedding():
    made = vllm.with_tied_head(hf_tensors(TIED))
    assert made[-1].name == "lm_head.weight" and made[-1].parts == (("embed", ()),)
    assert len(made) == len(hf_tensors(TIED)) + 1


# -- start, keys, rules


def test_a_server_is_started_on_loopback_with_the_plugin_and_its_key_in_the_environment(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(auth.API_KEY, "hidden")
    command = server_command(ROLLOUT, ServersConfig(flags="--max-num-seqs 2"), tmp_path, 7, flags=["--x"])
    line = " ".join(command)
    assert "hidden" not in line and "--host 127.0.0.1 --port 7" in line and line.endswith("--max-num-seqs 2")
    assert '--weight-transfer-config {"backend": "jaxrl"}' in line and "--enable-scale-out" in line
    assert "--logprobs-mode processed_logprobs" in line and "--generation-config vllm" in line
    monkeypatch.setenv("PYTHONPATH", "there")
    environment = server_environment("vllm", write_plugin(tmp_path / "plugin"))
    assert environment["VLLM_API_KEY"] == "hidden" and environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["PYTHONPATH"] == f"{tmp_path}/plugin:there"
    entry = (tmp_path / "plugin/jaxrl_vllm-1.dist-info/entry_points.txt").read_text()
    assert entry == "[vllm.general_plugins]\njaxrl = jaxrl_vllm_plugin:register\n"
    assert "def register()" in (tmp_path / "plugin/jaxrl_vllm_plugin.py").read_text()
    assert server_environment("sglang", tmp_path) == {"PYTHONPATH": f"{tmp_path}:there"}
    assert "def load(" in (tmp_path / "plugin/jaxrl_sglang_loader.py").read_text()
    assert "class Shadow" in (tmp_path / "plugin/jaxrl_delta.py").read_text()
    assert "def join_group(" in (tmp_path / "plugin/jaxrl_relay.py").read_text()


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://127.0.0.1:1", True), ("http://localhost:1", True), ("http://10.0.0.7:1", True),
        ("https://vllm.example", True), ("http://8.8.8.8:1", False), ("http://vllm.example:1", False),
        ("HTTP://8.8.8.8:1", False),
    ],
)  # fmt: skip
def test_addresses_that_anyone_reaches_are_refused_though_there_is_a_key(url, good, monkeypatch):
    monkeypatch.setenv(auth.API_KEY, "k")
    assert (auth.address_problem(url, "vllm") == "") == good


@pytest.mark.parametrize(
    ("servers", "more", "message"),
    [
        ({"transport": "ipc"}, {}, "--servers.transport ipc is not for vLLM: set disk, http or group"),
        ({"quantization": "fp8"}, {}, "--servers.quantization fp8 is not for vLLM"),
        ({"pause": "in_place"}, {}, "--servers.pause in_place: vLLM computes all keys again"),
        ({"colocated": True}, {}, "--servers.colocated is not for vLLM"),
        ({}, {"routing": RoutingConfig(replay="rollout")}, "--routing.replay rollout is not for vLLM"),
        (
            {},
            {"rollout": dataclasses.replace(ROLLOUT, sampling=SamplingConfig(top_p=0.9))},
            "vLLM reports log-probs after these filters",
        ),
    ],
)
def test_the_recipe_names_what_vllm_has_not(servers, more, message):
    config = TrainConfig(**{"rollout": ROLLOUT, "servers": ServersConfig(**servers)} | more)
    (rule,) = (rule for rule in RECIPE if rule.problems.__name__ == "_vllm_has_it")
    assert any(message in problem for problem in rule.problems(config))
    assert not list(rule.problems(dataclasses.replace(config, rollout=RolloutConfig())))


@pytest.mark.slow
def test_changes_over_a_group_are_for_vllm():
    servers = ServersConfig(transport="group", push="delta")
    (rule,) = (rule for rule in RECIPE if rule.problems.__name__ == "_vllm_has_it")
    config = TrainConfig(rollout=ROLLOUT, servers=servers)
    assert not list(rule.problems(config))
    (problem,) = rule.problems(
        dataclasses.replace(config, rollout=dataclasses.replace(ROLLOUT, engine="sglang"))
    )
    assert "--servers.push delta with --servers.transport group is for vLLM: set http" in problem
