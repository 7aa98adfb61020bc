"""Faults of servers, and the reaction of the pool."""

import asyncio
import functools
import gzip
import json
import math
import time

import pytest
from aiohttp import web
from fake_sglang import FakeServer
from servers_shared import (
    GREEDY,
    KEY,
    MODEL,
    TOKENIZER,
    engine_for,
    ids,
    native,
    requests,
    until,
    weights,
)
from slow_cases import with_slow

from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.errors import InvalidReplyError, LostError, RefusedError, ServerError, UnreachableError
from jaxrl_llm.rollout.config import ServersConfig
from jaxrl_llm.rollout.servers import auth, client, health, launch
from jaxrl_llm.rollout.servers.health import ServerList, run_health_checks
from jaxrl_llm.rollout.servers.pool import MAX_LOST
from jaxrl_llm.rollout.servers.server import Server


@pytest.fixture(scope="module")
def servers():
    return [FakeServer(), FakeServer()]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(health, "CHECK_INTERVAL", 0.05)
    monkeypatch.setattr("jaxrl_llm.rollout.servers.server.FIRST_RETRY", 0.1)


@pytest.fixture
def make(servers, tmp_path):
    """make(**settings of ServersConfig) -> an engine on both servers, with health checks."""
    pools = []

    def engine(urls=None, members=None, checked=True, **settings):
        transport = DiskTransport(tmp_path / "weights", "float32", TOKENIZER)
        where = [s.url for s in servers] if urls is None else urls
        made = engine_for(where, transport, **{"timeout": 60.0, "patience": 20.0, **settings})
        pools.append(made.pool)
        if checked:
            made.pool.start(run_health_checks(made.pool, members))
        return made

    for server in servers:
        server.behave()
    yield engine
    for pool in pools:
        pool.close()
    for server in servers:
        server.behave()


@functools.cache
def expected(prompts=3, responses=2):
    """Greedy text of the native engine with the weights of seed 0."""
    return ids(native(weights(), GREEDY, requests(prompts, responses)))


def changed(**values):
    """An answer whose meta_info says something else."""
    return lambda said: {**said, "meta_info": {**said["meta_info"], **values}}


def pairs(edit):
    """An answer whose [log-prob, token] pairs were edited."""
    return lambda said: changed(output_token_logprobs=edit(said["meta_info"]["output_token_logprobs"]))(said)


BROKEN = {
    "500": lambda said: web.Response(status=500, text="out of order"),
    "html": lambda said: web.Response(text="<html>502 Bad Gateway</html>", content_type="text/html"),
    "truncated": lambda said: web.Response(text=json.dumps(said)[:60]),
    "empty": lambda said: web.Response(),
    "a list": lambda said: [said],
    "elsewhere": lambda said: web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"}),
    "no meta_info": lambda said: {"output_ids": said["output_ids"]},
    "no finish": changed(finish_reason=None),
    "unknown finish": changed(finish_reason={"type": "bored"}),
    "no log-probs": changed(output_token_logprobs=[]),
    "one too few": pairs(lambda said: said[:-1]),
    "NaN": pairs(lambda said: [[math.nan, *said[0][1:]], *said[1:]]),
    "null": pairs(lambda said: [[None, *said[0][1:]], *said[1:]]),
    "positive": pairs(lambda said: [[0.5, *said[0][1:]], *said[1:]]),
    "-inf": pairs(lambda said: [[-math.inf, *said[0][1:]], *said[1:]]),
    "no such token": lambda said: pairs(lambda p: [[-1.0, MODEL.vocab_size, None], *p[1:]])(
        {**said, "output_ids": [MODEL.vocab_size, *said["output_ids"][1:]]}
    ),
    "a word": lambda said: pairs(lambda p: [[-1.0, "a", None], *p[1:]])(
        {**said, "output_ids": ["a", *said["output_ids"][1:]]}
    ),
    "other tokens": lambda said: {**said, "output_ids": [x ^ 1 for x in said["output_ids"]]},
    "other count": changed(completion_tokens=99),
    "base weights": changed(weight_version="default"),
    "gaps": changed(weight_versions=[{"version": "1-1", "start": 0, "end": 1000}]),
    "endless spans": changed(
        weight_versions=[
            {"version": "1-1", "start": 0, "end": 10**12},
            {"version": "1-1", "start": 10**12, "end": 12},
        ]
    ),
    "the reply to another request": changed(id="somebody else's"),
    "the reply to another prompt": changed(prompt_tokens=99),
    "a log-prob that cannot be": pairs(lambda said: [[-200.0, *said[0][1:]], *said[1:]]),
    "a truth value": pairs(lambda said: [[False, *said[0][1:]], *said[1:]]),
    "too deep": lambda said: web.Response(text='{"meta_info": ' + "[" * 200_000),
    "too long": lambda said: web.Response(text=json.dumps({**said, "text": "x" * 2**21})),
    "compressed": lambda said: web.Response(
        body=gzip.compress(json.dumps(said).encode()), headers={"Content-Encoding": "gzip"}
    ),
    "meta_info of another type": lambda said: {**said, "meta_info": [said["meta_info"]]},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_answer_is_that_servers_failure_and_the_response_is_written_elsewhere(make, servers, kind):
    engine = make(checked=False)
    engine.publish(weights(), 1)
    servers[0].spoil = BROKEN[kind]
    mine = engine.generate(requests(prompts=2, responses=1), GREEDY, KEY)
    assert ids(mine) == expected(prompts=2, responses=1)
    assert [s.usable for s in engine.pool.servers] == [False, True]
    assert engine.pool.metrics()["servers/failures"] == 1 and engine.pool.retried >= 1


def test_a_reply_without_an_end_is_not_read_to_its_end():
    sent = []

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while len(sent) < 1000:
                await response.write(bytes(2**16))
                sent.append(1)
        except ConnectionError:
            pass
        return response

    async def request():
        app = web.Application()
        app.router.add_post("/generate", endless)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        mine, server = client.Client(20.0), Server(f"http://127.0.0.1:{runner.addresses[0][1]}")
        with pytest.raises(InvalidReplyError, match="a reply of more than 100,000 bytes"):
            await mine.request(server, "/generate", {}, max_bytes=100_000)
        await mine.close()
        await runner.cleanup()

    asyncio.run(request())
    assert len(sent) < 500  # of 65,536 bytes; what sockets hold goes besides


def test_what_one_server_refuses_another_one_may_take(make, servers, capsys):
    engine = make(checked=False)
    engine.publish(weights(), 1)
    servers[0].spoil = lambda said: web.Response(status=400, text="the prompt is too long")
    assert ids(engine.generate(requests(), GREEDY, KEY)) == expected()
    assert all(server.usable for server in engine.pool.servers) and engine.pool.retried >= 1
    assert "the prompt is too long" in capsys.readouterr().err


def test_what_every_server_refuses_ends_at_once_with_one_message(make, servers):
    engine = make(checked=False)
    engine.publish(weights(), 1)
    for server in servers:
        server.spoil = lambda said: web.Response(status=400, text="the prompt is too long")
    start = time.monotonic()
    each = r"http\S+ answered 400 to /generate: the prompt is too long"
    message = f"^every server refuses a request: {each}; {each}$"
    with pytest.raises(RefusedError, match=message):
        engine.generate(requests(prompts=1, responses=1), GREEDY, KEY)
    assert time.monotonic() - start < 10


def test_a_refused_request_waits_for_a_server_that_may_come_back(make, servers):
    engine = make()
    engine.publish(weights(), 1)
    servers[0].spoil = lambda said: web.Response(status=400, text="the prompt is too long")
    servers[1].down = True
    leave_out = engine.pool.servers[1].leave_out

    def restored(error):
        leave_out(error)
        servers[1].down = False

    engine.pool.servers[1].leave_out = restored
    todo = requests(prompts=1, responses=1)
    assert ids(engine.generate(todo, GREEDY, KEY)) == expected(prompts=1, responses=1)
    assert not servers[1].down


@pytest.mark.parametrize(
    ("route", "reply"),
    [
        ("/server_info", {"tp_size": "2"}),
        ("/server_info", {"tp_size": 10**9}),
        ("/generate", {"meta_info": []}),
        ("/generate", {"meta_info": {"weight_version": "1-1", "input_token_logprobs": [[10**400]] * 24}}),
        ("/update_weights_from_disk", {"success": "yes", "message": ["no"]}),
    ],
)
def test_nonsense_in_a_push_costs_one_server(make, servers, route, reply):
    engine = make(checked=False)
    servers[0].replies[route] = reply
    assert engine.publish(weights(), 1)["servers/usable"] == 1
    assert [server.usable for server in engine.pool.servers] == [False, True]


def test_broken_answers_everywhere_end_in_bounded_time_with_the_reason(make, servers):
    engine = make(retries=2)
    engine.publish(weights(), 1)
    for server in servers:
        server.spoil = BROKEN["NaN"]
    with pytest.raises(
        ServerError,
        match=r"a response failed 2 times \(--servers\.retries\): .*cannot be used: ValueError log-prob nan",
    ):
        engine.generate(requests(prompts=1, responses=1), GREEDY, KEY)


def test_an_idle_connection_is_not_used_again(monkeypatch):
    """The server closes it after 5 s, perhaps just when the next request is on its way."""
    assert client.KEEP_ALIVE < 5
    monkeypatch.setattr(client, "KEEP_ALIVE", 0.2)
    used = []

    async def answer(request):
        used.append(request.transport)
        return web.json_response({})

    async def ask_three_times():
        app = web.Application()
        app.router.add_post("/flush_cache", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        mine, server = client.Client(5.0), Server(f"http://127.0.0.1:{runner.addresses[0][1]}")
        for pause in (0, 0, 0.5):
            await asyncio.sleep(pause)
            await mine.request(server, "/flush_cache", {})
        await mine.close()
        await runner.cleanup()

    asyncio.run(ask_three_times())
    assert used[0] is used[1] and used[1] is not used[2]


@pytest.mark.parametrize("status", with_slow([429, 503], {503}))
def test_a_busy_server_is_asked_again_and_not_left_out(make, servers, status):
    engine = make(urls=[servers[0].url])
    engine.publish(weights(), 1)
    left = [status] * 3
    servers[0].spoil = lambda said: web.Response(status=left.pop()) if left else said
    todo = requests(prompts=1, responses=1)
    assert ids(engine.generate(todo, GREEDY, KEY)) == expected(prompts=1, responses=1)
    assert engine.pool.servers[0].failures == 0 and not left


def test_a_server_that_stays_busy_ends_the_wait(make, servers):
    engine = make(urls=[servers[0].url], patience=0.5)
    engine.publish(weights(), 1)
    servers[0].spoil = lambda said: web.Response(status=429, text="queue is full")
    with pytest.raises(ServerError, match="answered 429 to /generate: queue is full"):
        engine.generate(requests(prompts=1, responses=1), GREEDY, KEY)


def test_a_server_that_failed_comes_back_without_another_push(make, servers):
    engine = make()
    engine.publish(weights(), 1)
    servers[1].down = True
    assert ids(engine.generate(requests(), GREEDY, KEY)) == expected()
    server = engine.pool.servers[1]
    assert not server.usable and "answered 500" in server.problem
    servers[1].restart()  # with its base weights
    servers[1].down = False
    until(lambda: server.usable)
    assert servers[1].label == servers[0].label == "1-1" == server.label
    servers[0].down = True
    assert ids(engine.generate(requests(), GREEDY, KEY)) == expected()
    assert engine.pool.metrics()["servers/left_out_seconds"] > 0


def test_a_server_that_was_restarted_is_noticed_by_its_version_and_gets_the_weights_again(make, servers):
    engine = make(urls=[servers[0].url])
    engine.publish(weights(), 1)
    servers[0].spoil = BROKEN["base weights"]
    problems = []
    leave_out = engine.pool.servers[0].leave_out

    def noted(error):
        problems.append(str(error))
        servers[0].spoil = None
        leave_out(error)

    engine.pool.servers[0].leave_out = noted
    assert ids(engine.generate(requests(prompts=1), GREEDY, KEY)) == expected(prompts=1)
    assert problems and all("'default', which this run did not send" in problem for problem in problems)
    assert [path for path, _ in servers[0].calls].count("/update_weights_from_disk") == 2


def test_all_down_is_waited_for_with_a_word_and_then_goes_on(make, servers, capsys):
    engine = make(retries=3)
    engine.publish(weights(), 1)
    for server in servers:
        server.down = True
    wait = engine.pool._print_wait

    def print_and_restore(text):
        wait(text)
        for server in servers:
            server.down = False

    engine.pool._print_wait = print_and_restore
    assert ids(engine.generate(requests(), GREEDY, KEY)) == expected()
    said = capsys.readouterr().err
    assert "servers: no server can be used; waiting 20 s for one: http://127.0.0.1" in said
    assert said.count("no server can be used") == 1


def test_a_limit_that_is_a_setting_is_named_with_it(make, servers):
    engine = make(urls=[servers[0].url], checked=False, timeout=0.5)
    servers[0].hangs = True
    url = engine.pool.servers[0].url
    with pytest.raises(
        UnreachableError, match=rf"{url}: no answer to /health in 0.5 s \(--servers.timeout\)"
    ):
        engine.pool.run(engine.pool.request_bytes(engine.pool.servers[0], "/health"))
    with pytest.raises(UnreachableError, match=r"in 0.2 s$"):
        engine.pool.run(engine.pool.request_bytes(engine.pool.servers[0], "/health", timeout=0.2))


def test_an_address_that_is_given_twice_is_one_server(make, servers):
    engine = make(urls=[servers[0].url, f"{servers[0].url}/"], checked=False)
    assert engine.publish(weights(), 1)["servers/usable"] == 1
    assert [route for route, _ in servers[0].calls].count("/update_weights_from_disk") == 1


@pytest.mark.parametrize("publishes", with_slow([True, False], {True}))
def test_a_wait_for_servers_that_stay_away_ends_and_says_why(make, servers, publishes):
    engine = make(patience=1.0)
    engine.publish(weights(), 1)
    for server in servers:
        server.down = True
    start = time.monotonic()
    with pytest.raises(
        ServerError, match=r"no SGLang server can be used for 1 s \(--servers.patience\): .*500"
    ):
        if publishes:
            engine.publish(weights(1), 2)
        else:
            engine.generate(requests(), GREEDY, KEY)
    assert time.monotonic() - start < 10


def test_a_server_that_hangs_is_found_and_its_requests_go_elsewhere(make, servers, monkeypatch):
    monkeypatch.setattr(health, "QUIET_LIMIT", 0.3)
    monkeypatch.setattr(health, "HEALTH_TIMEOUT", 0.3)
    engine = make(timeout=300.0)
    engine.publish(weights(), 1)
    engine.generate(requests(), GREEDY, KEY)  # compiled
    servers[0].hangs = True
    start = time.monotonic()
    assert ids(engine.generate(requests(), GREEDY, KEY)) == expected()
    assert time.monotonic() - start < 30
    assert engine.pool.servers[0].failures == 1


WRONG_LINES = """http://10.0.0.1:1
http//oops
http://127.0.0.1:9
http://127.0.0.1:1?api_key=hidden
"""


def test_servers_join_and_leave_by_their_file(make, servers, tmp_path, capsys):
    file = tmp_path / "servers.txt"
    file.write_text(f"# the pool\n{servers[0].url}/\n")
    members = ServerList(file, "sglang")
    assert members() == [servers[0].url]
    engine = make(urls=members(), members=members)
    engine.publish(weights(), 1)
    file.write_text(f"{servers[0].url}\n{servers[1].url}  # new\n{WRONG_LINES}{servers[1].url}/\n")
    until(lambda: len(engine.pool.usable) == 2)
    assert servers[1].label == "1-1"
    file.write_text(servers[1].url)
    until(lambda: [s.url for s in engine.pool.servers] == [servers[1].url])
    before = len(servers[0].seen)
    assert ids(engine.generate(requests(), GREEDY, KEY)) == expected()
    assert len(servers[0].seen) == before
    file.unlink()
    time.sleep(0.3)
    assert len(engine.pool.usable) == 1
    said = capsys.readouterr().err
    assert engine.pool.metrics().items() >= {"servers/joined": 2, "servers/lost": 1}.items()
    for text in (
        "No such file",
        "http://10.0.0.1:1 is plain http to another host",
        "'http//oops' is no address",
        "a server is left out: http://127.0.0.1:9/server_info: ClientConnectorError",
        "the address of 127.0.0.1 holds a password or a parameter",
        f"{servers[1].url} is there twice",
    ):
        assert said.count(text) == 1, text
    assert "hidden" not in said


def test_a_list_that_is_read_while_it_is_written_changes_nothing(tmp_path):
    file = tmp_path / "servers.txt"
    file.write_text("http://127.0.0.1:1\n")
    members = ServerList(file, "sglang")
    assert members() == ["http://127.0.0.1:1"]
    file.write_text("")
    assert members() == ["http://127.0.0.1:1"]
    file.write_text("http://127.0.0.1:1\nhttp://127.0.0.1:2\n")
    assert members() == ["http://127.0.0.1:1"]
    assert members() == ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def test_servers_that_are_lost_do_not_count_as_tries_of_a_response(make, servers):
    """Five servers are killed while they work on it; the limit for failures of its own is 3."""
    engine = make(checked=False, retries=3)
    engine.publish(weights(), 1)
    generate_on, tried = engine.pool._generate_on, []

    async def killed_five_times(server, *args):
        tried.append(server)
        if len(tried) > limit:
            return await generate_on(server, *args)
        raise LostError(f"{server.url}: the connection is cut")

    engine.pool._generate_on = killed_five_times
    for server in engine.pool.servers:
        server.leave_out = lambda error: None
    limit, one = 5, requests(prompts=1, responses=1)
    assert ids(engine.generate(one, GREEDY, KEY)) == expected(prompts=1, responses=1)
    assert len(tried) == 6
    limit = 99
    with pytest.raises(ServerError, match="the connection is cut"):
        engine.generate(one, GREEDY, KEY)
    assert len(tried) == 6 + MAX_LOST + 2  # a request that ends each server ends the run


def test_a_router_gets_what_is_to_be_generated_and_the_servers_their_weights(make, servers):
    engine = make(urls=[servers[0].url], router=servers[1].url)
    params = weights()
    servers[1].engine = None
    make(urls=[servers[1].url]).publish(params, 1)  # what is behind the router
    engine.publish(params, 1)
    asked, down = len(servers[0].seen), [500] * 3
    servers[1].spoil = lambda said: web.Response(status=down.pop()) if down else said
    assert ids(engine.generate(requests(), GREEDY, KEY)) == expected()
    assert len(servers[0].seen) == asked
    groups = [headers.get("X-SMG-Routing-Key") for headers in servers[1].headers[-9:]]
    assert len(set(groups)) == 3 and len(groups) == 9 and engine.pool.retried == 0


def test_keys_come_from_the_environment_and_each_route_gets_its_own(make, servers, monkeypatch):
    for server in servers:
        server.keys = ("tell", "change")
    engine = make(patience=1.0)
    with pytest.raises(ServerError, match=r"answered 401 .*set JAXRL_SERVER_API_KEY and JAXRL_SERVER_A"):
        engine.publish(weights(), 1)
    monkeypatch.setenv(auth.API_KEY, "tell")
    monkeypatch.setenv(auth.ADMIN_KEY, "change")
    engine.publish(weights(1), 2)
    assert len(engine.generate(requests(), GREEDY, KEY)) == 6


@pytest.mark.parametrize(
    ("url", "key", "expected"),
    [
        ("http://127.0.0.1:1", "", ""),
        ("http://localhost:1", "", ""),
        ("http://[::1]:1", "", ""),
        ("http://10.0.0.1:1", "", "http://10.0.0.1:1 is plain http to another host, and there is no key"),
        ("http://10.0.0.1:1", "k", ""),
        ("https://10.0.0.1:1", "", ""),
        ("https://me:secret@host:1", "", "the address of host holds a password"),
        ("host:1", "", "'host:1' is no address"),
        ("http://host:what", "", "'http://host:what' is no address"),
    ],
)
def test_addresses_that_may_be_used(monkeypatch, url, key, expected):
    monkeypatch.setenv(auth.API_KEY, key)
    found = auth.address_problem(url)
    assert found.startswith(expected) and bool(found) == bool(expected) and "secret" not in found


def test_colocated_servers_rest_while_the_trainer_works(make, servers):
    engine, params = make(urls=[servers[0].url], colocated=True), weights()
    engine.publish(params, 1)
    engine.release_memory()
    engine.release_memory()
    servers[0].calls.append(("training", {}))
    assert engine.publish(params, 1)  # though they are the same: what the server had is gone
    assert ids(engine.generate(requests(), GREEDY, KEY)) == expected()
    memory = ("/update_weights", "/abort", "/flush", "/release", "/resume", "training")
    order = [(path, *body.get("tags", ())) for path, body in servers[0].calls if path.startswith(memory)]
    assert order == [
        ("/update_weights_from_disk",),
        ("/abort_request",),
        ("/flush_cache",),
        ("/release_memory_occupation", "kv_cache", "weights"),
        ("training",),
        ("/resume_memory_occupation", "weights"),
        ("/update_weights_from_disk",),
        ("/resume_memory_occupation", "kv_cache"),
    ]


def test_a_server_that_rests_is_not_woken_by_those_who_care_for_it(make, servers):
    engine = make(colocated=True)
    engine.publish(weights(), 1)
    servers[1].down = True
    engine.release_memory()
    assert not engine.pool.servers[1].usable
    servers[1].down = False
    time.sleep(0.5)
    assert not engine.pool.servers[1].usable
    engine.publish(weights(1), 2)
    assert len(engine.pool.usable) == 2


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ("--device cpu", {}, ""),
        ("", {}, "--servers.colocated needs the servers' share of memory"),
        (
            "--mem-fraction-static 0.4",
            {},
            "--servers.colocated: the servers' --mem-fraction",
        ),
        ("--mem-fraction-static=0.4", {"XLA_CLIENT_MEM_FRACTION": "0.5"}, ""),
        ("--mem-fraction-static=0.4", {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, ""),
        ("--mem-fraction-static 0.8", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, ""),
        ("--mem-fraction-static", {}, "--servers.flags: --mem-fraction-static is '': it must be above 0"),
        ("--mem-fraction-static lots", {}, "--servers.flags: --mem-fraction-static is 'lots': it must be"),
        ("--mem-fraction-static nan", {}, "--servers.flags: --mem-fraction-static is 'nan': it must be"),
        ("--mem-fraction-static 1", {}, "--servers.flags: --mem-fraction-static is '1': it must be above 0"),
        (
            "--mem-fraction-static 0.4",
            {"XLA_CLIENT_MEM_FRACTION": "1.0"},
            "--servers.colocated: the servers' --mem-fraction",
        ),
        (
            "--mem-fraction-static 0.4",
            {"XLA_CLIENT_MEM_FRACTION": "half"},
            "XLA_CLIENT_MEM_FRACTION is 'half' in the environment: it must be a number above 0 and",
        ),
    ],
)
def test_sizes_on_shared_gpus_must_fit_together(flags, environment, expected):
    found = list(launch.colocated_problems(ServersConfig(colocated=True, flags=flags), 1, environment))
    assert [text.startswith(expected) for text in found] == ([True] if expected else [])
    (alone,) = launch.colocated_problems(ServersConfig(flags="--device cpu"), 0, {})
    assert alone.endswith("set --rollout.launch N.")
