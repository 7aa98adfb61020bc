"""Trajectories of programs that call the policy over HTTP, in a real engine."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_engine import KEY, VERSION, engine, expected_logprobs

from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.envs.config import EnvConfig, GatewayConfig
from jaxrl_llm.envs.env import state_key
from jaxrl_llm.envs.gateway.programs import LIMITED, ProgramRunner
from jaxrl_llm.envs.load import make_gateway
from jaxrl_llm.experience.rollouts import start_responses
from jaxrl_llm.forks import contexts
from jaxrl_llm.report.samples import turn_rows
from jaxrl_llm.rollout.config import SamplingConfig

HERE = Path(__file__).parent
TOKENIZER, CHAT = make_tokenizer(), ChatConfig()
SAMPLED = SamplingConfig(stop_tokens=tuple(range(1, 128, 2)))  # short turns of random weights
PROMPT, RESPONSE = 32, 64


def prompts(*texts, **columns):
    rows = [Example(({"role": "user", "content": t},), None, answer=t, columns=columns) for t in texts]
    return [Prompt(row, encode_prompt(TOKENIZER, row, CHAT), i) for i, row in enumerate(rows)]


@pytest.fixture
def opened():
    """opened(program, ...) -> a gateway, closed at the end."""
    made = []

    def make(program, max_turns=8, **settings):
        settings = {"command": f"{sys.executable} {HERE / 'programs.py'} {program}", **settings}
        config = EnvConfig(gateway=GatewayConfig(**settings), max_turns=max_turns, format="hermes")
        sizes = {"max_prompt_tokens": PROMPT, "max_response_tokens": RESPONSE, "slots": 4}
        made.append(make_gateway(config, TOKENIZER, CHAT, sampling=SAMPLED, **sizes))
        return made[-1]

    yield make
    for gateway in made:
        gateway.__exit__()


def run(gateway, texts=("3+4=", "hello"), responses=2, max_tokens=RESPONSE, **columns):
    made = engine()
    made.set_lengths(PROMPT, RESPONSE, turns=True)
    rows = prompts(*texts, **columns)
    pending = start_responses(made, rows, responses, max_tokens, sampling=SAMPLED, key=KEY, env=gateway)
    return pending.result()


def test_the_trainer_agrees_with_every_token_of_a_program(opened):
    """Prompt ids, response ids, log-probs, versions and reward of two calls are one trajectory."""
    made = run(opened("two_turns"))
    assert [(t.prompt_index, t.response_index) for t in made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for t in made:
        assert t.episode.failure == "" and t.episode.reward == 2.0 and t.episode.turns == 2
        row = prompts(("3+4=", "hello")[t.prompt_index])[0]
        assert t.prompt_ids.tolist() == row.ids.tolist()
        start, end = np.flatnonzero(np.diff(t.mask)) + 1
        first, second = ((r.end, r.reward, r.state) for r in t.episode.records)
        assert first == (start, 0.5, state_key([{"role": "user", "content": "go on"}]))
        assert second == (len(t.response_ids), None, "")
        observed = TOKENIZER.decode(t.response_ids[start:end])
        says = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
        assert observed.removeprefix("<|im_end|>") == says
        assert len(t.response_ids) - end <= 3
        expected = expected_logprobs(t.prompt_ids, t.response_ids)
        expected = expected[np.arange(len(t.response_ids)), t.response_ids]
        np.testing.assert_allclose(t.logprobs, np.where(t.mask, expected, 0.0), atol=3e-5)
        assert t.versions.tolist() == [VERSION] * len(t.response_ids)
        assert [m["role"] for m in t.messages] == ["assistant", "user", "assistant"]
    # The same calls, the same text: it depends on no clock.
    for first, second in zip(made, run(opened("two_turns", copies=1)), strict=True):
        assert first.response_ids.tolist() == second.response_ids.tolist()


def test_conversations_beside_each_other_are_trained_on_as_the_policy_read_them(opened):
    """The second one is not read by the first, whose own tokens stay as they were sampled."""
    for t in run(opened("branches"), ["3+4="], 2):
        assert t.episode.failure == "" and t.episode.turns == 4
        tokens = np.concatenate([t.prompt_ids, t.response_ids])
        found = contexts(len(tokens), t.forks)
        first, second, again, last = (TOKENIZER.decode(tokens[c.read]) for c in found)
        assert second.startswith("<|im_start|>user\nelse<|im_end|>\n<|im_start|>assistant\n")
        prompt = TOKENIZER.decode(t.prompt_ids)
        assert first.startswith(prompt) and last.startswith(prompt)
        assert again.startswith(first) and "<|im_start|>user\non<|im_end|>" in again
        for context in found:
            read = tokens[context.read]
            expected = expected_logprobs(read[:1], read[1:])[np.arange(len(read) - 1), read[1:]]
            own = context.read[max(context.keep, 1) :] - len(t.prompt_ids)
            new = own >= 0
            expected = expected[max(context.keep, 1) - 1 :][new]
            mask = t.mask[own[new]]
            np.testing.assert_allclose(t.logprobs[own[new]], np.where(mask, expected, 0.0), atol=3e-5)
        others = [m["content"] for m in t.episode.messages if m["role"] != "assistant"]
        assert others == ["else", "on"]  # each message once, the prompt's apart
        # The tree for the logs says the same.
        turns = turn_rows(t)
        assert [turn["after"] for turn in turns] == [-1, -1, 0, -1]
        assert not any("rewritten" in turn for turn in turns)
        for turn in turns:
            (start, end), number = turn["tokens"], sum(fork.first <= turn["tokens"][0] for fork in t.forks)
            read = np.concatenate([np.arange(*span) for span in turn["read"]])
            assert read.tolist() == [i for i in found[number].read.tolist() if i < start]
            assert t.mask[start - len(t.prompt_ids) : end - len(t.prompt_ids)].all()
            text = TOKENIZER.decode(tokens[start:end])
            assert text.startswith(t.episode.messages[turn["message"]]["content"])
        openings = [turn["opening"]["messages"][0]["content"] for turn in turns if "opening" in turn]
        assert openings == ["3+4=", "else", "3+4="]


def test_a_call_that_is_refused_changes_nothing(opened):
    for first, second in zip(run(opened("two_turns")), run(opened("refused")), strict=True):
        assert second.episode.failure == ""
        assert first.response_ids.tolist() == second.response_ids.tolist()


@pytest.mark.parametrize(
    ("program", "settings", "reward", "failure"),
    [
        ("no_call", {}, None, "the program ended without a call, with code 0"),
        ("crashes", {}, None, "the program ended with code 3: the reason"),
        ("right", {}, None, ""),
        ("right", {"reward": "exit"}, 1.0, ""),
        ("wrong", {"reward": "exit"}, 0.0, ""),
        ("right", {"reward": "post"}, None, "the program posted no reward"),
        ("right", {"reward": f"{HERE}/rewards.py:number_of_turns"}, 1.0, ""),
        ("right", {"reward": f"{HERE}/rewards.py:of_numpy"}, 0.5, ""),
        ("right", {"reward": f"{HERE}/rewards.py:enormous"}, None, "is 1e+300, not a number within +-1e+06"),
        ("right", {"reward": f"{HERE}/rewards.py:fails"}, None, "gateway.reward: ValueError: no reward"),
        pytest.param(
            "right",
            {"reward": f"{HERE}/rewards.py:hangs", "seconds": 6.0},
            None,
            "reward took longer than 6 s",
            marks=pytest.mark.slow,
        ),
        ("greedy_of_memory", {"memory_mb": 1000}, None, "MemoryError"),
    ],
)
def test_how_a_program_ends(opened, *, program, settings, reward, failure):
    (t,) = run(opened(program, **settings), ["?"], 1)
    assert t.episode.reward == reward and failure in t.episode.failure
    assert bool(failure) == bool(t.episode.failure)


def test_a_trajectory_that_the_engine_ends_unasked_returns_its_place(opened):
    """At most 3 tokens, of which the gateway knows nothing; one program at a time."""
    gateway = opened("right", copies=1)
    made = run(gateway, max_tokens=3)
    assert {t.finish for t in made} == {"length", "stop"} and len(made) == 4
    deadline = time.monotonic() + 10
    while gateway.server._by_key and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not gateway.server._by_key and not gateway._slots.locked()


def test_programs_see_no_secrets(monkeypatch):
    hidden = {"MY_TOKEN": "a", "DB_URL": "sql://me:word@host/x", "NPM_AUTH": "b", "dbPassword": "c"}
    for name, value in {**hidden, "MONKEY": "seen", "TOKENIZERS": "too"}.items():
        monkeypatch.setenv(name, value)
    shown = " ".join(f"${name}" for name in (*hidden, "OPENAI_API_KEY", "MONKEY", "TOKENIZERS"))
    runner = ProgramRunner(f"sh -c 'echo {shown}'", 0)
    assert asyncio.run(runner.run({}, {"OPENAI_API_KEY": "own"})).output == "own seen too"
    runner.close()


def test_a_program_that_does_not_end_is_killed_with_its_children(opened, tmp_path):
    gateway = opened("sleeps", seconds=3.0)
    (t,) = run(gateway, ["?"], 1, pids=str(tmp_path / "pids"))
    assert "the program took longer than 3 s" in t.episode.failure
    assert_gone((tmp_path / "pids").read_text().split())


@pytest.mark.parametrize("program", ["leaves_a_child", "prints_first"])
def test_a_program_ends_with_itself_and_may_print_before_it_reads(opened, program):
    (t,) = run(opened(program, seconds=8.0), ["?"], 1, long="y" * 1_000_000)
    assert (t.episode.failure, t.episode.turns) == ("", 1)


def assert_gone(pids):
    deadline = time.monotonic() + 10
    while any(is_alive(int(pid)) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


KILLED = """
import os, sys
from jaxrl_llm.envs.gateway.programs import LIMITED, ProgramRunner
import asyncio
programs = ProgramRunner(f"{sys.executable} -c 'import os, time; os.fork(); print(1); time.sleep(1000)'", 0)
async def main():
    task = asyncio.create_task(programs.run({}, {}))
    await asyncio.sleep(1)
    print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
    await task
asyncio.run(main())
"""


def test_programs_end_with_a_run_that_is_killed():
    run = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    pids = run.stdout.readline().split()
    assert len(pids) == 2 and all(is_alive(int(pid)) for pid in pids)  # program and watchdog
    children = Path(f"/proc/{pids[1]}/task/{pids[1]}/children").read_text().split()
    assert len(children) == 1
    os.kill(run.pid, 9)
    run.wait()
    run.stdout.close()
    assert_gone([*pids, *children])


@pytest.mark.parametrize(("before", "after"), [("unlimited", "4194304"), ("2000000", "2000000")])
def test_a_lower_limit_of_memory_stays(before, after):
    """A hard `ulimit -v` of the run cannot be raised, and every program would fail to start."""
    limited = ["/bin/sh", "-c", LIMITED, "sh", "4194304", "sh", "-c", 'ulimit -v; echo "$@"', "sh", "a b"]
    outer = ["/bin/sh", "-c", f'ulimit -v {before}; exec "$@"', "sh", *limited]
    assert subprocess.run(outer, capture_output=True, text=True).stdout == f"{after}\na b\n"
