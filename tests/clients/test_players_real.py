"""Real environments through the adapters of examples/adapters, each with its package of one version.

The packages are in separate environments, `scripts/clients.sh .venv-clients-openenv` and so on (their
versions of mcp and of Python differ); without one its tests are skipped. NeMo Gym's wheel has its servers;
others are on no package index and are installed from a checkout, `pip install --no-deps envs/grid_world_env`:
grid_world_env (for Python 3.12) and reasoning_gym_env of OpenEnv; reverse_text, glossary and scratchpad of
verifiers.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "examples/adapters"
sys.path.append(str(ROOT / "tests/envs/gateway"))
from scripted import END, ROW, RUN, ScriptedEngine, open_gateway  # noqa: E402

pytestmark = pytest.mark.slow


def python_of(name):
    """Return the interpreter of a package's environment, or skip the test."""
    variable = f"JAXRL_{name.upper().replace('-', '_')}_PYTHON"
    path = Path(os.environ.get(variable, ROOT / f".venv-clients-{name}/bin/python"))
    if not path.is_file():
        pytest.skip(f"no interpreter {path}")
    return str(path)


def needs(python, module):
    """Skip the test if an environment is not installed: some are only in their projects' repositories."""
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
        pytest.skip(f"no {module} in {python}")


def row_of(**columns):
    return dataclasses.replace(ROW, example=dataclasses.replace(ROW.example, columns=columns))


@pytest.fixture
def started():
    """started(command, port, **popen) -> a process that listens at the port, ended with the test."""
    processes = []

    def start(command, port, **popen):
        processes.append(subprocess.Popen(command, start_new_session=True, **popen))
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return processes[-1]
            assert processes[-1].poll() is None
            time.sleep(0.2)
        raise AssertionError("it does not listen")

    yield start
    for process in processes:
        os.killpg(process.pid, 9)
        process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def play(monkeypatch, command, *texts, row=ROW, trajectories=1, max_turns=50):
    """Play with an adapter; return (episode, text) of each trajectory."""
    with open_gateway(monkeypatch, history="keep", max_turns=max_turns, reward="post") as gateway:
        turns = [f"{text}{END}" for text in texts]
        engine = ScriptedEngine(gateway, *turns, trajectories=trajectories, row=row)
        worker = subprocess.Popen(
            [*command, "--gateway", gateway.server.address],
            env={**os.environ, "JAXRL_GATEWAY_KEY": RUN},
            start_new_session=True,
        )
        try:
            for thread in engine.threads:
                thread.join(300)
            return [engine.result(i) for i in range(trajectories)]
        finally:
            os.killpg(worker.pid, 9)
            worker.wait()


# OpenEnv

OPENENV = [sys.executable, str(ADAPTERS / "openenv_player.py")]


@pytest.fixture
def openenv(started, tmp_path):
    """openenv(app) -> address of a server of this application."""

    def start(app, cwd=None):
        python, port = python_of("openenv"), free_port()
        command = [python, "-m", "uvicorn", app, "--port", str(port), "--log-level", "warning"]
        started(command, port, cwd=cwd or tmp_path)
        return f"http://127.0.0.1:{port}"

    return start


def test_the_echo_of_openenv_init(openenv, monkeypatch, tmp_path):
    """Two episodes, though the server has room for one at a time; 0.1 for each character."""
    program = Path(python_of("openenv")).parent / "openenv"
    subprocess.run([program, "init", "echo"], cwd=tmp_path, check=True)
    url = openenv("server.app:app", tmp_path / "echo")
    command = [*OPENENV, url, "--show", "{echoed_message}"]
    for episode, text in play(monkeypatch, command, "abc", "hello", "x", trajectories=2, max_turns=3):
        assert (episode.failure, episode.turns) == ("", 3)
        assert episode.reward == pytest.approx(0.3 + 0.5 + 0.1)
        assert "<|im_start|>user\nhello<|im_end|>" in text


def test_grid_world(openenv, monkeypatch):
    """Eight moves to the goal, -0.1 each but the last, which gives 1; a wrong word costs nothing."""
    needs(python_of("openenv"), "grid_world_env")
    url = openenv("grid_world_env.server.app:app")
    moves = ["jump", *["DOWN", "RIGHT"] * 4]
    ((episode, text),) = play(monkeypatch, [*OPENENV, url, "--show", "{x},{y} {message}"], *moves)
    assert (episode.failure, episode.turns) == ("", 9)
    assert episode.reward == pytest.approx(1.0 - 7 * 0.1)
    assert "0,0 Welcome" in text and "user\n1,0 Keep going" in text and "user\nerror: " in text


@pytest.mark.parametrize(("number", "reward"), [("196", 1.0), ("5", 0.0)])
def test_reasoning_gym_in_openenv(openenv, monkeypatch, number, reward):
    """The row says which question; the server tells its reward."""
    needs(python_of("openenv"), "reasoning_gym_env")
    settings = {"max_animals": 1, "min_animals": 1}
    ask = {"dataset_name": "leg_counting", "seed": 1, "size": 1, "dataset_config": settings}
    url = openenv("reasoning_gym_env.server.app:app")
    command = [*OPENENV, url, "--show", "{question}"]
    ((episode, text),) = play(monkeypatch, command, number, row=row_of(reset=ask))
    assert (episode.failure, episode.turns, episode.reward) == ("", 1, reward)
    assert "if you have 14 woodlouses?" in text


# verifiers


@pytest.mark.parametrize(
    ("words", "text", "reward"),
    [
        (["reverse_text", "--env.taskset.dataset_name", "ROWS"], "<reversed_text>cba</reversed_text>", 1.0),
        (["reverse_text", "--env.taskset.dataset_name", "ROWS"], "cba", 0.0),
        (["glossary"], "I do not know.", 0.0),
        (["scratchpad"], "alpha", 1.0),
    ],
)
def test_a_verifiers_environment(monkeypatch, tmp_path, words, *, text, reward):
    python = python_of("verifiers")
    needs(python, words[0])
    (tmp_path / "train.jsonl").write_text('{"prompt": "abc"}\n')
    command = [python, str(ADAPTERS / "verifiers_player.py"), *words]
    command += ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]
    command = [str(tmp_path) if word == "ROWS" else word for word in command]
    monkeypatch.setenv("PATH", f"{Path(python).parent}:{os.environ['PATH']}")  # uv
    ((episode, _),) = play(monkeypatch, command, text, row=row_of(task=0))
    assert (episode.failure, episode.reward) == ("", reward)


# NeMo Gym

SERVE = """
import importlib, sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import ServerClient

name, port = sys.argv[1], int(sys.argv[2])
app = importlib.import_module(f"resources_servers.{name}.app")
own = [value for value in vars(app).values() if getattr(value, "__module__", "") == app.__name__]
(kind,) = [value for value in own if isinstance(value, type) and issubclass(value, SimpleResourcesServer)]
config = kind.model_fields["config"].annotation(host="127.0.0.1", port=port, entrypoint="", name="")
server = kind(config=config, server_client=MagicMock(spec=ServerClient))
uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="warning")
"""
"""One resources server of the wheel, made as in its own tests: `ng_run` starts a head server and ray, too."""
WEATHER = '<tool_call>{"name": "get_weather", "arguments": {"city": "sf"}}</tool_call>'


@pytest.mark.parametrize(
    ("name", "texts", "turns", "reward"),
    [
        ("string_match", ["It is \\boxed{paris}."], 1, 1.0),
        ("string_match", ["It is \\boxed{Rome}."], 1, 0.0),
        ("mcqa", ["\\boxed{B}"], 1, 1.0),
        ("mcqa", ["\\boxed{A}"], 1, 0.0),
        ("example_single_tool_call", [WEATHER, "Cold."], 2, 1.0),
        ("blackjack", ["<action>hit</action>"], None, -1.0),  # until the hand is above 21
    ],
)
def test_a_resources_server_of_nemo_gym(started, monkeypatch, tmp_path, name, *, texts, turns, reward):
    """The first row of the server's own examples."""
    python, port = python_of("nemo-gym"), free_port()
    started([python, "-c", SERVE, name, str(port)], port, cwd=tmp_path)
    (packages,) = Path(python).parents[1].glob("lib/*/site-packages")
    with (packages / f"resources_servers/{name}/data/example.jsonl").open() as rows:
        row = row_of(**json.loads(next(rows)))
    command = [sys.executable, str(ADAPTERS / "nemo_gym_player.py"), f"http://127.0.0.1:{port}"]
    ((episode, text),) = play(monkeypatch, command, *texts, row=row)
    assert (episode.failure, episode.reward) == ("", reward)
    assert episode.turns == turns or (turns is None and "Your hand: [" in text)
    assert name != "example_single_tool_call" or "The weather in sf is cold." in text
