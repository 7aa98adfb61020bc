"""The environment of tools: carries out the tool calls of a turn; results are messages of the role tool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxrl_llm.data.rows import Example
from jaxrl_llm.envs.calls import InvalidToolCall, ToolCall, check_arguments, parse_calls
from jaxrl_llm.envs.env import Step, Tool, ToolError, Turn


class ToolResult(NamedTuple):
    """The result of one tool call."""

    text: str
    error: bool = False
    timeout: bool = False


class ToolEnv:
    """A turn without a tool call ends the conversation; the verifier scores it.

    `role` is that of its messages. It limits the time of each call itself (`own_limits`).

    Args:
        tools: by name.
        format: of tool calls, a key of calls.FORMATS.
        timeout: seconds one call may take.
        max_calls: of one turn that are carried out.
    """

    role = "tool"
    own_limits = True

    def __init__(self, tools: Mapping[str, Tool], format: str, timeout: float, max_calls: int = 16):
        self.tools, self.format, self.timeout, self.max_calls = tools, format, timeout, max_calls

    async def reset(self, example: Example, seed: int) -> None:
        """Return no state: tools keep none of a conversation."""
        return None

    async def step(self, state: None, turn: Turn) -> Step:
        """Return the results of the turn's tool calls."""
        calls = parse_calls(turn.text, self.format)
        if not calls or turn.last:
            return Step(done=True, tool_calls=len(calls))
        results = await asyncio.gather(*map(self._run, calls[: self.max_calls]))
        too_many = f"error: only the first {self.max_calls} calls of a turn are carried out"
        results += [ToolResult(too_many, error=True)] * (len(calls) - len(results))
        messages = [
            {"role": "tool", "name": getattr(call, "name", ""), "content": result.text}
            for call, result in zip(calls, results, strict=True)
        ]
        errors, timeouts = sum(r.error for r in results), sum(r.timeout for r in results)
        return Step(messages, tool_calls=len(calls), tool_errors=errors, timeouts=timeouts)

    async def _run(self, call: ToolCall | InvalidToolCall) -> ToolResult:
        """Carry out one call; errors become text for the policy."""
        if isinstance(call, ToolCall):
            if call.name not in self.tools:
                known = ", ".join(self.tools)
                return ToolResult(f"error: there is no tool {call.name!r}, only {known}", error=True)
            call = check_arguments(call, self.tools[call.name].schema)
        if isinstance(call, InvalidToolCall):
            return ToolResult(f"error: {call.problem}", error=True)
        tool = self.tools[call.name]
        try:
            async with getattr(tool, "turn", contextlib.nullcontext()), asyncio.timeout(self.timeout):
                return ToolResult(str(await tool.call(call.arguments)))
        except TimeoutError:
            return ToolResult(f"error: stopped after {self.timeout:g} s without a result", True, True)
        except ToolError as error:
            return ToolResult(f"error: {error}", error=True)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # met with these arguments
            if asyncio.current_task().cancelling():  # by the end of the run, not by the tool
                raise
            return ToolResult(f"error: {type(error).__name__}: {error}", error=True)
