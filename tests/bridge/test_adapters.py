"""Adapters to servers with SGLang's JSON: the base once, a name a version, probes that see what is wrong."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_sglang import FakeServer
from lora_models import with_random_adapters
from servers_shared import (
    GREEDY,
    KEY,
    MODEL,
    ROLLOUT,
    TOKENIZER,
    engine_for,
    ids,
    native,
    requests,
    until,
    weights,
)

from jaxrl_llm.bridge.adapters import fit_lora, lora_flags, server_problem
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.builders.engines import max_adapter_versions
from jaxrl_llm.errors import ServerError, UnreachableError, UserError
from jaxrl_llm.hf import export
from jaxrl_llm.models import LoraConfig, named_leaves
from jaxrl_llm.models.lora import add_adapters, with_lora
from jaxrl_llm.models.lora import base as adapter_base
from jaxrl_llm.rollout.config import RolloutConfig, ServersConfig
from jaxrl_llm.rollout.engine import GenerationCall
from jaxrl_llm.rollout.servers import auth
from jaxrl_llm.rollout.servers.commands import server_command
from jaxrl_llm.rollout.servers.health import run_health_checks
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.rollout.servers.validate import read_generated

pytest.importorskip("torch")  # the fake server reads as SGLang does
LORA = LoraConfig(rank=4, alpha=8.0)
ADAPTER_BYTES = 4 * 4 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
"""float32, rank 4, 2 layers: inputs + outputs of q and o, of k and v, of the three feed-forward layers."""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    shell = export.save_description(MODEL, tmp_path_factory.mktemp("shell"), dtype="float32")
    return [FakeServer(model_path=shell), FakeServer(model_path=shell)]


@pytest.fixture
def servers(both):
    """The two, as after a start."""
    for server in both:
        server.behave()
        server.restart()
        server.ranks, server.fails_at, server.open, server.paused = 1, "", False, False
        server.asked.clear()
    return both


@pytest.fixture
def make(servers, tmp_path):
    pools = []

    def engine(transport="disk", lora=LORA, urls=(), **settings):
        made = DiskTransport(tmp_path / "weights", "float32", TOKENIZER)
        if transport == "http":
            made = HttpTransport(WeightSource(MODEL, "float32", 12_000), KINDS["sglang"])
        urls = urls or [server.url for server in servers]
        settings = {"patience": 5.0, "timeout": 20.0} | settings
        one = engine_for(urls, made, with_lora(MODEL, lora), **settings)
        pools.append(one.pool)
        return one

    yield engine
    for pool in pools:
        pool.close()


def adapted(seed=0, lora=LORA):
    return with_random_adapters(weights(), lora, seed)


def expected(params, *args):
    return ids(native(params, GREEDY, requests(*args), params.config))


def routes(server):
    """Of weights, in order; each run of the same one once."""
    names = [name for name, _ in server.asked]
    return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


LOAD, UNLOAD = "load_lora_adapter_from_tensors", "unload_lora_adapter"


@pytest.mark.slow
def test_the_base_travels_once_and_each_version_is_an_adapter_that_every_request_names(make, servers):
    servers[1].ranks = 2
    engine = make("http")
    base_bytes = 4 * sum(leaf.size for leaf in jax.tree.leaves(weights()))
    for version, bytes_sent in ((5, base_bytes + ADAPTER_BYTES), (6, ADAPTER_BYTES), (7, ADAPTER_BYTES)):
        params = adapted(version)
        metrics = engine.publish(params, version)
        assert metrics["bridge/probe_mean_abs"] < 1e-5 and metrics["servers/usable"] == 2
        assert metrics["rollout/publish_bytes"] == bytes_sent
        made = engine.generate(requests(), GREEDY, KEY)
        assert ids(made) == expected(params) and {int(v) for t in made for v in t.versions} == {version}
    for server in servers:
        assert routes(server) == [
            "pause_generation", "begin_weight_update", "update_weights_from_tensor", "end_weight_update",
            "continue_generation", LOAD, UNLOAD, LOAD, UNLOAD,
        ]  # fmt: skip
        names = [body["lora_name"] for name, body in server.asked if name == LOAD]
        base = engine.publisher.base
        assert names == [f"{base}-test", f"{base}-5-1", f"{base}-6-2", f"{base}-7-3"]
        assert server.label == base and server.adapters.keys() == {f"{base}-6-2", f"{base}-7-3"}
        assert {body["lora_path"] for body in server.seen} == set(names)


def test_the_test_adapters_change_log_probs_by_more_than_the_tolerance(make):
    """The smallest ones change them by 1.2 nats here, which a tolerance of 0.5 takes for too little."""
    effects = []
    for tolerance in (0.1, 0.5):
        publisher = make(probe_tolerance=tolerance).publisher
        test = publisher._prepare_test(adapted())
        plain = publisher.publisher.make_probe(adapter_base(adapted()), "x").expected
        effects.append(float(np.abs(test.probe.expected - plain).mean()))
    assert 0.4 < effects[0] < 2.0 < effects[1]


@pytest.mark.slow
def test_the_same_adapters_are_not_sent_twice(make):
    engine, params = make(), adapted()
    engine.publish(params, 1)
    assert engine.publish(params, 1) == {}
    assert engine.publish(adapted(1), 2)["servers/usable"] == 2


def ignored(made):
    return None


def exchanged(made):
    rng = np.random.default_rng(9)
    return made._replace(
        tensors={name: 0.2 * rng.standard_normal(x.shape, np.float32) for name, x in made.tensors.items()}
    )


def scaled(made):
    """As a server that would take alpha / sqrt(r)."""
    return made._replace(tensors={n: x * (2 if "lora_B" in n else 1) for n, x in made.tensors.items()})


@pytest.mark.parametrize(
    "spoil", [*(pytest.param(one, marks=pytest.mark.slow) for one in (ignored, exchanged)), scaled]
)
def test_the_probe_sees_adapters_that_are_ignored_or_other_ones(make, servers, spoil):
    """Also with B = 0, as at the start of every run, when adapters change nothing: the test adapters do."""
    new = add_adapters(weights(), with_lora(MODEL, LORA), jax.random.key(1))
    assert not any(np.any(leaf) for name, leaf in named_leaves(new) if name.endswith("_lora_b"))
    servers[0].spoil_adapter = spoil
    engine = make()
    assert engine.publish(new, 1)["servers/usable"] == 1
    left = engine.pool.servers[0]
    assert not left.usable and "log-probs differ from the trainer's by" in left.problem
    servers[0].spoil_adapter = None
    assert engine.publish(adapted(), 2)["servers/usable"] == 2
    servers[1].spoil_adapter = spoil
    assert engine.publish(adapted(1), 3)["servers/usable"] == 1
    assert "weights, type or model code or adapters" in engine.pool.servers[1].problem


@pytest.mark.slow
def test_rank_stabilised_adapters_of_some_layers_compute_what_the_trainer_computes(make):
    lora = LoraConfig(rank=4, alpha=3.0, rank_stabilized=True, targets=("k_proj", "up_proj", "o_proj"))
    engine, params = make("http", lora), adapted(0, lora)
    assert engine.publish(params, 1)["bridge/probe_mean_abs"] < 1e-5
    assert ids(engine.generate(requests(), GREEDY, KEY)) == expected(params)


def test_what_sglang_can_read_of_adapters():
    lora = fit_lora(LoraConfig(rank=16, alpha=8.0, rank_stabilized=True, targets=("up_proj", "v_proj")))
    assert lora.alpha == 32.0 and lora.scale == 2.0 and not lora.rank_stabilized
    assert lora.targets == ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert fit_lora(LoraConfig(rank=3, alpha=0.1)).alpha == 0.1


def hold(engine, server):
    """Start responses of the first adapters, which wait after four tokens."""
    server.holds_after = 4
    pending = engine.start(GenerationCall(requests(2), GREEDY, KEY))
    until(lambda: server.held == sum(len(response) > 4 for response in expected(adapted(1), 2)) > 1)
    return pending


def check_versions(pending, version):
    """Four tokens are of the first adapters, which the request named; the next request names new ones."""
    for t, before in zip(pending.result(), expected(adapted(1), 2), strict=True):
        assert t.response_ids[:4].tolist() == before[:4] and set(t.versions[:4]) == {1}
        assert set(t.versions[4:]) <= {version}


def test_a_request_keeps_its_adapter_which_stays_until_no_request_uses_it(make, servers):
    engine = make(urls=[servers[0].url])
    engine.publish(adapted(1), 1)
    pending = hold(engine, servers[0])
    for version in (2, 3):
        engine.publish(adapted(version), version)  # pauses nothing: it would wait for the held ones
    name = lambda version: f"{engine.publisher.base}-{version}-{version}"
    assert servers[0].adapters.keys() == {name(1), name(2), name(3)}
    servers[0].holds_after = 0
    check_versions(pending, 3)
    engine.publish(adapted(4), 4)
    assert servers[0].adapters.keys() == {name(3), name(4)}


def test_aborted_responses_go_on_with_the_new_adapter(make, servers):
    engine = make(urls=[servers[0].url], pause="abort")
    engine.publish(adapted(1), 1)
    pending = hold(engine, servers[0])
    engine.publish(adapted(2), 2)
    servers[0].holds_after = 0
    check_versions(pending, 2)


def test_a_name_whose_load_had_no_known_outcome_is_not_loaded_twice(make, servers):
    """The server has loaded it, and answered 500: it comes back by the health checks, with the same name."""
    engine = make()
    engine.publish(adapted(1), 1)
    servers[0].fails_at = LOAD
    assert engine.publish(adapted(2), 2)["servers/usable"] == 1
    name = f"{engine.publisher.base}-2-2"
    assert name in servers[0].adapters
    servers[0].fails_at = ""
    left = engine.pool.servers[0]
    engine.pool.run(engine.pool.admit(left))
    assert left.usable and name in servers[0].adapters
    loads = [body["lora_name"] for route, body in servers[0].asked if route == LOAD]
    assert loads.count(name) == 2 and loads.count(f"{engine.publisher.base}-test") == 2


@pytest.mark.slow
def test_a_restarted_server_gets_the_base_and_the_adapters_again(make, servers):
    engine = make(urls=[servers[0].url])
    engine.pool.start(run_health_checks(engine.pool))
    params = adapted(1)
    engine.publish(params, 1)
    servers[0].restart()
    servers[0].asked.clear()
    made = engine.generate(requests(), GREEDY, KEY)
    assert ids(made) == expected(params) and engine.pool.servers[0].failures == 1
    assert routes(servers[0]) == [
        "pause_generation", "update_weights_from_disk", "continue_generation",
        UNLOAD, LOAD, UNLOAD, LOAD,  # what an earlier attempt may have left goes first
    ]  # fmt: skip


def test_in_requests_the_base_is_sent_again_only_to_the_server_that_lacks_it(make, servers):
    engine = make("http")
    engine.publish(adapted(1), 1)
    servers[0].restart()
    engine.pool.run(leave_out(engine.pool.servers[0]))
    for server in servers:
        server.asked.clear()
    engine.pool.run(engine.pool.admit(engine.pool.servers[0]))
    assert "waits for the next push" in engine.pool.servers[0].problem
    assert engine.publish(adapted(2), 2)["servers/usable"] == 2
    assert "update_weights_from_tensor" in routes(servers[0])
    assert routes(servers[1]) == [LOAD]


def test_for_a_server_that_is_down_the_base_is_not_gathered_in_every_push(make, servers):
    engine = make("http")
    engine.publish(adapted(1), 1)
    servers[0].down = True
    engine.pool.run(leave_out(engine.pool.servers[0], UnreachableError("down")))
    assert engine.publish(adapted(2), 2)["rollout/publish_bytes"] == ADAPTER_BYTES
    servers[0].down = False
    engine.pool.run(engine.pool.admit(engine.pool.servers[0]))  # as the health checks do: it replies again
    metrics = engine.publish(adapted(3), 3)
    assert metrics["rollout/publish_bytes"] > 2 * ADAPTER_BYTES and metrics["servers/usable"] == 2


def test_a_colocated_server_gets_the_base_in_every_step(make, servers):
    engine = make(urls=[servers[0].url], colocated=True)
    for version in (1, 2):
        engine.publish(adapted(version), version)
        assert ids(engine.generate(requests(), GREEDY, KEY)) == expected(adapted(version))
        engine.release_memory()
    order = [(path[1:], *body.get("tags", ())) for path, body in servers[0].calls]
    start = order.index(("release_memory_occupation", "kv_cache", "weights")) + 1
    assert [call for call in order[start:] if "server_info" not in call][:7] == [
        ("resume_memory_occupation", "weights"), ("pause_generation",), ("update_weights_from_disk",),
        ("continue_generation",), ("resume_memory_occupation", "kv_cache"), (UNLOAD,), (LOAD,),
    ]  # fmt: skip


async def leave_out(server, error=ServerError("tried out")):  # noqa: B008 - a constant
    server.leave_out(error)


def test_adapters_that_a_killed_run_left_are_unloaded(make, servers):
    make().publish(adapted(1), 1)
    (old,) = servers[0].adapters
    servers[0].adapters["of somebody else"] = servers[0].adapters[old]
    engine = make()
    engine.publish(adapted(2), 1)
    assert servers[0].adapters.keys() == {f"{engine.publisher.base}-1-1", "of somebody else"}


FITS = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"], "max_loras_per_batch": 3}


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (FITS, ""),
        (FITS | {"lora_target_modules": ["qkv_proj", "o_proj"]}, ""),
        (FITS | {"enable_lora": None}, "it was started without --enable-lora"),
        ({}, "it was started without --enable-lora"),
        (FITS | {"max_lora_rank": 4}, "its --max-lora-rank is 4"),
        (FITS | {"lora_target_modules": ["q_proj"]}, "its --lora-target-modules lack k_proj, v_proj"),
        (FITS | {"max_loras_per_batch": 2}, "its --max-loras-per-batch is 2, 3 are needed"),
        (FITS | {"max_loaded_loras": 3}, "its --max-loaded-loras is 3, 4 are needed"),
    ],
)
def test_a_server_that_cannot_take_the_adapters_is_named_with_the_flags(info, expected):
    lora = LoraConfig(rank=8, targets=("q_proj",))
    problem = server_problem(info, lora, max_versions=3)
    flags = (
        "--enable-lora --lora-strict-loading --max-lora-rank 8 --max-loras-per-batch 3 --lora-target-modules "
        "q_proj k_proj v_proj"
    )
    assert flags == " ".join(lora_flags(lora, 3))
    assert problem == (
        expected and f"cannot take adapters of --lora.rank 8: {expected}. Start it with {flags}"
    )


def test_servers_without_lora_are_refused_at_the_start_and_left_out_later(make, servers, monkeypatch):
    monkeypatch.setattr(servers[0], "lora_info", {"enable_lora": False})
    engine = make("http")
    with pytest.raises(UserError, match=rf"{servers[0].url} cannot take .* --enable-lora --lora-strict"):
        engine.pool.check_reachable(engine.publisher.problem)
    assert engine.publish(adapted(), 1)["servers/usable"] == 1
    assert "without --enable-lora" in engine.pool.servers[0].problem
    monkeypatch.setattr(servers[0], "lora_info", {"enable_lora": True, "max_lora_rank": "many"})
    with pytest.raises(UserError, match="an answer that cannot be used"):
        engine.pool.check_reachable(engine.publisher.problem)


def test_behind_a_router_requests_name_adapters_that_every_server_has(make, servers):
    engine = make(urls=[servers[0].url], router=servers[0].url)
    for version in (1, 2):
        params = adapted(version)
        engine.publish(params, version)
        assert ids(engine.generate(requests(), GREEDY, KEY)) == expected(params)


def test_each_route_gets_the_key_that_sglang_demands_there(make, servers, monkeypatch):
    """Of 0.5.21: tensors of adapters are a route for the API key, unloading one for the admin key."""
    keys = "tell-4711", "change-0815"
    monkeypatch.setenv(auth.API_KEY, keys[0])
    monkeypatch.setenv(auth.ADMIN_KEY, keys[1])
    assert auth.request_headers(f"/{LOAD}") == {"Authorization": f"Bearer {keys[0]}"}
    assert auth.request_headers(f"/{UNLOAD}") == {"Authorization": f"Bearer {keys[1]}"}
    for server in servers:
        server.keys = keys
    assert make().publish(adapted(), 1)["servers/usable"] == 2


@pytest.mark.parametrize(("flags", "more"), [("--device cpu", ["--lora-backend", "torch_native"]), ("", [])])
def test_launched_servers_get_the_flags(flags, more):
    flags_of_lora = lora_flags(LORA, 4)
    command = server_command(ROLLOUT, ServersConfig(flags=flags), Path("m"), 1, flags=flags_of_lora)
    assert command[-len([*flags_of_lora, *more, *flags.split()]) :] == [*flags_of_lora, *more, *flags.split()]
    assert "--lora-backend" not in server_command(ROLLOUT, ServersConfig(flags=flags), Path("m"), 1)
    assert (
        max_adapter_versions(RolloutConfig()) == 2
        and max_adapter_versions(dataclasses.replace(ROLLOUT, max_staleness=3)) == 5
    )


def test_the_base_decides_the_version_of_no_token():
    """All tokens have the version of the adapters that the request named; the reply's is that of the base."""
    reply = {
        "output_ids": [5, 6],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 5, None], [-1.0, 6, None]],
            "weight_versions": [{"version": "base", "start": 0, "end": 2}],
        },
    }
    body = {"rid": "r", "input_ids": [1], "sampling_params": {"max_new_tokens": 4}, "lora_path": "base-7-1"}
    read = functools.partial(
        read_generated, label="base-7-1", versions={"base-7-1": 7}, model=MODEL, base="base"
    )
    assert read(reply, body).versions == [7, 7]
    reply["meta_info"]["weight_versions"][0]["version"] = "default"
    with pytest.raises(ValueError, match="generated with weights 'default', which this run did not send"):
        read(reply, body)
