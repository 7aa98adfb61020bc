"""Adapters on a real SGLang server on a CPU, of the interpreter JAXRL_SGLANG_PYTHON."""

import json
import time

import numpy as np
import pytest
from lora_models import with_random_adapters
from real_sglang import MODEL, NEEDED, engine_on, started
from servers_shared import GREEDY, KEY, ids, native, one_device, requests, until, weights

from jaxrl_llm.bridge.adapters import lora_flags
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.errors import ServerError
from jaxrl_llm.learn.scoring import sequence_scorer
from jaxrl_llm.models import LoraConfig
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import GenerationCall, Request
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.train import main

pytestmark = NEEDED
LORA = LoraConfig(rank=8, alpha=16.0)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Of a server with the flags of a run."""
    folder = tmp_path_factory.mktemp("sglang")
    with started(folder, servers=1, more_flags=lora_flags(LORA, 3)) as launched:
        yield launched.urls[0]


@pytest.fixture
def make(url):
    pools = []

    def engine(lora=LORA, **settings):
        one = engine_of_adapters(url, lora, **settings)
        pools.append(one.pool)
        return one

    yield engine
    for pool in pools:
        pool.close()


def engine_of_adapters(url, lora, **settings):
    """An engine on the server, with a pool of its own."""
    source = WeightSource(MODEL, "float32", 40_000)
    return engine_on(
        [url], HttpTransport(source, KINDS["sglang"]), with_lora(MODEL, lora), timeout=120.0, **settings
    )


def adapted(seed, lora=LORA):
    return with_random_adapters(weights(model=MODEL), lora, seed)


def loaded(engine):
    """Names of the adapters on the server."""
    listed = engine.pool.run(engine.pool.request(engine.pool.servers[0], "/v1/models"))["data"]
    return {each["id"] for each in listed if each["parent"]}


PARTIAL = LoraConfig(rank=4, alpha=8.0, rank_stabilized=True, targets=("k_proj", "up_proj", "o_proj"))


@pytest.mark.parametrize("lora", [LORA, PARTIAL], ids=["all layers", "some, rank-stabilised"])
def test_text_and_log_probs_through_an_adapter_are_those_of_the_native_engine(make, lora):
    engine = make(lora)
    check_two_versions(engine, lora)
    assert loaded(engine) == {f"{engine.publisher.base}-1-1", f"{engine.publisher.base}-2-2"}


def check_two_versions(engine, lora):
    """Text and log-probs are those of the native engine."""
    for version in (1, 2):
        params = adapted(version, lora)
        metrics = engine.publish(params, version)
        print({name: float(f"{value:.3g}") for name, value in metrics.items()})
        assert metrics["bridge/probe_mean_abs"] < 1e-5
        mine = engine.generate(requests(), GREEDY, KEY)
        theirs = native(params, GREEDY, requests(), params.config)
        assert ids(mine) == ids(theirs) and {int(v) for t in mine for v in t.versions} == {version}
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize(("pause", "versions"), [("retract", {1}), ("abort", {1, 2})])
def test_requests_in_flight_keep_their_adapter_unless_they_are_aborted(make, pause, versions):
    """Meanwhile others get the new one; requests that were cut off do not keep theirs on the server."""
    engine = make(pause=pause)
    params = {version: adapted(version) for version in (1, 2, 3)}
    engine.publish(params[1], 1)
    rng = np.random.default_rng(1)
    todo = [Request(rng.integers(2, 120, 5).astype(np.int32), i, 1, 160) for i in range(3)]
    sampling = SamplingConfig(ignore_eos=True)
    pending = engine.start(GenerationCall(todo, sampling, KEY))
    until(lambda: engine.pool.servers[0].inflight == 3)
    time.sleep(0.2)
    assert engine.publish(params[2], 2)["bridge/probe_mean_abs"] < 1e-5
    mine = engine.generate(requests(), GREEDY, KEY)
    assert ids(mine) == ids(native(params[2], GREEDY, requests(), params[2].config))
    assert engine.pool.servers[0].inflight == 3
    score = sequence_scorer("float32", one_device())
    for t in pending.result():
        assert set(t.versions) == versions and (np.diff(t.versions) >= 0).all()
        tokens = np.concatenate([t.prompt_ids, t.response_ids])
        for version in versions:
            own = score(params[version], tokens)
            wrote = t.versions == version
            np.testing.assert_allclose(t.logprobs[wrote], own[4 : len(tokens) - 1][wrote], atol=1e-4)
    cut_off = engine.start(GenerationCall(todo, sampling, KEY))
    until(lambda: engine.pool.servers[0].inflight == 3)
    cut_off.future.cancel()
    engine.pool.run(leave_out(engine.pool.servers[0]))
    assert engine.publish(params[3], 3)["bridge/probe_mean_abs"] < 1e-5
    assert loaded(engine) == {f"{engine.publisher.base}-3-3"}


async def leave_out(server):
    server.leave_out(ServerError("tried out"))


def test_a_run_trains_adapters_with_log_probs_of_the_server(url, tmp_path):
    args = [
        *("--config", "grpo_tiny.py", "--steps", "2", "--warm_start.steps", "5", "--lora.rank", "8"),
        *("--model.architecture.mlp_size", "96", "--prompts_per_step", "8", "--responses_per_prompt", "4"),
        *("--optim.learning_rate", "1e-2", "--eval.prompts", "8", "--eval.every", "2", "--mesh.fsdp", "8"),
        *("--rollout.engine", "sglang", "--rollout.servers", url, "--rollout.slots", "8"),
        *("--log.progress", "none", "--log.tensorboard", "false", "--reward.workers", "1"),
        *("--run_dir", str(tmp_path / "run")),
    ]
    assert main(args) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train" and "mismatch/max_abs" in row]
    assert len(trained) == 2 and all(row["mismatch/max_abs"] < 1e-4 for row in trained)
    sizes = [row["rollout/publish_bytes"] for row in trained]
    assert sizes == [4 * 8 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96))] * 2  # the base went before
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()
