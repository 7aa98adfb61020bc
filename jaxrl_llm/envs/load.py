"""From EnvConfig to the conversations of a run."""

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
from jaxrl_llm.envs.calls import render_call
from jaxrl_llm.envs.config import EnvConfig, ToolsConfig
from jaxrl_llm.envs.detect import SAMPLE_CALL, detect_format, shows_tools
from jaxrl_llm.envs.dialogue import EnvDialogue, check_template
from jaxrl_llm.envs.env import Env, Tool
from jaxrl_llm.envs.python_file import load_env, load_tool
from jaxrl_llm.envs.tool_env import ToolEnv
from jaxrl_llm.envs.tools import TOOLS
from jaxrl_llm.envs.tools.mcp_server import McpServer
from jaxrl_llm.errors import UserError
from jaxrl_llm.user_file import did_you_mean


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
    """Columns that every row gets: the tools, for the chat template to show."""
    line: str = ""
    """A line on the format of tool calls, for the start of a run; "" = there are no tools."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self):
        self._thread = threading.Thread(target=self.loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def dialogue(self, prompts: Sequence[Prompt], key: jax.Array) -> EnvDialogue:
        """Return the environment of responses to these prompts; the same key, the same seeds."""
        seed = int(np.asarray(jax.random.key_data(key)).ravel()[-1])
        return EnvDialogue(self.env, self.config, prompts, self.tokenizer, self.chat, seed, self.loop)

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs; an environment that blocks its thread is left behind."""

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
    """Return the conversations of a run; None where the policy writes one turn only.

    Raises:
        UserError: what does not exist or cannot work, with the fix.
    """
    if not config.active:
        return None
    columns, line = {}, ""
    if config.tools:
        tools = make_tools(config.tools, config.toolbox)
        columns["tools"] = [{"type": "function", "function": tool.schema} for tool in tools.values()]
        format, line = _format(config, tokenizer, chat)
        env: Env = ToolEnv(tools, format, config.tool_timeout, config.max_calls)
    else:
        env = load_env(config.name)
    if role := getattr(env, "role", "user"):
        strict, rounds = config.history == "strict", config.max_turns - 1
        check_template(tokenizer, chat, role, columns, strict, rounds=rounds)
    return Conversations(env, config, tokenizer, chat, columns, line)


def make_tools(names: Sequence[str], config: ToolsConfig) -> dict[str, Tool]:
    """Return tools by the names that the policy calls them by. Raises UserError as `make_conversations`."""
    tools: dict[str, Tool] = {}
    for name in names:
        if name in TOOLS:
            made: Sequence[Tool] = [TOOLS[name](config)]
        elif name.startswith("mcp:"):
            made = McpServer(name.removeprefix("mcp:")).tools
        elif ".py:" in name:
            made = [load_tool(name)]
        else:
            raise UserError(
                f"--env.tools {name}: unknown; there are {', '.join(TOOLS)}, mcp:COMMAND, and yours: "
                f"my_tools.py:Class.{did_you_mean(name, TOOLS)}"
            )
        for tool in made:
            if tool.schema["name"] in tools:
                raise UserError(f"--env.tools {name}: another tool is called {tool.schema['name']} too")
            tools[tool.schema["name"]] = tool
    return tools


def _format(config: EnvConfig, tokenizer: Any, chat: ChatConfig) -> tuple[str, str]:
    """Return (format of tool calls, a line on it for the start); "auto" = that of the chat template."""
    notes = "" if shows_tools(tokenizer, chat) else "; the prompts do not show the tools to the policy"
    try:
        written, call = detect_format(tokenizer, chat)
    except UserError as error:
        if config.format == "auto":
            raise UserError(f"--env.format auto: {error}") from error
        written = config.format
    format = written if config.format == "auto" else config.format
    if format != written:
        notes += f"; the chat template writes them as {written}"
    if config.format != "auto":
        call = render_call(SAMPLE_CALL, format)
    return format, f"tool calls are read as {format}, such as {call!r}{notes}"
