"""The adapters of examples/adapters, against servers with the traps of the real ones."""

import asyncio
import dataclasses
import functools
import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from scripted import ScriptedEngine, open_gateway

ADAPTERS = Path(__file__).parents[3] / "examples/adapters"
sys.path.append(str(ADAPTERS))
import gateway_worker  # noqa: E402
import harbor_player  # noqa: E402
import nemo_gym_player  # noqa: E402
import openenv_player  # noqa: E402


class Policy(gateway_worker.RemoteTrajectory):
    """A trajectory whose turns are given; none is left = a limit of the run."""

    def __new__(cls, turns, **row):
        made = object.__new__(cls)
        object.__setattr__(made, "turns", list(turns))
        object.__setattr__(made, "asked", [])
        return made

    def __init__(self, turns, **row):
        super().__init__("http://x/v1", "key", row)

    async def generate(self, path, body):
        self.asked.append(json.loads(json.dumps(body)))
        if not self.turns:
            raise gateway_worker.LimitError
        turn = self.turns.pop(0)
        if path == "/v1/responses":
            return {"id": "r", "status": "completed", "output": turn}
        turn = {"content": turn} if isinstance(turn, str) else turn
        return {"choices": [{"message": {"role": "assistant", **turn}}]}


def served(routes, play):
    """Return what `play(address)` returns while a server has these routes."""

    async def main():
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await play(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


# OpenEnv: a counter in each connection; "add" adds and rewards, "crash" and "leave" end it.

FIELDS = {"metadata": {"type": "object"}, "word": {"$ref": "#/$defs/Word"}}
SCHEMA = {"action": {"$defs": {"Word": {"type": "string", "enum": ["add"]}}, "properties": FIELDS}}


def openenv_server(full=0, reset_reply=None):
    left = [full]

    async def schema(request):
        return web.json_response(SCHEMA)

    async def connect(request):
        socket, count = web.WebSocketResponse(), 0
        await socket.prepare(request)
        if left[0]:
            left[0] -= 1
            await socket.close(code=1000)
            return socket
        async for message in socket:
            message = json.loads(message.data)
            word = message["data"].get("word")
            if message["type"] == "reset":
                assert message["data"]["seed"] >= 0
                data = {"observation": {"count": 0, "done": False}, "reward": None, "done": False}
                await socket.send_json(reset_reply or {"type": "observation", "data": data})
            elif word == "add":
                count += 1
                data = {"observation": {"count": count}, "reward": 0.5, "done": count == 2}
                await socket.send_json({"type": "observation", "data": data})
            elif word == "leave":
                await socket.close(code=1011)
            else:
                code = "EXECUTION_ERROR" if word == "crash" else "VALIDATION_ERROR"
                await socket.send_json({"type": "error", "data": {"message": f"not {word}", "code": code}})
        return socket

    return [web.get("/schema", schema), web.get("/ws", connect)]


def play_openenv(policy, **server):
    return served(openenv_server(**server), lambda url: openenv_player.OpenEnvServer(url, "").play(policy))


def test_an_openenv_episode_is_one_connection_and_the_sum_of_its_rewards():
    """The server is full twice, a wrong action goes on, and None is no reward."""
    policy = Policy(["add", "subtract", " add\n"], messages=[{"role": "system", "content": "count"}])
    assert play_openenv(policy, full=2) == 1.0
    said = [message["content"] for message in policy.asked[-1]["messages"]]
    assert said == ["count", "0", "add", "1", "subtract", "error: not subtract"]
    assert play_openenv(Policy(["add"])) == 0.5  # the run's limit
    assert play_openenv(Policy([])) is None


@pytest.mark.parametrize(
    ("turns", "server", "reason"),
    [
        (["add", "crash"], {}, "step 2: error .*EXECUTION_ERROR"),
        (["leave"], {}, "step 1: closed .*1011"),
        ([], {"reset_reply": {"type": "error", "data": {"code": "FACTORY_ERROR"}}}, "reset: error .*FACTORY"),
        ([], {"reset_reply": {"hello": 1}}, "KeyError 'type'"),
    ],
)
def test_an_openenv_episode_that_breaks_has_no_reward(turns, server, reason):
    with pytest.raises(gateway_worker.EpisodeError, match=reason):
        play_openenv(Policy(turns), **server)


def test_a_server_that_is_down_has_no_reward():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for play in (
        openenv_player.OpenEnvServer(url, "").play,
        functools.partial(nemo_gym_player.play_row, url),
    ):
        with pytest.raises(gateway_worker.EpisodeError, match="ClientConnectorError"):
            asyncio.run(play(Policy([], responses_create_params={"input": "hi"})))


# NeMo Gym: the session is a cookie; tools count, /verify rewards the count.


def nemo_gym_server(kind="/verify", masked=False, status=200):
    counts = {}

    async def seed(request):
        reply = web.json_response({"observation": "go"})
        counts[name := str(len(counts))] = 0
        reply.set_cookie("session", name)
        return reply

    async def add(request):
        if (await request.json()).get("by") != 1:
            return web.json_response({"detail": "by must be 1"}, status=422)
        counts[request.cookies["session"]] += 1
        return web.json_response({"ok": True}, status=status)

    async def end(request):
        body = await request.json()
        reward = counts[request.cookies["session"]] + 10 * len(body["response"]["output"])
        more = {"mask_sample": masked, "failure_reason": "the judge is down"}
        step = {"terminated": reward > 10, "truncated": False, "info": more}
        counts[request.cookies["session"]] += 1
        return web.json_response({"reward": reward, "task": body["task"], **more, **step})

    async def openapi(request):
        return web.json_response({"paths": {kind: {}}})

    posts = {"/seed_session": seed, "/reset": seed, "/add": add, "/verify": end, "/step": end}
    return [web.get("/openapi.json", openapi), *(web.post(path, do) for path, do in posts.items())]


def item(name, **arguments):
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": json.dumps(arguments)}


ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}
ROW = {"task": 7, "responses_create_params": {"input": "hi", "tools": [{"type": "function", "name": "add"}]}}


def play_nemo_gym(turns, **server):
    policy = Policy(turns, **ROW)
    return served(nemo_gym_server(**server), lambda url: nemo_gym_player.play_row(url, policy)), policy


def test_nemo_gym_tools_and_verification_share_a_session():
    """Two calls count; one with wrong arguments does not, nor one of /verify, which is no tool of the row."""
    turns = [[item("add", by=1), item("add", by=2)], [item("verify")], [item("add", by=1), ANSWER], [ANSWER]]
    reward, policy = play_nemo_gym(turns)
    assert reward == 2 + 10 * 10  # 6 items of the policy, and 4 outputs
    outputs = [i["output"] for i in policy.asked[-1]["input"] if i.get("type") == "function_call_output"]
    assert outputs == [
        '{"ok": true}',
        '{"detail": "by must be 1"}',
        '{"error": "no such tool"}',
        '{"ok": true}',
    ]
    assert play_nemo_gym([[ANSWER], [ANSWER]], kind="/step")[0] == 10 + 11


def test_a_masked_sample_and_a_broken_tool_have_no_reward():
    with pytest.raises(gateway_worker.EpisodeError, match="masked by the server: the judge is down"):
        play_nemo_gym([[ANSWER]], masked=True)
    with pytest.raises(gateway_worker.EpisodeError, match="masked"):
        play_nemo_gym([[ANSWER]], masked=True, kind="/step")
    with pytest.raises(gateway_worker.EpisodeError, match="add: 500"):
        play_nemo_gym([[item("add", by=1)]], status=500)
    with pytest.raises(gateway_worker.EpisodeError, match="not of NeMo Gym"):
        asyncio.run(nemo_gym_player.play_row("http://x", Policy([])))


# Harbor


def make_task(folder, test, dockerfile="FROM ubuntu:24.04\n\nWORKDIR /app\nCOPY . .\n"):
    files = {
        "task.toml": "[verifier]\ntimeout_sec = 20.0\n",
        "instruction.md": "Write 42.",
        "tests/test.sh": test,
    }
    for name, text in {**files, "environment/Dockerfile": dockerfile, "environment/given": "4"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


def shell(command):
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"content": "", "tool_calls": [{"id": "c", "function": function}]}


def play_harbor(turns, task):
    policy = Policy(turns, task=task)
    return asyncio.run(harbor_player.play_task(policy)), policy


def test_a_harbor_task_without_docker(tmp_path):
    """Commands share /app and see neither tests nor an earlier reward; the tests give the reward."""
    task = make_task(tmp_path, 'test "$(cat /app/answer)" = 42 && echo .5 > /logs/verifier/reward.txt')
    turns = [
        shell("cat given; ls / /tests; cat Dockerfile"),
        shell("printf %s2 $(cat given) > answer; exit 3"),
        "done",
    ]
    reward, policy = play_harbor(turns, task)
    assert reward == 0.5
    first, second = (m["content"] for m in policy.asked[-1]["messages"] if m["role"] == "tool")
    assert first.startswith("4") and "'/tests': No such file" in first and "Dockerfile: No such" in first
    assert "logs" not in first and second.strip() == "[exit code 3]"


@pytest.mark.parametrize(
    ("test", "dockerfile", "reason"),
    [
        ("exit 1", "FROM x\n", r"the tests give no reward \(exit code 1\)"),
        ("echo nan > /logs/verifier/reward.json", "FROM x\n", "no reward"),
        ("", "FROM x\nRUN apt-get install -y gcc\n", "RUN apt-get"),
        (
            "if uvx -w pytest==8.4.1 \\\n pytest /tests; then",
            "FROM x\n",
            r"test.sh: no network here, so that 'uvx -w",
        ),
        ("cd /app\n  apt-get update\necho 0 > r", "FROM x\n", r"no network here, so that 'apt-get update'"),
    ],
)
def test_a_harbor_task_that_cannot_be_judged_has_no_reward(tmp_path, test, dockerfile, reason):
    with pytest.raises(gateway_worker.EpisodeError, match=reason):
        play_harbor(["done"], make_task(tmp_path, test, dockerfile))


# The worker


def test_a_worker_posts_rewards_and_failures(monkeypatch):
    """Three trajectories of a run: a reward, a failure, and one that the run's limit of calls ends."""
    claim, made = gateway_worker._claim, iter(range(3))

    async def play(trajectory):
        hello = [{"role": "user", "content": "hi"}]
        await trajectory.chat(hello)
        if (number := trajectory.row["number"]) == 1:
            raise ValueError("broken")
        if number == 2:
            await trajectory.chat(hello)
            with pytest.raises(gateway_worker.LimitError):
                await trajectory.chat(hello)
        return 0.5 + number

    async def three(gateway, patience):
        if (number := next(made, None)) is None:
            return None
        return dataclasses.replace(await claim(gateway, patience), row={"number": number})

    monkeypatch.setattr(gateway_worker, "_claim", three)
    with open_gateway(monkeypatch, max_turns=2, reward="post") as gateway:
        engine = ScriptedEngine(gateway, "hello", trajectories=3)
        gateway_worker.run_worker(play, SimpleNamespace(gateway=gateway.server.address, copies=1))
        ends = {(e.reward, e.failure, e.turns) for e, _ in map(engine.result, range(3))}
    assert ends == {(0.5, "", 1), (None, "ValueError: broken", 1), (2.5, "", 2)}


@pytest.mark.parametrize("name", ["openenv", "nemo_gym", "verifiers", "harbor"])
def test_an_adapter_is_short(name):
    assert len((ADAPTERS / f"{name}_player.py").read_text().splitlines()) <= 120
