"""The environment of tools: calls in a turn are carried out, their results are messages of the role tool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from jaxrl_llm.data.rows import Example
from jaxrl_llm.envs import calls
from jaxrl_llm.envs.calls import BadCall, Call
from jaxrl_llm.envs.env import Step, Turn
from jaxrl_llm.envs.tools.base import Tool, ToolError


class Result(NamedTuple):
    """What a call came to."""

    text: str
    error: bool = False
    timeout: bool = False


class ToolEnv:
    """A turn without a call is the answer; the verifier judges it.

    `role` is that of its messages. It limits the time of each call itself (`own_limits`).

    Args:
        tools: by name.
        form: how calls are written, a key of calls.FORMATS.
        timeout: seconds one call may take.
        most: calls of one turn that are carried out.
    """

    role = "tool"
    own_limits = True

    def __init__(self, tools: Mapping[str, Tool], form: str, timeout: float, most: int = 16):
        self.tools, self.form, self.timeout, self.most = tools, form, timeout, most

    async def reset(self, example: Example, seed: int) -> None:
        return None

    async def step(self, state: None, turn: Turn) -> Step:
        made = calls.parse(turn.text, self.form)
        if not made or turn.last:
            return Step(done=True, tool_calls=len(made))
        results = await asyncio.gather(*map(self._run, made[: self.most]))
        too_many = Result(f"error: only the first {self.most} calls of a turn are carried out", error=True)
        results += [too_many] * (len(made) - len(results))
        messages = [
            {"role": "tool", "name": getattr(call, "name", ""), "content": result.text}
            for call, result in zip(made, results, strict=True)
        ]
        errors, timeouts = sum(r.error for r in results), sum(r.timeout for r in results)
        return Step(messages, tool_calls=len(made), tool_errors=errors, timeouts=timeouts)

    async def _run(self, call: Call | BadCall) -> Result:
        """One call; whatever goes wrong is told to the policy."""
        if isinstance(call, Call):
            if call.name not in self.tools:
                known = ", ".join(self.tools)
                return Result(f"error: there is no tool {call.name!r}, only {known}", error=True)
            call = calls.checked(call, self.tools[call.name].schema)
        if isinstance(call, BadCall):
            return Result(f"error: {call.problem}", error=True)
        tool = self.tools[call.name]
        try:
            async with getattr(tool, "turn", contextlib.nullcontext()), asyncio.timeout(self.timeout):
                return Result(await tool.call(call.arguments))
        except TimeoutError:
            return Result(f"error: stopped after {self.timeout:g} s without a result", True, True)
        except ToolError as error:
            return Result(f"error: {error}", error=True)
        except Exception as error:  # a fault of the tool, met with these arguments
            return Result(f"error: {type(error).__name__}: {error}", error=True)
