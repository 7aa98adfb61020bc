"""Environments and tools by name: built-in ones, and ones in files of the user.

    ours   a class with `async reset(example, seed)` and `async step(state, turn) -> Step`
    RL2    interact(messages) -> messages, [] = the end; reward_fn(messages, answer) beside it rewards
    RL2    env_step(state, action, extra_info) or env_step(sample) -> {"next_state", "reward", "done"}
    tools  a class with `schema` and `async call(arguments) -> str`

Plain functions and methods run in threads, many at once. Imports no jax.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from jaxrl_llm.child import Child
from jaxrl_llm.data.rows import Example
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.env import ENVS, Env, Step, Tool, Turn
from jaxrl_llm.errors import UserError
from jaxrl_llm.user_file import (
    did_you_mean,
    end_with_parent,
    explain,
    get_attribute,
    import_user_file,
    kill_group,
    python_command,
    split_name,
)

ENV_KEY, TOOLS_KEY = "env.name", "env.tools"


def load_env(name: str) -> Env:
    """Return a built-in environment, or the one in "file.py" or "file.py:Class".

    Raises:
        UserError: unknown name or file, no environment in the file, or the user's code raises.
    """
    if name in ENVS:
        return ENVS[name]()
    path, attribute = split_name(name)
    if path.suffix != ".py":
        raise UserError(
            f"--{ENV_KEY} {name}: unknown.{did_you_mean(name, ENVS)} Built in is {', '.join(ENVS)}; yours is "
            "the path of a .py file."
        )
    # A named attribute, the only class with a step, or one of RL2's functions.
    module = import_user_file(path, ENV_KEY)
    if attribute:
        return _adapt(get_attribute(module, attribute, ENV_KEY), name)
    own = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    classes = [x for x in own if inspect.isclass(x) and hasattr(x, "step")]
    if len(classes) > 1:
        names = ", ".join(x.__name__ for x in classes)
        raise UserError(f"--{ENV_KEY} {name}: which of {names}? Write {name}:{classes[0].__name__}")
    if classes:
        return _adapt(classes[0], name)
    if hasattr(module, "interact"):
        return Interact(module.interact, getattr(module, "reward_fn", None))
    if hasattr(module, "env_step"):
        return EnvStep(module.env_step)
    raise UserError(
        f"--{ENV_KEY} {name}: no class with a method step, and no function interact or env_step in it"
        + ("; for a reward alone set --reward.name" if hasattr(module, "reward_fn") else "")
    )


def load_tool(name: str) -> Tool:
    """Return the tool of "file.py:Class".

    Raises:
        UserError: unknown file or class, or its instance is not a tool.
    """
    path, attribute = split_name(name)
    tool = _make(get_attribute(import_user_file(path, TOOLS_KEY), attribute, TOOLS_KEY), name, TOOLS_KEY)
    schema = getattr(tool, "schema", None)
    if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
        raise UserError(
            f"--{TOOLS_KEY} {name}: schema must be OpenAI's function schema, "
            f'{{"name": ..., "description": ..., "parameters": {{...}}}}, not {schema!r:.80}'
        )
    if not inspect.iscoroutinefunction(getattr(tool, "call", None)):
        raise UserError(f"--{TOOLS_KEY} {name}: a tool needs a method `async def call(self, arguments)`")
    _check_call(tool.call, ("arguments",), f"--{TOOLS_KEY} {name}")
    return tool


def _adapt(value: Any, name: str) -> Env:
    """Return the environment of a class or of a function in one of the known conventions."""
    where = f"--{ENV_KEY} {name}"
    if inspect.isclass(value):
        for method in ("reset", "step"):
            if not hasattr(value, method):
                hint = did_you_mean(method, [key for key in vars(value) if not key.startswith("_")])
                raise UserError(f"{where}: {value.__name__} has no method {method}.{hint}")
        env = _make(value, name, ENV_KEY)
        _check_call(env.reset, ("example", "seed"), where)
        _check_call(env.step, ("state", "turn"), where)
        plain = [f for f in (env.reset, env.step) if not inspect.iscoroutinefunction(f)]
        return Threaded(env) if plain else env
    names = set(inspect.signature(value).parameters)
    if "messages" in names:
        return Interact(value, None)
    if {"state", "action"} <= names or "sample" in names:
        return EnvStep(value)
    raise UserError(f"{where}: {value!r} is not a class, and takes neither messages nor state, action")


def _make(make: Callable[[], Any], name: str, key: str) -> Any:
    """Return an instance of a class of the user."""
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise UserError(f"--{key} {name}: {explain(error, split_name(name)[0].resolve())}") from error


def _check_call(function: Callable[..., Any], arguments: tuple[str, ...], where: str) -> None:
    """Refuse a function that cannot be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        name, given = function.__qualname__, inspect.signature(function)
        raise UserError(f"{where}: {name}{given} is called with ({', '.join(arguments)}): {error}") from None


class Threaded:
    """Adapter of an environment whose methods are plain functions."""

    def __init__(self, env: Any):
        self.env, self.role = env, getattr(env, "role", "user")

    async def reset(self, example: Example, seed: int) -> Any:
        """Return the state of a new conversation."""
        return await call_user(self.env.reset, example, seed)

    async def step(self, state: Any, turn: Turn) -> Step:
        """Return observation and reward of a turn."""
        return await call_user(self.env.step, state, turn)


class Interact:
    """Adapter of RL2's interact: the conversation in, messages of any role out; none = it has ended."""

    role = ""

    def __init__(self, interact: Callable, reward_fn: Callable | None):
        self.interact, self.reward_fn = interact, reward_fn

    async def reset(self, example: Example, seed: int) -> Any:
        """Return the row's answer, for reward_fn."""
        return example.answer

    async def step(self, state: Any, turn: Turn) -> Step:
        """Return the messages, or the end with its reward."""
        messages = [] if turn.last else await call_user(self.interact, turn.messages)
        if messages:
            return Step(messages)
        reward = await call_user(self.reward_fn, turn.messages, state) if self.reward_fn else None
        return Step(reward=None if reward is None else float(reward), done=True)


class EnvStep:
    """Adapter of RL2's env_step, of either signature: text in, all of the next text out, no messages."""

    role = ""

    def __init__(self, env_step: Callable):
        self.env_step = env_step
        self.takes_sample = "sample" in inspect.signature(env_step).parameters

    async def reset(self, example: Example, seed: int) -> SimpleNamespace:
        """Return the row and its extra_info."""
        extra_info = dict(example.columns.get("extra_info") or {"answer": example.answer})
        return SimpleNamespace(example=example, extra_info=extra_info)

    async def step(self, state: SimpleNamespace, turn: Turn) -> Step:
        """Return the part of next_state after the turn."""
        before = turn.read()
        if self.takes_sample:
            row = {**state.example.columns, "answer": state.example.answer}
            sample = SimpleNamespace(sample=row, state_text=before, action_text=turn.text, turn=turn.number)
            reply = await call_user(self.env_step, sample)
        else:
            reply = await call_user(self.env_step, before, turn.text, state.extra_info)
        state.extra_info = reply.get("extra_info", state.extra_info)
        reward, done, after = float(reply.get("reward", 0.0)), bool(reply["done"]), reply.get("next_state")
        if done or after is None:
            return Step(reward=reward, done=True)
        if not after.startswith(before + turn.text):
            raise ValueError("next_state does not begin with state + action: a conversation can only grow")
        return Step(after[len(before + turn.text) :], reward, raw=True)


async def call_user(function: Callable, *arguments: Any) -> Any:
    """Call a function, plain or async. A plain function runs in a daemon thread, which can be abandoned if it
    hangs.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def settle(set_fn: Callable, value: Any) -> None:
        if not answer.done():  # given up meanwhile
            set_fn(value)

    def work() -> None:
        try:
            result = answer.set_result, function(*arguments)
        except BaseException as error:
            result = (
                answer.set_exception,
                error if isinstance(error, Exception) else RuntimeError(repr(error)),
            )
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *result)

    threading.Thread(target=work, name="environment", daemon=True).start()
    result = await answer
    return await result if inspect.isawaitable(result) else result


CHECKED_ROWS = 4
MAX_MESSAGE = 1 << 14  # bytes


def check_env(config: EnvConfig, examples: Sequence[Example] = (), seconds: float = 120.0) -> None:
    """Load the environment, or the tools that are files of the user, and reset it for the first rows.

    Args:
        examples: the first rows.
        seconds: time limit.

    Raises:
        UserError: loading fails, or reset fails for every row; the message has file and line.
    """
    files = [name for name in config.tools if split_name(name)[0].suffix == ".py"]
    if not config.name and not files:
        return
    what = f"--{ENV_KEY} {config.name}" if config.name else f"--{TOOLS_KEY} {' '.join(files)}"
    command = python_command("jaxrl_llm.envs.python_file", "main", os.getpid())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.closing(Child(command, env=environment)) as child:
        try:
            with contextlib.suppress(BrokenPipeError), child.stdin as file:  # it has ended
                pickle.dump((config.name, files, list(examples[:CHECKED_ROWS])), file)
            # Its end counts, and not that of its output: processes of the user's code may hold it open.
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{what}: loading it, and reset for the first rows, took over {seconds:g} s"
            ) from None
        finally:
            kill_group(child.pid)
        message = child.stdout.read(MAX_MESSAGE).decode(errors="replace")
        printed = " ".join(child.last_errors(200).split())
    if message != "ok":
        raise UserError(message or f"{what}: its process ended with code {child.returncode}: {printed}")


def main(parent: int) -> None:
    """Load the environment or tools named on standard input; answer "ok" or the problem."""
    end_with_parent(parent, signal.SIGKILL)
    reply = os.dup(1)
    os.dup2(2, 1)  # output of the user's code must not mix with the answer
    name, tools, examples = pickle.load(sys.stdin.buffer)
    try:
        for tool in tools:
            load_tool(tool)
        if name:
            _reset(name, load_env(name), examples)
    except UserError as error:
        os.write(reply, str(error).encode(errors="replace")[:MAX_MESSAGE])
    else:
        os.write(reply, b"ok")
    sys.stdout.flush()
    os._exit(0)  # the user's threads may still run


def _reset(name: str, env: Any, examples: Sequence[Example]) -> None:
    """Start a conversation about each row; refuse an environment that fails for all of them."""
    problems = []
    for example in examples:
        try:
            asyncio.run(env.reset(example, 0))
            return
        except (Exception, SystemExit) as error:
            path = split_name(name)[0].resolve()
            problems.append(str(error) if isinstance(error, UserError) else explain(error, path))
    if problems:
        tried = f"reset fails for every row that was tried ({len(problems)})"
        raise UserError(f"--{ENV_KEY} {name}: {tried}: {problems[0]}")
