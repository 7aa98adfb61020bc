"""A run of programs that is killed with SIGKILL and started again ends with the same bits."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from distributed import End, Running, with_devices
from test_kill import SIGNALLER, assert_same_run, command
from test_kill_asynchronous import untimed

PROGRAM = """
import json, os, sys, time, urllib.error, urllib.request

def call(messages):
    body = json.dumps({"messages": messages, "max_tokens": 6}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]

open(os.path.join(os.path.dirname(__file__), "pids", str(os.getpid())), "w").close()
messages = json.load(sys.stdin)["messages"]
try:
    messages += [call(messages), {"role": "user", "content": "again"}]
    call(messages)
except urllib.error.HTTPError:
    raise
except OSError:  # the run is gone: nothing but a signal ends this program
    time.sleep(1000)
"""
STEPS = [1, 2, 3]
# When programs call decides which turns are computed together, and so the last bits, but for these two:
IN_STEP = ["--strict", "true", "--devices", "0:1"]
AHEAD = [
    "--rollout.slots",
    "1",
    "--rollout.max_staleness",
    "1",
    "--devices",
    "0:2",
    "--rollout.devices",
    "2:3",
]


def arguments(folder: Path, more: list[str]) -> list[str]:
    (folder / "pids").mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    more = [
        *more,
        "--env.gateway.command",
        f"{sys.executable} -I -S {folder / 'program.py'}",
        "--env.max_turns",
        "2",
    ]
    more += ["--env.format", "hermes", "--max_response_tokens", "40", "--tokens_per_device", "512"]
    more += ["--model.architecture.max_position", "128", "--prompts_per_step", "2", "--eval.every", "0"]
    return command(folder, *more, "--warm_start.steps", "0", "--steps", str(STEPS[-1]))


def run(*argv: str) -> End:
    return Running(argv, with_devices(3)).end()


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("more", [IN_STEP, AHEAD], ids=["in the step", "a step ahead"])
def test_a_run_with_programs_is_killed(tmp_path, more):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    end = run("-m", "jaxrl_llm.train", *arguments(whole, more))
    assert end.code == 0, end.stderr
    # The second of three steps of 8 programs with 2 calls each; ahead, it may be the third.
    place = "jaxrl_llm.envs.gateway.session:AgentSession._deliver"
    end = run("-c", SIGNALLER, place, "20", str(int(signal.SIGKILL)), *arguments(killed, more))
    assert end.code == -signal.SIGKILL, end.stderr
    pids = os.listdir(killed / "pids")
    assert len(pids) > 8
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    # Then in an update, two steps later at the most: ahead, a checkpoint has the responses to programs.
    place = "jaxrl_llm.learn.learner:Learner.update"
    end = run("-c", SIGNALLER, place, "2", str(int(signal.SIGKILL)), *arguments(killed, more))
    assert end.code == -signal.SIGKILL, end.stderr
    end = run("-m", "jaxrl_llm.train", *arguments(killed, more))
    assert end.code == 0, end.stderr
    assert_same_run(killed, whole, STEPS, untimed)
