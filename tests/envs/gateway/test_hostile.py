"""Programs that play on while other clients send nonsense: no trajectory is lost or changed."""

import asyncio
import json
import random
import threading
import urllib.request

import pytest
from scripted import END, RUN, Program, ScriptedEngine, open_gateway

from jaxrl_llm.envs.gateway import session
from jaxrl_llm.envs.gateway.server import MAX_BODY, PROTOCOLS

HONEST, TURNS, CLIENTS = 4, 6, 8
HI = {"role": "user", "content": "hello"}
PATHS = [*PROTOCOLS, "/v1/models", "/reward", "/done", "/trajectories", "/health", "/nothing", "/%ff/../"]
NONSENSE = [
    b"", b"{", b"\xff\xfe{}", b"[]", b"null", b"NaN", b'"text"', b"[" * 50_000,
    b'{"a":' * 200 + b"1" + b"}" * 200, b'{"reward": true}', b'{"reward": 1' + b"0" * 400 + b"}",
    b'{"messages": "hi"}', b'{"messages": [null]}', b'{"messages": []}', b'{"messages": [{"role": 3}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\\u0000"}]}', b'{"prompt": [-1]}', b'{"prompt": [99999999]}',
    b'{"messages": [{"role": "assistant", "content": "hello"}]}', b'{"prompt": [1e400]}',
    b'{"prompt": [true]}', b'{"prompt": ""}', b'{"input": [{"type": []}]}', b'{"input": {}}',
    b'{"max_tokens": -1, "messages": [{"role": "user", "content": "x"}]}', 
    b'{"tools": [1], "messages": [{"role": "user", "content": "x"}]}', b'{"reward": 1e999}',
    b'{"messages": [{"role": "user", "content": "' + b"x " * 100_000 + b'"}], "stream": true}',
]  # fmt: skip
"""Bodies that every route refuses, even with the key of a trajectory (but for /done)."""


async def send_nonsense(port, keys, seed, number):
    """Send requests that are refused or broken off; return the statuses of the replies."""
    rng, statuses = random.Random(seed), []
    for _ in range(number):
        key = rng.choice([None, "", "no key", "\xff" * 9, "x" * 5000, *keys])
        path = rng.choice(PATHS)
        if path == "/done" and key in keys:
            path = "/reward"
        method = rng.choice(["POST"] * 5 + ["GET", "PUT", "DELETE", "NONSENSE", ""])
        body, kind = rng.choice(NONSENSE), rng.choice(["whole"] * 4 + ["cut", "huge", "chunks", "left"])
        length = {"cut": len(body) + 9, "huge": MAX_BODY + rng.choice([1, 1 << 40])}.get(kind, len(body))
        headers = f"Host: h\r\nContent-Length: {length}\r\nConnection: close\r\n"
        if kind == "chunks":
            headers, body = "Host: h\r\nTransfer-Encoding: chunked\r\n", b"zz\r\n" + body
        if key is not None:
            headers += f"{rng.choice(['Authorization: Bearer', 'x-api-key:'])} {key}\r\n"
        prefix = rng.choice(["", "/t/unknown", "/t/" + "y" * 3000])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = f"{method} {prefix}{path} HTTP/1.1\r\n{headers}\r\n".encode("latin-1")
            writer.write(head + body)
            await writer.drain()
            if kind in ("cut", "left"):
                await asyncio.sleep(0)
            else:
                reply = await asyncio.wait_for(reader.read(1 << 16), 20)
                statuses.append(int(reply.split()[1]) if reply else 0)
        except ConnectionError:  # it is closed before all of the body has been sent
            pass
        finally:
            writer.transport.abort() if kind in ("cut", "left") else writer.close()
    return statuses


def play(program, replies):
    """Play a conversation of several turns, the texts in `replies`."""
    messages = [HI]
    for number in range(TURNS):
        reply = program.call("/chat/completions", messages=messages, stream=False)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"go on {number}"}]
        replies.append(reply["choices"][0]["message"]["content"])
    program.finished.wait()
    program.done(reward=0.5)


def run(gateway, number):
    """Return (episode, text) of honest programs beside `number` requests of nonsense, and the statuses."""
    engine = ScriptedEngine(gateway, *(f"turn {i}{END}" for i in range(TURNS)), trajectories=HONEST)
    programs, said = [Program(gateway) for _ in range(HONEST)], [[] for _ in range(HONEST)]
    finished = threading.Event()
    for program in programs:
        program.finished = finished
    threads = [threading.Thread(target=play, args=pair) for pair in zip(programs, said, strict=True)]
    port, keys = int(gateway.server.address.rpartition(":")[2]), [program.key for program in programs]

    async def attack():
        tasks = [send_nonsense(port, keys, seed, number // CLIENTS) for seed in range(CLIENTS)]
        return [status for part in await asyncio.gather(*tasks) for status in part]

    for thread in threads:
        thread.start()
    try:
        statuses = asyncio.run(attack())
    finally:
        finished.set()
        for thread in threads:
            thread.join(30)
    assert said == [[f"turn {i}" for i in range(TURNS)]] * HONEST
    return [engine.result(i) for i in range(HONEST)], statuses


@pytest.mark.slow
def test_nonsense_changes_no_trajectory_and_leaves_nothing(monkeypatch):
    threads = set(threading.enumerate())
    with open_gateway(monkeypatch, seconds=60.0) as gateway:
        calm, _ = run(gateway, 0)
    with open_gateway(monkeypatch, seconds=60.0) as gateway:
        session_calls = []
        closing = gateway.close_session
        monkeypatch.setattr(
            gateway, "close_session", lambda s: (session_calls.append(len(s._calls)), closing(s))
        )
        beside, statuses = run(gateway, 10_000)
        with urllib.request.urlopen(f"{gateway.server.address}/health", timeout=10) as reply:
            assert json.load(reply) == {"status": "ok"}
        # Nothing is kept of refused requests.
        assert not gateway.server._by_key
        assert not gateway._waiting and not gateway._tasks
        assert session_calls == [TURNS] * HONEST
    assert beside == calm and RUN not in str(beside)
    assert statuses and {s for s in statuses if s >= 500} == set(), sorted(set(statuses))
    assert set(threading.enumerate()) <= threads | {t for t in threading.enumerate() if not t.is_alive()}


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_more_tools_than_the_context_holds_are_refused_before_they_are_rendered(monkeypatch, path):
    encode, encoded = session.encode_prompt, []
    monkeypatch.setattr(session, "encode_prompt", lambda *args: encoded.append(args) or encode(*args))
    function = lambda i: {"name": f"look_up_{i}", "description": "Looks something up.", "parameters": {}}
    tool = lambda i: {
        "type": "function",
        **(function(i) if path == "responses" else {"function": function(i)}),
    }
    said = {"input" if path == "responses" else "messages": [HI]}
    with open_gateway(monkeypatch) as gateway:
        engine, program = ScriptedEngine(gateway, f"hello{END}"), Program(gateway)
        status, reply = program.send(
            f"{program.base}/{path}", said | {"tools": list(map(tool, range(30_000)))}
        )
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        # 60,000 tokens each of prompt and response, none longer than 15 characters.
        assert "characters, and the run's limits hold 1,800,000" in reply["error"]["message"] and not encoded
        program.call(f"/{path}", **said, tools=list(map(tool, range(100))))
        program.done()
        assert engine.result()[0].turns == 1 and len(encoded) == 1
