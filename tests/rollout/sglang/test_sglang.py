"""The SGLang engine against a server that speaks its JSON, and (where there is one) against a real one."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_sglang import FakeServer

from jaxrl_llm import models
from jaxrl_llm.bridge.transports import disk
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import ServerError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.scorer import make_scorer
from jaxrl_llm.rollout.config import RolloutConfig, SGLangConfig
from jaxrl_llm.rollout.engine import Request, SamplingConfig
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.sglang.engine import SGLangEngine
from jaxrl_llm.rollout.sglang.launch import Launched
from jaxrl_llm.rollout.sglang.pool import ServerPool
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh

TOKENIZER = make_tokenizer()
MODEL = TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, max_position=128,
)  # fmt: skip
KEY = jax.random.key(3)
GREEDY = SamplingConfig(temperature=0.0)


@pytest.fixture(scope="module")
def servers():
    return [FakeServer(), FakeServer()]


@pytest.fixture
def make(servers, tmp_path):
    """make(**settings of SGLangConfig) -> an engine on both servers, which behave again."""
    pools = []

    def engine(urls=None, model=MODEL, **settings):
        config = SGLangConfig(**settings)
        pools.append(ServerPool(urls or [s.url for s in servers], config.timeout, config.retries, slots=4))
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        scorer = make_scorer(model, 1.0, "float32", mesh)
        score = lambda params, ids: np.asarray(scorer(params, ids[None], np.array([len(ids)])))[0, :-1]
        transport = DiskTransport(tmp_path / "weights", "float32", TOKENIZER)
        rollout = RolloutConfig(engine="sglang", servers=("http://x",))
        return SGLangEngine(
            rollout, config, model, pools[-1], transport, score, lambda value: value, TOKENIZER
        )

    for server in servers:
        server.behave()
    yield engine
    for pool in pools:
        pool.close()


def weights(seed=0, model=MODEL):
    return models.init(model, jax.random.key(seed))


def requests(prompts=3, responses=2, tokens=12):
    rng = np.random.default_rng(0)
    return [
        Request(rng.integers(2, 90, 4 + i).astype(np.int32), i, responses, tokens) for i in range(prompts)
    ]


def native(params, sampling, todo=None, model=MODEL):
    engine = NativeEngine(
        RolloutConfig(slots=4), model, make_mesh(MeshConfig(), jax.devices()[:1]), TOKENIZER
    )
    engine.publish(params, 0)
    return engine.generate(todo or requests(), sampling, KEY)


def test_it_writes_what_the_native_engine_writes(make):
    engine, params = make(), weights()
    metrics = engine.publish(params, version=5)
    assert metrics["bridge/probe_mean_abs"] < 1e-5
    assert metrics["rollout/publish_bytes"] == 4 * sum(w.size for w in jax.tree.leaves(params))
    mine, theirs = engine.generate(requests(), GREEDY, KEY), native(params, GREEDY)
    assert len(mine) == len(theirs) == 6
    for a, b in zip(mine, theirs, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert (a.prompt_index, a.response_index, a.finish, a.text) == (
            b.prompt_index, b.response_index, b.finish, b.text
        )  # fmt: skip
        assert set(a.versions) == {5} and a.mask.all()


def test_each_sample_has_a_seed_of_its_own_that_nothing_else_changes(make, servers):
    engine = make()
    engine.publish(weights(), 1)
    engine.generate(requests(), SamplingConfig(), KEY)
    seeds = lambda: sorted(b["sampling_params"]["sampling_seed"] for s in servers for b in s.seen[1:])
    everything = seeds()
    assert len(set(everything)) == 6
    for server in servers:
        del server.seen[1:]
    engine.generate(requests()[1:2], SamplingConfig(), KEY)
    assert set(seeds()) < set(everything)


def test_a_group_stays_on_one_server_and_both_work(make, servers):
    engine = make()
    engine.publish(weights(), 1)
    engine.generate(requests(prompts=2, responses=3), SamplingConfig(), KEY)
    prompts = [{tuple(body["input_ids"]) for body in server.seen[1:]} for server in servers]
    assert all(len(each) == 1 for each in prompts) and prompts[0] != prompts[1]


def test_the_same_weights_are_not_sent_twice_and_other_ones_are(make, servers):
    engine, params = make(), weights()
    assert engine.publish(params, 1) and not engine.publish(params, 1)
    first = servers[0].label
    assert engine.publish(weights(1), 1)  # the version does not tell: weight noise keeps it
    assert servers[0].label != first


def test_a_server_with_other_weights_is_left_out_and_comes_back(make, servers):
    engine = make()
    engine.publish(weights(0), 1)
    servers[1].deaf = True
    engine.publish(weights(1), 2)
    assert [s.usable for s in engine.pool.servers] == [True, False]
    assert "log-probs differ from the trainer's by" in engine.pool.servers[1].problem
    engine.generate(requests(), GREEDY, KEY)
    assert len(servers[1].seen) == 2  # the probes alone
    servers[1].deaf = False
    engine.publish(weights(2), 3)
    assert all(s.usable for s in engine.pool.servers)


def test_no_server_that_took_the_weights_is_an_error_that_says_why(make, servers):
    engine = make()
    for server in servers:
        server.refuses = True
    with pytest.raises(ServerError, match=r"no SGLang server can be used: http.*did not take.*no room"):
        engine.publish(weights(), 1)


def test_a_server_that_fails_is_left_out_and_its_responses_are_written_elsewhere(make, servers):
    engine, params = make(), weights()
    engine.publish(params, 1)
    servers[0].down = True
    mine, theirs = engine.generate(requests(), GREEDY, KEY), native(params, GREEDY)
    assert [t.response_ids.tolist() for t in mine] == [t.response_ids.tolist() for t in theirs]
    assert not engine.pool.servers[0].usable and engine.pool.retried >= 1
    servers[1].down = True
    with pytest.raises(ServerError, match="answered 500"):
        engine.generate(requests(), GREEDY, KEY)


def test_a_response_that_is_broken_off_goes_on_where_it_stopped(make, servers):
    engine, params = make(urls=[servers[0].url]), weights()
    engine.publish(params, 1)
    todo = requests(prompts=1, responses=1)
    servers[0].breaks_after = 2
    (mine,), (theirs,) = engine.generate(todo, GREEDY, KEY), native(params, GREEDY, todo)
    assert len(theirs.response_ids) > 2
    assert mine.response_ids.tolist() == theirs.response_ids.tolist()
    np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)
    assert mine.finish == theirs.finish and len(mine.versions) == len(mine.response_ids)


def test_tokens_of_weights_that_were_not_sent_are_refused(make, servers):
    engine = make(urls=[servers[0].url])
    engine.publish(weights(), 1)
    servers[0].label = "somebody else's"
    with pytest.raises(ServerError, match="which this run did not send"):
        engine.generate(requests(prompts=1), GREEDY, KEY)


def test_a_server_that_does_not_answer_is_left_out_in_time(make):
    engine = make(urls=["http://127.0.0.1:9"], timeout=5.0)
    with pytest.raises(ServerError, match=r"127.0.0.1:9/server_info: ClientConnectorError"):
        engine.publish(weights(), 1)


def test_the_last_two_pushes_are_kept(make, tmp_path):
    engine = make()
    for version in range(3):
        engine.publish(weights(version), version)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1-2", "2-3"]


def test_a_value_head_is_not_sent(make):
    model = dataclasses.replace(MODEL, value_head=True)
    engine = make(model=model)
    assert engine.publish(weights(model=model), 1)["bridge/probe_mean_abs"] < 1e-5


def test_a_folder_in_memory_is_new_and_those_of_killed_runs_go(tmp_path, monkeypatch):
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(disk, "MEMORY", memory)
    ended = subprocess.Popen(["true"])
    ended.wait()
    (memory / f"jaxrl_llm_{ended.pid}_x").mkdir()
    (memory / f"jaxrl_llm_{os.getpid()}_y").mkdir()
    (memory / "somebody_elses").mkdir()
    found = disk.own_folder(True, tmp_path / "run", size=1)
    assert found.parent == memory and found.is_dir()
    names = {path.name for path in memory.iterdir()} - {found.name}
    assert names == {f"jaxrl_llm_{os.getpid()}_y", "somebody_elses"}
    assert disk.own_folder(True, tmp_path / "run", size=1 << 60) == tmp_path / "run/weights"
    assert disk.own_folder(False, tmp_path / "run", size=1) == tmp_path / "run/weights"


STUB = str(Path(__file__).parent / "stub")


def launch(tmp_path, count=1, **settings):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = RolloutConfig(engine="sglang", launch=count)
    return Launched(config, SGLangConfig(**settings), model, tmp_path / "logs")


def test_launched_servers_answer_log_and_are_gone_after(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", STUB)
    launched = launch(tmp_path, flags="--tp 1")
    try:
        launched.wait()
        assert "the fake server is up" in launched.logs[0].read_text()
    finally:
        launched.close()
    assert launched.processes[0].poll() is not None


def test_a_server_that_cannot_start_is_an_error_with_its_log(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    launched = launch(tmp_path, python=sys.executable)
    with pytest.raises(ServerError, match=r"(?s)server ended with 1; .*sglang_0.log ends:.*sglang"):
        launched.wait()
    launched.close()


def test_servers_end_with_a_run_that_is_killed(tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import time\n"
        "from test_sglang import launch\n"
        "print(launch(Path(sys.argv[2])).processes[0].pid, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": STUB}
    words = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    run = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    server = int(run.stdout.readline())
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    ended = lambda: not Path(f"/proc/{server}").exists() or "Z" in status.read_text().split()[2]
    status, deadline = Path(f"/proc/{server}/stat"), time.monotonic() + 10
    while not ended() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended()
