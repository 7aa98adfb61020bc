"""From EnvConfig to the conversations of a run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from jaxrl_llm.data.chat import prompt_messages
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.template import ChatRenderer
from jaxrl_llm.envs.calls import ToolEnv, check_arguments, parse_calls, render_call
from jaxrl_llm.envs.config import EnvConfig, ToolsConfig
from jaxrl_llm.envs.dialogue import Conversations, check_template
from jaxrl_llm.envs.env import Env, Tool
from jaxrl_llm.envs.formats import FORMATS, ToolCall
from jaxrl_llm.envs.python_file import load_env, load_tool
from jaxrl_llm.envs.tools import TOOLS
from jaxrl_llm.envs.tools.mcp_server import McpServer
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.engine import Dialogue, Request
from jaxrl_llm.user_file import did_you_mean

if TYPE_CHECKING:
    from jaxrl_llm.envs.gateway.gateway import Gateway

SAMPLE_CALL = ToolCall(
    "weather", {"city": "Oslo", "days": 3, "units": ["mm", "C"], "detail": {"hourly": True}}
)
"""A call with an argument of each type that formats write differently."""
SAMPLE_TYPES = {"city": "string", "days": "integer", "units": "array", "detail": "object"}
SAMPLE_SCHEMA = {
    "name": SAMPLE_CALL.name,
    "description": "The forecast.",
    "parameters": {
        "type": "object",
        "properties": {name: {"type": type, "description": name} for name, type in SAMPLE_TYPES.items()},
        "required": ["city"],
    },
}
SAMPLE_CONTENT = "turn 7d20e1 of the policy"  # in no template
MAX_SHOWN = 300  # characters of a call in a message


def detect_format(tokenizer: Any, chat: ChatConfig) -> tuple[str, str]:
    """Return (format of the tool calls of a chat template, a call in it).

    If no format reads the calls that a template renders, its prompt may show an example in a known format
    (Llama 4's prompt asks for a list of Python calls, but its template renders earlier calls without the
    list).

    Raises:
        UserError: no format reads the call that the template writes; shows the call.
    """
    prompt, turn = _written_call(tokenizer, chat)
    for name in FORMATS:
        calls = parse_calls(turn, name)
        if [check_arguments(c, SAMPLE_SCHEMA) if isinstance(c, ToolCall) else c for c in calls] == [
            SAMPLE_CALL
        ]:
            return name, turn
    for name, known in FORMATS.items():
        if known.example in prompt:
            return name, render_call(SAMPLE_CALL, name)
    written = f"it writes {turn[:MAX_SHOWN]!r}" if SAMPLE_CALL.name in turn else "it writes none"
    raise UserError(
        "the chat template shows no format of tool calls that is known here: for a call of the tool weather "
        f"{written}. Name the format that the model uses, one of {', '.join(FORMATS)}"
    )


def shows_tools(tokenizer: Any, chat: ChatConfig) -> bool:
    """Return whether the policy reads the tools of a run in its prompts."""
    if chat.render == "plain":
        return False
    try:
        return SAMPLE_CALL.name in _written_call(tokenizer, chat)[0]
    except UserError:  # it refuses this chat, and may take others
        return True


def _written_call(tokenizer: Any, chat: ChatConfig) -> tuple[str, str]:
    """Return (a prompt with a tool, the turn that answers it with a call), as the template writes them."""
    question = ({"role": "user", "content": "Is it warm outside?"},)
    columns = {"tools": [{"type": "function", "function": SAMPLE_SCHEMA}]}
    example = Example(question, None, columns=columns, where="a tool call")
    asked = prompt_messages(example, chat) or list(question)
    function = {"name": SAMPLE_CALL.name, "arguments": SAMPLE_CALL.arguments}
    calls = [{"type": "function", "id": "call00000", "function": function}]
    called, said = (
        ChatRenderer(tokenizer, [*asked, {"role": "assistant", **turn}], example, chat)
        for turn in ({"content": "", "tool_calls": calls}, {"content": SAMPLE_CONTENT})
    )
    text, header = called.render(), said.render().partition(SAMPLE_CONTENT)[0]
    start = next((i for i, (a, b) in enumerate(zip(header, text, strict=False)) if a != b), len(header))
    if start < len(header):  # the call has another header: not from the middle of a token
        start = max(text.rfind(end, 0, start) for end in "\n>") + 1
    turn = text[start:].rstrip()
    while end := next((token for token in called.controls if turn.endswith(token)), ""):
        turn = turn.removesuffix(end).rstrip()
    return called.render(len(asked), generation_prompt=True), turn


REWRITES = (
    "the chat template rewrites earlier turns: each turn is trained after the context that it had "
    "(--env.history exact), and turns that are read again count towards --max_response_tokens"
)
SEARCH = 'an MCP server now: --env.tools "mcp:python examples/search_server.py CORPUS" (docs/agents_tools.md)'


class DialogueSource(Protocol):
    """The environment of a run: `Conversations`, or the `Gateway` of programs."""

    columns: dict[str, Any]
    """Columns that every row gets: the tools, for the chat template to show."""
    line: str
    """A line on it, for the start of a run; "" = none."""

    opens_with: int
    """Tokens of the longest prompt, if programs open conversations; 0 = the prompts of the rows do."""

    def dialogue(self, prompts: Sequence[Prompt], key: jax.Array) -> Dialogue:
        """Return the environment of responses to these prompts; the same key, the same seeds."""


def make_requests(
    env: DialogueSource | None, prompts: Sequence[Prompt], responses: int, max_tokens: int
) -> list[Request]:
    """Return a request of `responses` to each prompt."""
    longest = env.opens_with if env else 0
    ids = [np.zeros(longest, np.int32) if longest else prompt.ids for prompt in prompts]
    return [Request(own, i, responses, max_tokens, opens=longest > 0) for i, own in enumerate(ids)]


def make_gateway(config: EnvConfig, tokenizer: Any, chat: ChatConfig, **sizes: Any) -> Gateway:
    """Return the gateway of a run, which listens; `sizes` are as of `Gateway`. Raises UserError."""
    from jaxrl_llm.envs.gateway.gateway import Gateway  # aiohttp is slow to import: not without programs

    call_format = functools.cache(lambda: _format(config, tokenizer, chat)[0])
    return Gateway(config, tokenizer, chat, call_format=call_format, **sizes)


def make_conversations(config: EnvConfig, tokenizer: Any, chat: ChatConfig) -> Conversations | None:
    """Return the conversations of a run; None if the policy writes only one turn.

    Raises:
        UserError: the environment or a tool does not exist or cannot work; the message has the fix.
    """
    if not config.active:
        return None
    columns, lines = {}, []
    if config.tools:
        tools = make_tools(config.tools, config.toolbox)
        columns["tools"] = [{"type": "function", "function": tool.schema} for tool in tools.values()]
        format, line = _format(config, tokenizer, chat)
        lines.append(line)
        env: Env = ToolEnv(tools, format, config.tool_timeout, config.max_calls)
    else:
        env = load_env(config.name)
    if (role := getattr(env, "role", "user")) and check_template(
        tokenizer, chat, role, columns, history=config.history, rounds=config.max_turns - 1
    ):
        lines.append(REWRITES)
    return Conversations(env, config, tokenizer, chat, columns=columns, line="\n".join(lines))


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
        elif name == "search":
            raise UserError(f"--env.tools search: {SEARCH}")
        else:
            raise UserError(
                f"--env.tools {name}: unknown; known are {', '.join(TOOLS)}, mcp:COMMAND, and yours: "
                f"my_tools.py:Class.{did_you_mean(name, TOOLS)}"
            )
        for tool in made:
            if tool.schema["name"] in tools:
                raise UserError(f"--env.tools {name}: another tool is called {tool.schema['name']} too")
            tools[tool.schema["name"]] = tool
    return tools


def _format(config: EnvConfig, tokenizer: Any, chat: ChatConfig) -> tuple[str, str]:
    """Return (format of tool calls, a line on it for the start); "auto" = the chat template's."""
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
