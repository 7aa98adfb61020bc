"""Environments and tools in files of the user, in our convention and in RL2's."""

import asyncio
import contextlib
import re
import threading
import time
from pathlib import Path

import jax
import pytest

from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.load import make_conversations
from jaxrl_llm.envs.python_file import call_user, check_env, load_env
from jaxrl_llm.errors import UserError

TOKENIZER = make_tokenizer()
CLASS = """
from jaxrl_llm.envs.env import Step

class Guess:
    async def reset(self, example, seed):
        return {"number": int(example.answer), "tries": 0}

    async def step(self, state, turn):
        state["tries"] += 1
        if turn.text == str(state["number"]):
            return Step(reward=1.0 / state["tries"], done=True)
        return Step("higher" if int(turn.text) < state["number"] else "lower")
"""
PLAIN_CLASS = CLASS.replace("async def", "def")
INTERACT = """
import re

def interact(messages):
    found = re.findall(r"<search>(.*?)</search>", messages[-1]["content"])
    return [{"role": "tool", "content": f"about {query}"} for query in found]

def reward_fn(messages, answer):
    return messages[-1]["content"] == answer
"""
ENV_STEP = """
async def env_step(state, action, extra_info):
    done = action == extra_info["answer"]
    if not done:
        extra_info = {**extra_info, "tries": extra_info.get("tries", 0) + 1}
    passage = f"\\n<|im_start|>no {extra_info.get('tries')}\\n"
    return {"next_state": state + action + passage, "reward": float(done), "score": 1.0, "done": done,
            "extra_info": extra_info}
"""
ENV_STEP_OF_SAMPLE = """
async def env_step(sample):
    if sample.action_text == sample.sample["answer"]:
        return {"next_state": None, "done": True, "reward": 1.0}
    return {"next_state": sample.state_text + sample.action_text + "\\nno 1\\n", "done": False, "reward": 0.0}
"""


@pytest.fixture
def talk(tmp_path):
    """talk(source, turns, ...) -> (replies as text, the last episode)."""
    opened = []

    def run(source, *turns, answer="42", name="env.py", text=None):
        file = tmp_path / f"env_{len(opened)}_{time.monotonic_ns()}.py"
        file.write_text(source)
        config = EnvConfig(name=name.replace("env.py", str(file)), max_turns=4)
        opened.append(make_conversations(config, TOKENIZER, ChatConfig()))
        messages = None if text else ({"role": "user", "content": "6*7="},)
        example = Example(messages, text, answer=answer)
        prompt = Prompt(example, encode_prompt(TOKENIZER, example, ChatConfig()), 0)
        dialogue, ids, reply, said = opened[-1].dialogue([prompt], jax.random.key(0)), [], None, []
        for turn in turns:
            start = len(ids)
            ids += TOKENIZER(turn, add_special_tokens=False)["input_ids"]
            reply = dialogue.reply(0, 0, reply and reply.conversation, ids, start=start).result(timeout=20)
            said.append("done" if reply.done else TOKENIZER.decode(reply.ids))
            ids += reply.ids
        return said, reply.episode

    yield run
    for conversations in opened:
        conversations.__exit__()


def shown(text, role="user"):
    return f"\n<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("source", [CLASS, PLAIN_CLASS], ids=["async", "plain"])
@pytest.mark.parametrize("name", ["env.py", "env.py:Guess"])
def test_a_class(talk, source, name):
    said, episode = talk(source, "40<|im_end|>", "44<|im_end|>", "42<|im_end|>", name=name)
    assert said == [shown("higher"), shown("lower"), "done"]
    assert episode.reward == pytest.approx(1 / 3) and episode.turns == 3


def test_rl2_interact_and_reward_fn(talk):
    said, episode = talk(INTERACT, "<search>life</search><|im_end|>", "42<|im_end|>")
    assert said == [shown("about life", "tool"), "done"] and episode.reward == 1.0
    said, episode = talk(INTERACT.split("def reward_fn")[0], "42<|im_end|>")
    assert said == ["done"] and episode.reward is None  # the verifier judges


def test_rl2_env_step_text_goes_on_as_it_is(talk):
    said, episode = talk(ENV_STEP, "40", "41", "42", text="6*7=")
    assert said == ["\n<|im_start|>no 1\n", "\n<|im_start|>no 2\n", "done"] and episode.reward == 1.0
    said, episode = talk(ENV_STEP_OF_SAMPLE, "40", "42", text="6*7=")
    assert said == ["\nno 1\n", "done"] and episode.reward == 1.0


def test_rl2_env_step_that_rewrites_what_was_said_ends_the_conversation(talk):
    _, episode = talk(ENV_STEP.replace("state + action +", "'summary' +"), "40", text="6*7=")
    assert "next_state does not begin with state + action" in episode.failure


def test_an_exception_ends_the_conversation(talk):
    said, episode = talk(CLASS, "forty")
    assert said == ["done"] and episode.failure.startswith("ValueError: invalid literal for int()")
    _, episode = talk(CLASS.replace('state["tries"] += 1', "raise SystemExit(3)"), "40")
    assert episode.failure.startswith("SystemExit: 3 (") and episode.failure.endswith(".py:9)")


@pytest.mark.parametrize(
    "source, name, message",
    [
        ("x = 1", "", "no class with a method step, and no function interact or env_step"),
        ("def reward_fn(messages, answer): ...", "", "for a reward alone set --reward.name"),
        (CLASS + CLASS.replace("class Guess", "class Other"), "", "which of Guess, Other.*py:Guess"),
        ("class Game:\n    def step(self, state, turn): ...", "", "Game has no method reset"),
        (CLASS, ":Chess", "has no function or class Chess; it has .*Guess"),
        ("import nothing_of_the_kind", "", "mine.py:1: ModuleNotFoundError: No module named"),
        ("def step(text): ...", ":step", "takes neither messages nor state, action"),
        ("class Game:\n    def resett(self, a, b): ...\n    def step(self): ...", "", "Did you mean resett?"),
        ("\ndef env_step(:", "", "mine.py:2: SyntaxError"),
        (CLASS, ":Gues", "Did you mean Guess?"),
        (CLASS.replace("(self, state, turn)", "(self, turn)"), "", r"Guess.step\(turn\) is called with"),
        (CLASS.replace("(self, example, seed)", "(self, example, seed, key)"), "", "missing .* 'key'"),
        (CLASS + "\n    def __init__(self):\n        print(nam)", "", r"mine.py:\d+: NameError"),
        ("import os; os._exit(5)", "", "its process ended with code 5"),
        pytest.param("while True: pass", "", "took over 2 s", marks=pytest.mark.slow),
        ("print('hello'); import sys; sys.exit(1)", "", "mine.py:1: SystemExit: 1"),
    ],
)
def test_what_is_no_environment_is_refused_with_the_fix(tmp_path, source, name, message):
    (tmp_path / "mine.py").write_text(source)
    seconds = 2.0 if "while" in source else 60.0
    with pytest.raises(UserError, match=message):
        check_env(EnvConfig(name=f"{tmp_path / 'mine.py'}{name}"), seconds=seconds)
    if "_exit" not in source and "while" not in source:
        with pytest.raises(UserError, match=message):
            load_env(f"{tmp_path / 'mine.py'}{name}")


def test_the_environment_of_the_guide_works(talk, tmp_path):
    guide = (Path(__file__).parents[2] / "docs/agents.md").read_text()
    source = re.search(r"```python\n(.*?)```", guide, re.S)[1]
    (tmp_path / "my_env.py").write_text(source)
    check_env(EnvConfig(name=str(tmp_path / "my_env.py")), [Example(None, "x", answer="42")])
    observations, episode = talk(source, "40<|im_end|>", "what<|im_end|>", "42<|im_end|>")
    assert observations == [shown("higher"), shown("Write a number."), "done"]
    assert episode.reward == pytest.approx(1 / 3)


ROWS = [Example(None, "x", answer=answer) for answer in ("forty", None, "41")]


def test_reset_is_tried_with_the_first_rows(tmp_path):
    (tmp_path / "mine.py").write_text(CLASS)
    config = EnvConfig(name=str(tmp_path / "mine.py"))
    check_env(config, ROWS)
    with pytest.raises(UserError, match=r"every row that was tried \(2\): .*mine.py:6: ValueError"):
        check_env(config, ROWS[:2])
    check_env(EnvConfig(name="guess"), ROWS)
    with pytest.raises(UserError, match="the row's answer 'forty' is not a whole number"):
        check_env(EnvConfig(name="guess"), ROWS[:2])
    with pytest.raises(UserError, match=r"gues: unknown. Did you mean guess\?"):
        check_env(EnvConfig(name="gues"))
    check_env(EnvConfig(tools=("calculator",)), ROWS)


def test_what_an_environment_starts_neither_delays_the_check_nor_outlives_it(tmp_path):
    note = tmp_path / "pid"
    start = (
        f"import subprocess\nopen({str(note)!r}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid))\n"
    )
    (tmp_path / "mine.py").write_text(start + CLASS)
    check_env(EnvConfig(name=str(tmp_path / "mine.py")), ROWS)
    pid = int(note.read_text())
    deadline = time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends while it is read
        while Path(f"/proc/{pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    "source, message",
    [
        ("class Clock: pass", "schema must be OpenAI's function schema.*not None"),
        ("class Clock:\n    schema = {'name': 1}", "schema must be OpenAI's function schema"),
        ("class Clock:\n    schema = {'name': 'c'}\n    def call(self, arguments): ...", "async def call"),
        (
            "class Clock:\n    schema = {'name': 'c'}\n    async def call(self): ...",
            r"Clock.call\(\) is called",
        ),
        ("class Clok: pass", "has no function or class Clock; it has Clok. Did you mean Clok?"),
        ("class Clock:\n    def __init__(self): 1 / 0", "mine.py:2: ZeroDivisionError"),
    ],
)
def test_what_is_no_tool_is_refused_with_the_fix(tmp_path, source, message):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match=message):
        check_env(EnvConfig(tools=("calculator", f"{tmp_path / 'mine.py'}:Clock")))


def test_a_tool_of_the_user(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Clock:\n    schema = {'name': 'clock', 'parameters': {}}\n"
        "    async def call(self, arguments): return 'noon'\n"
    )
    config = EnvConfig(tools=(f"{tmp_path / 'mine.py'}:Clock",), format="hermes")
    with make_conversations(config, TOKENIZER, ChatConfig()) as made:
        assert list(made.env.tools) == ["clock"]
        assert asyncio.run(made.env.tools["clock"].call({})) == "noon"


def test_plain_functions_that_hang_neither_block_the_others_nor_the_end():
    async def both():
        hung = asyncio.create_task(call_user(time.sleep, 30))
        done = await asyncio.gather(*(call_user(lambda n: n * n, n) for n in range(20)))
        hung.cancel()
        return done

    assert asyncio.run(both()) == [n * n for n in range(20)]


def test_a_plain_function_may_end_when_its_loop_closes(monkeypatch):
    """Also just after the loop was still open; an error of the thread fails this test."""
    hung, threads, is_closed = threading.Event(), [], asyncio.BaseEventLoop.is_closed
    just_before = lambda loop: threading.current_thread() not in threads and is_closed(loop)
    monkeypatch.setattr(asyncio.BaseEventLoop, "is_closed", just_before)

    def hang():
        threads.append(threading.current_thread())
        hung.wait()

    async def give_up():
        call = asyncio.create_task(call_user(hang))
        while not threads:
            await asyncio.sleep(0.01)
        call.cancel()
        return asyncio.get_running_loop()

    loop = asyncio.run(give_up())
    hung.set()
    threads[0].join()
    assert is_closed(loop)
