"""Settings of environments and tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_llm.ranges import Range


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of one program that a model runs. It is one process with one thread."""

    seconds: Annotated[float, Range(0.01, 3600)] = 10.0
    """Wall-clock time."""
    cpu_seconds: Annotated[int, Range(1, 3600)] = 5
    """Time on a processor."""
    memory_mb: Annotated[int, Range(64, 1 << 20, usual="512 is usual")] = 512
    """Address space."""
    disk_mb: Annotated[int, Range(1, 1 << 16)] = 16
    """Files in its own /tmp, in memory on top of memory_mb, gone when it ends."""
    max_files: Annotated[int, Range(8, 1 << 20)] = 1000
    """Files and folders in its own /tmp."""
    output_bytes: Annotated[int, Range(2, 1 << 24)] = 8000
    """Largest output; of more, the beginning and the end are kept."""
    code_chars: Annotated[int, Range(1, 10_000_000)] = 100_000
    """Length of the program."""
    concurrent: Annotated[int, Range(0, 4096)] = 0
    """Programs that run at once (0 = one a processor); more wait, which costs them none of their seconds."""
    allow_unsandboxed: bool = False
    """Run programs WITHOUT a sandbox if bubblewrap is missing: they can read and delete your files and use
    the network. Only for a machine with nothing to lose."""


@dataclass(frozen=True)
class ToolsConfig:
    """Settings of the built-in tools."""

    python: SandboxConfig = field(default_factory=SandboxConfig)
    """The sandbox of the tool `python`."""


@dataclass(frozen=True)
class EnvConfig:
    """The environment or the tools of a run, and their limits."""

    name: str = ""
    """A built-in environment (guess), or a file of yours: "my_env.py" or "my_env.py:Class"; "" = none, or the
    environment of `tools`."""
    tools: tuple[str, ...] = ()
    """Tools that the policy may call, by their names; yours as "my_tools.py:Class", tools of an MCP server as
    "mcp:COMMAND"."""
    format: Literal["auto", "hermes", "llama", "xml", "pythonic"] = "auto"
    """Format of tool calls; auto = the chat template's."""
    history: Literal["strict", "keep"] = "strict"
    """Chat templates that render earlier turns differently once more follow (some drop thoughts): refuse them
    (strict), or keep the turns as generated and append the template's additions (keep)."""
    max_turns: Annotated[int, Range(1, 10_000, usual="8 is usual")] = 8
    """Largest number of turns of the policy."""
    max_calls: Annotated[int, Range(1, 10_000, usual="16 is usual")] = 16
    """Largest number of tool calls that are carried out in one turn; the others return an error."""
    tool_timeout: Annotated[float, Range(0.0, 1e6, open_low=True, usual="30 is usual")] = 30.0
    """Time limit in seconds of a tool call, or of a step of your environment, without the wait for a free
    sandbox. A longer call returns an error; a longer step ends its conversation as failed."""
    max_observation_tokens: Annotated[int, Range(1, 10_000_000, usual="1024 is usual")] = 1024
    """Longest observation after one turn; the rest is cut off, with a note to the policy."""
    toolbox: ToolsConfig = field(default_factory=ToolsConfig)
    """Settings of the built-in tools."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        if self.name and self.tools:
            yield (
                "name",
                f"is {self.name}, and env.tools is set, which is an environment too: give one of the two.",
            )
        if doubled := [name for name in self.tools if self.tools.count(name) > 1]:
            yield "tools", f"has {doubled[0]} twice: name each tool once."

    @property
    def active(self) -> bool:
        """True if an environment or a tool is set."""
        return bool(self.name or self.tools)
