"""Faults of real SGLang servers on a CPU (JAXRL_SGLANG_PYTHON), which require keys."""

import dataclasses
import os
import signal
import socket
import subprocess
import threading
import time

import jax
import numpy as np
import pytest
from aiohttp import web
from proxy import Proxy
from real_sglang import MODEL, NEEDED, PYTHON, engine_on, started
from servers_shared import KEY, TOKENIZER, native
from test_servers import BROKEN

from jaxrl_llm import models
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.errors import ServerError
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.servers import auth, health
from jaxrl_llm.rollout.servers.health import ServerList, run_health_checks
from jaxrl_llm.rollout.servers.launch import DIRECT

pytestmark = NEEDED
KEYS = {auth.API_KEY: "tell-me-4711", auth.ADMIN_KEY: "change-it-0815"}
GREEDY = SamplingConfig(temperature=0.0, ignore_eos=True)
BACK = 240.0  # seconds that a server may take to start on a busy machine


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(engine, launched): two servers of our own."""
    folder = tmp_path_factory.mktemp("sglang")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in KEYS.items():
            environment.setenv(name, value)
        with started(folder, patience=BACK, restarts=9) as launched:
            engine = engine_on(launched.urls, disk(folder), patience=BACK)
            yield engine, launched
            engine.pool.close()


def disk(folder):
    return DiskTransport(folder / "weights", "float32", TOKENIZER)


@pytest.fixture
def between(run, tmp_path):
    """(engine, proxies): an engine that reaches the two servers through proxies."""
    proxies = [Proxy(url) for url in run[1].urls]
    engine = engine_on([proxy.url for proxy in proxies], disk(tmp_path), patience=BACK)
    engine.publish(models.init(MODEL, jax.random.key(0)), 7)
    yield engine, proxies
    engine.pool.close()
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def tended(run):
    """Health checks run during the test; both servers are in use before and after it."""
    engine, launched = run
    future = engine.pool.start(run_health_checks(engine.pool, None, launched.restart))
    engine.publish(models.init(MODEL, jax.random.key(0)), 7)
    until(lambda: len(engine.pool.usable) == 2)
    yield engine, launched
    until(lambda: len(engine.pool.usable) == 2)
    future.cancel()


def until(true):
    deadline = time.monotonic() + BACK
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_healthy(router):
    """SGLang's router knows /health, but not the /model_info of its servers."""
    try:
        with DIRECT.open(f"{router}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def kill(launched, index):
    """End a server with its children, at once."""
    os.killpg(launched.processes[index].pid, signal.SIGKILL)
    launched.processes[index].wait()


def requests(prompts=4, responses=4, tokens=120):
    rng = np.random.default_rng(1)
    return [
        Request(rng.integers(2, 120, 5 + i).astype(np.int32), i, responses, tokens) for i in range(prompts)
    ]


def written(engine, todo):
    """All of it, whole, by the newest weights alone, and as the native engine writes it."""
    made = engine.generate(todo, GREEDY, KEY)
    params = models.init(MODEL, jax.random.key(0))
    for mine, theirs in zip(made, native(params, GREEDY, todo, MODEL), strict=True):
        assert mine.response_ids.tolist() == theirs.response_ids.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)
    assert {version for one in made for version in one.versions.tolist()} == {7}
    return made


def test_keys_are_asked_for_and_neither_ps_nor_the_logs_show_them(tended, monkeypatch):
    engine, launched = tended
    commands = subprocess.run(["ps", "axww", "-o", "command"], capture_output=True, text=True).stdout
    assert "sglang.launch_server" in commands
    for log in launched.logs:
        assert "'api_key': '***'" in log.read_text()
        assert not any(key in commands + log.read_text() for key in KEYS.values())
    monkeypatch.setenv(auth.ADMIN_KEY, "guessed")
    with pytest.raises(ServerError, match=r"answered 401 to /(pause_generation|update_weights)"):
        engine.publish(models.init(MODEL, jax.random.key(0)), 7)
    monkeypatch.delenv(auth.API_KEY)
    assert not launched.is_up(launched.urls[0])
    monkeypatch.undo()


def test_a_server_that_is_killed_while_it_writes_costs_nothing_and_comes_back(tended):
    engine, launched = tended
    victim = engine.pool.servers[0]

    def strike():
        until(lambda: victim.inflight)
        time.sleep(0.05)  # a quick server answers all of them in half a second
        kill(launched, 0)

    striking = threading.Thread(target=strike)
    striking.start()
    made = written(engine, requests())
    striking.join()
    assert len(made) == 16 and victim.failures and engine.pool.retried
    until(lambda: victim.usable)  # started again with other weights, and given the newest
    assert engine.pool.metrics()["servers/left_out_seconds"] > 0
    written(engine, requests(tokens=8))


def test_a_server_that_was_restarted_unseen_is_noticed_and_given_the_weights(run):
    engine, launched = run
    engine.publish(models.init(MODEL, jax.random.key(0)), 7)
    kill(launched, 1)
    launched.processes[1] = launched._start(1)
    until(lambda: launched.is_up(launched.urls[1]))
    server, problems = engine.pool.servers[1], []
    leave_out = server.leave_out
    server.leave_out = lambda error: (problems.append(str(error)), leave_out(error))
    checks = engine.pool.start(run_health_checks(engine.pool, None, launched.restart))
    written(engine, requests(tokens=16))
    del server.leave_out
    assert "generated with weights 'default', which this run did not send" in problems[0]
    until(lambda: server.usable)
    written(engine, requests(tokens=16))
    checks.cancel()


def test_all_are_killed_and_come_back(tended, capsys):
    engine, launched = tended
    for index in range(2):
        kill(launched, index)
    assert len(written(engine, requests(tokens=16))) == 16
    said = capsys.readouterr().err
    assert "servers: no server can be used; waiting 240 s for one" in said and "was started again" in said


def test_turns_on_shared_memory_are_taken_in_an_order_that_servers_accept(tended):
    """On a CPU nothing is freed: that the order works is all that is seen here."""
    engine, _ = tended
    engine.servers = dataclasses.replace(engine.servers, colocated=True)
    params = models.init(MODEL, jax.random.key(0))
    for _ in range(2):
        engine.release_memory()
        assert all(server.released == {"kv_cache", "weights"} for server in engine.pool.servers)
        engine.publish(params, 7)
        assert not any(server.released for server in engine.pool.servers)
        written(engine, requests(tokens=8))
    engine.servers = dataclasses.replace(engine.servers, colocated=False)


@pytest.mark.parametrize("kind", [kind for kind in BROKEN if kind not in ("base weights", "elsewhere")])
def test_a_broken_answer_costs_its_server_its_place_and_nothing_else(between, kind):
    engine, proxies = between
    proxies[0].spoil = BROKEN[kind]
    written(engine, requests(prompts=2, responses=1, tokens=8))
    assert [server.usable for server in engine.pool.servers] == [False, True]
    assert engine.pool.retried >= 1


def test_a_busy_server_is_asked_again(between):
    engine, proxies = between
    left = [503, 429, 503]
    for proxy in proxies:
        proxy.spoil = lambda said: web.Response(status=left.pop()) if left else said
    written(engine, requests(prompts=2, responses=1, tokens=8))
    assert not left and len(engine.pool.usable) == 2


def test_a_server_that_hangs_is_found_and_its_requests_go_elsewhere(between, monkeypatch):
    monkeypatch.setattr(health, "QUIET_LIMIT", 3.0)
    monkeypatch.setattr(health, "HEALTH_TIMEOUT", 3.0)
    engine, proxies = between
    checks = engine.pool.start(run_health_checks(engine.pool))
    proxies[0].hangs = True
    began = time.monotonic()
    written(engine, requests(tokens=8))
    assert time.monotonic() - began < BACK
    assert engine.pool.servers[0].failures == 1
    proxies[0].hangs = False
    until(lambda: len(engine.pool.usable) == 2)
    checks.cancel()


def test_servers_join_and_leave_by_their_file(between, tmp_path):
    engine, proxies = between
    file = tmp_path / "servers.txt"
    file.write_text(proxies[0].url)
    checks = engine.pool.start(run_health_checks(engine.pool, ServerList(file, "sglang")))
    until(lambda: [server.url for server in engine.pool.usable] == [proxies[0].url])
    written(engine, requests(tokens=8))
    file.write_text(f"{proxies[0].url}\n{proxies[1].url}  # joins\n")
    until(lambda: len(engine.pool.usable) == 2)
    file.write_text(proxies[1].url)
    until(lambda: [server.url for server in engine.pool.servers] == [proxies[1].url])
    written(engine, requests(tokens=8))
    checks.cancel()


def test_a_router_of_sglangs_own_shares_out_what_is_to_be_generated(run, tmp_path):
    urls = run[1].urls
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *urls, "--policy", "round_robin", "--api-key", KEYS[auth.API_KEY]]
    with (tmp_path / "router.log").open("wb") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    engine = engine_on(urls, disk(tmp_path), patience=BACK, router=address)
    try:
        until(lambda: router.poll() is not None or is_healthy(address))
        assert router.poll() is None, (tmp_path / "router.log").read_text()
        engine.publish(models.init(MODEL, jax.random.key(0)), 7)
        written(engine, requests(tokens=8))
    finally:
        engine.pool.close()
        os.killpg(router.pid, signal.SIGTERM)
        router.wait()
