"""Settings of environments that answer the policy over several turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxrl_llm.envs.tools.base import ToolsConfig


@dataclass(frozen=True)
class EnvConfig:
    """Who answers the policy, and within which limits."""

    name: str = ""
    """A built-in environment (guess), or a file of yours: "my_env.py" or "my_env.py:Class"; "" = none,
    unless there are tools."""
    tools: tuple[str, ...] = ()
    """Tools that the policy may call, by their names; yours as "my_tools.py:Class", those of an MCP server as
    "mcp:COMMAND"."""
    format: Literal["auto", "hermes", "llama", "xml", "pythonic"] = "auto"
    """How calls are written; auto = as the chat template writes them."""
    history: Literal["strict", "keep"] = "strict"
    """A chat template that writes earlier turns in another way once more follow (some drop thoughts) is
    refused (strict), or what it adds follows the turns as they were written (keep)."""
    max_turns: int = 8
    """Turns of the policy at most."""
    max_calls: int = 16
    """Calls of tools that are carried out of one turn; the policy is told that the others were not."""
    tool_timeout: float = 30.0
    """Seconds one call of a tool, or one step of your own environment, may take, without the time that it
    waits for a free sandbox. A call that takes longer is cut off and the policy told; a step of an
    environment ends its conversation as failed."""
    max_observation_tokens: int = 1024
    """Longest reply to one turn; the rest is cut off and the policy told."""
    toolbox: ToolsConfig = field(default_factory=ToolsConfig)
    """Settings of the tools in the box."""

    @property
    def active(self) -> bool:
        """Whether there are conversations at all."""
        return bool(self.name or self.tools)
