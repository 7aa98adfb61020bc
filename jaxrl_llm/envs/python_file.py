"""Environments and tools in files of yours.

    ours   a class with `async reset(example, seed)` and `async step(state, turn) -> Step`
    RL2    interact(messages) -> messages, [] = the end; reward_fn(messages, answer) beside it rewards
    RL2    env_step(state, action, extra_info) or env_step(sample) -> {"next_state", "reward", "done"}

Any of them may be plain functions: they run in threads, many at once.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from jaxrl_llm.data.rows import Example
from jaxrl_llm.envs.env import Env, Step, Turn
from jaxrl_llm.errors import UserError


def load_env(name: str) -> Env:
    """The environment in "file.py" or "file.py:Class".

    Raises:
        ValueError: no such file, nothing in it that is an environment, or the file raises.
    """
    module, wanted = load(name)
    if wanted:
        return _adapted(getattr(module, wanted), name)
    own = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    classes = [x for x in own if inspect.isclass(x) and hasattr(x, "step")]
    if len(classes) > 1:
        names = ", ".join(x.__name__ for x in classes)
        raise UserError(f"--env.name {name}: which of {names}? Write {name}:{classes[0].__name__}")
    if classes:
        return _adapted(classes[0], name)
    if hasattr(module, "interact"):
        return Interact(module.interact, getattr(module, "reward_fn", None))
    if hasattr(module, "env_step"):
        return EnvStep(module.env_step)
    raise UserError(
        f"--env.name {name}: no class with a method step, and no function interact or env_step in it"
        + ("; for a reward alone there is --reward.name" if hasattr(module, "reward_fn") else "")
    )


def load(name: str) -> tuple[ModuleType, str]:
    """(the module, the name after the colon or "") of "file.py:Name". Raises ValueError, as `load_env`."""
    path, colon, wanted = name.rpartition(":")
    path, wanted = (path, wanted) if colon and path.endswith(".py") else (name, "")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{name}: there is no file {file}")
    sys.path.insert(0, str(file.parent))  # it may import its neighbours
    spec = importlib.util.spec_from_file_location(f"jaxrl_llm_user_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code
        raise UserError(f"{name}: {type(error).__name__}: {error}") from error
    if wanted and not hasattr(module, wanted):
        raise UserError(f"{name}: there is no {wanted} in {file}")
    return module, wanted


def _adapted(found: Any, name: str) -> Env:
    """An environment of a class or of a function in one of the known conventions."""
    if inspect.isclass(found):
        if missing := [method for method in ("reset", "step") if not hasattr(found, method)]:
            raise UserError(f"--env.name {name}: {found.__name__} has no method {' and no '.join(missing)}")
        return found() if inspect.iscoroutinefunction(found.step) else Threaded(found())
    names = set(inspect.signature(found).parameters)
    if "messages" in names:
        return Interact(found, None)
    if {"state", "action"} <= names or "sample" in names:
        return EnvStep(found)
    raise UserError(f"--env.name {name}: {found!r} is no class, and takes neither messages nor state, action")


class Threaded:
    """A class whose methods are plain functions."""

    def __init__(self, env: Any):
        self.env, self.role = env, getattr(env, "role", "user")

    async def reset(self, example: Example, seed: int) -> Any:
        return await called(self.env.reset, example, seed)

    async def step(self, state: Any, turn: Turn) -> Step:
        return await called(self.env.step, state, turn)


class Interact:
    """RL2's interact: the conversation in, messages out; none = it has ended."""

    def __init__(self, interact: Callable, reward_fn: Callable | None):
        self.interact, self.reward_fn = interact, reward_fn

    async def reset(self, example: Example, seed: int) -> Any:
        return example.answer

    async def step(self, state: Any, turn: Turn) -> Step:
        said = [] if turn.last else await called(self.interact, turn.messages)
        if said:
            return Step(said)
        reward = await called(self.reward_fn, turn.messages, state) if self.reward_fn else None
        return Step(reward=None if reward is None else float(reward), done=True)


@dataclass
class Row:
    """What env_step keeps of a conversation."""

    example: Example
    extra_info: dict[str, Any]


class EnvStep:
    """RL2's env_step, of either signature: text in, all of the next text out."""

    def __init__(self, env_step: Callable):
        self.env_step = env_step
        self.takes_sample = "sample" in inspect.signature(env_step).parameters

    async def reset(self, example: Example, seed: int) -> Row:
        return Row(example, dict(example.columns.get("extra_info") or {"answer": example.answer}))

    async def step(self, state: Row, turn: Turn) -> Step:
        before = turn.read()
        if self.takes_sample:
            row = {**state.example.columns, "answer": state.example.answer}
            sample = SimpleNamespace(sample=row, state_text=before, action_text=turn.text, turn=turn.number)
            said = await called(self.env_step, sample)
        else:
            said = await called(self.env_step, before, turn.text, state.extra_info)
        state.extra_info = said.get("extra_info", state.extra_info)
        reward, done, after = float(said.get("reward", 0.0)), bool(said["done"]), said.get("next_state")
        if done or after is None:
            return Step(reward=reward, done=True)
        if not after.startswith(before + turn.text):
            raise UserError("next_state does not begin with state + action: a conversation can only grow")
        return Step(after[len(before + turn.text) :], reward, raw=True)


async def called(function: Callable, *arguments: Any) -> Any:
    """What a function returns, plain or async. A plain one gets a thread that nobody waits for at the end:
    one that hangs can be left behind."""
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
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *result)

    threading.Thread(target=work, name="environment", daemon=True).start()
    result = await answer
    return await result if inspect.isawaitable(result) else result
