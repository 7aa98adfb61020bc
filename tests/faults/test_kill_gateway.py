"""A run of programs that is killed with SIGKILL and started again ends with the same bits."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from test_kill import SIGNALLER, assert_same_run, command, run
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
STEPS = [1, 2]


def arguments(folder: Path) -> list[str]:
    (folder / "pids").mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    more = [
        "--env.gateway.command",
        f"{sys.executable} -I -S {folder / 'program.py'}",
        "--env.max_turns",
        "2",
    ]
    more += ["--strict", "true"]  # when programs call decides which turns are in a batch
    more += ["--env.format", "hermes", "--max_response_tokens", "40", "--tokens_per_device", "512"]
    more += ["--model.architecture.max_position", "128", "--prompts_per_step", "2", "--eval.every", "0"]
    return command(folder, *more, "--warm_start.steps", "0", "--steps", str(STEPS[-1]))


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_run_with_programs_is_killed(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    end = run("-m", "jaxrl_llm.train", *arguments(whole))
    assert end.code == 0, end.stderr
    # The second of two steps of 8 programs with 2 calls each.
    place = "jaxrl_llm.envs.gateway.session:AgentSession._deliver"
    end = run("-c", SIGNALLER, place, "20", str(int(signal.SIGKILL)), *arguments(killed))
    assert end.code == -signal.SIGKILL, end.stderr
    pids = os.listdir(killed / "pids")
    assert len(pids) > 8
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    end = run("-m", "jaxrl_llm.train", *arguments(killed))
    assert end.code == 0, end.stderr
    assert_same_run(killed, whole, STEPS, untimed)
