"""The environment of a run, from its config."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.template import find_template
from jaxrl_llm.envs import calls
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.dialogue import EnvDialogue, check_template
from jaxrl_llm.envs.env import Env
from jaxrl_llm.envs.guess import Guess
from jaxrl_llm.envs.python_file import load, load_env
from jaxrl_llm.envs.tool_env import ToolEnv
from jaxrl_llm.envs.tools import TOOLS
from jaxrl_llm.envs.tools.base import Tool, ToolsConfig
from jaxrl_llm.envs.tools.mcp_server import McpServer
from jaxrl_llm.errors import UserError

ENVS = {"guess": Guess}


@dataclass
class Conversations:
    """Makes the dialogue of each rollout call; their environments share an event loop in a thread.

    A context manager.
    """

    env: Env
    config: EnvConfig
    tokenizer: Any
    chat: ChatConfig
    columns: dict[str, Any] = field(default_factory=dict)
    """What rows are to hold: the tools, for the chat template to show."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self):
        self._thread = threading.Thread(target=self.loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def dialogue(self, prompts: Sequence[Prompt], key: jax.Array) -> EnvDialogue:
        """The other side of responses to these prompts; the same key, the same seeds."""
        seed = int(np.asarray(jax.random.key_data(key)).ravel()[-1])
        return EnvDialogue(self.env, self.config, prompts, self.tokenizer, self.chat, seed, self.loop)

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what still runs; an environment that blocks its thread is left behind."""

        async def cancel() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=1) if others else None
            self.loop.stop()

        asyncio.run_coroutine_threadsafe(cancel(), self.loop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self.loop.close()


def make_conversations(config: EnvConfig, tokenizer: Any, chat: ChatConfig) -> Conversations | None:
    """None where the policy writes one turn only.

    Raises:
        ValueError: what does not exist or cannot work, with the fix.
    """
    if not config.active:
        return None
    columns: dict[str, Any] = {}
    if config.tools:
        tools = make_tools(config.tools, config.toolbox)
        columns["tools"] = [{"type": "function", "function": tool.schema} for tool in tools.values()]
        form = _format(config, tokenizer, chat)
        env: Env = ToolEnv(tools, form, config.tool_timeout, config.max_calls)
    elif config.name in ENVS:
        env = ENVS[config.name]()
    elif ".py" in config.name:
        env = load_env(config.name)
    else:
        raise UserError(
            f"--env.name {config.name}: unknown. There is {', '.join(ENVS)}; yours is the path of a .py file"
        )
    if role := getattr(env, "role", ""):
        check_template(tokenizer, chat, role, columns, config.history == "strict")
    return Conversations(env, config, tokenizer, chat, columns)


def make_tools(names: Sequence[str], config: ToolsConfig) -> dict[str, Tool]:
    """Tools by the names that the policy calls them by. Raises ValueError as `make_conversations`."""
    tools = []
    for name in names:
        if name in TOOLS:
            tools.append(TOOLS[name](config))
        elif name.startswith("mcp:"):
            tools += McpServer(name.removeprefix("mcp:")).tools
        elif ".py:" in name:
            module, wanted = load(name)
            tools.append(getattr(module, wanted)())
        else:
            known = ", ".join(TOOLS)
            raise UserError(
                f"--env.tools {name}: unknown; there are {known}, mcp:COMMAND, and yours: my_tools.py:Class"
            )
    return {tool.schema["name"]: tool for tool in tools}


def _format(config: EnvConfig, tokenizer: Any, chat: ChatConfig) -> str:
    """How calls are written; "auto" = as the chat template writes them."""
    if config.format != "auto":
        return config.format
    try:
        return calls.detect(find_template(tokenizer, chat, tools=[{}]))
    except ValueError as error:
        raise UserError(f"--env.format auto: {error}") from error
