"""Settings of environments and tools."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_llm.ranges import CountOrZero, Range


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
class GatewayConfig:
    """Programs that call the policy over HTTP (docs/agents.md): a trajectory is the run of a program."""

    command: str = ""
    """Program of each trajectory, such as "python my_agent.py"; it reads its row as JSON on standard input,
    and finds address and key of the gateway in OPENAI_BASE_URL and OPENAI_API_KEY. "" = none is started."""
    host: str = "127.0.0.1"
    """Address to listen on; others than this machine's own are open to the network."""
    port: Annotated[int, Range(0, 65535)] = 0
    """Port to listen on; 0 = any free one. With a port and no command, programs elsewhere connect."""
    copies: CountOrZero = 0
    """Programs that run at once; more wait. 0 = as many as rollout.slots."""
    seconds: Annotated[float, Range(0.1, 1e6, usual="600 is usual")] = 600.0
    """Wall-clock time of a program; one that takes longer is killed, and its trajectory masked."""
    memory_mb: CountOrZero = 4096
    """Address space of each process of a program; 0 = no limit."""
    reward: str = "verifier"
    """Reward of a program that posts none: of the run's reward functions for the last turn (verifier), 1 for
    exit code 0 and 0 for exit code 1 (exit), of a function of yours for the whole trajectory, such as
    my_agent.py:reward, or none, which masks the trajectory (post)."""

    @property
    def active(self) -> bool:
        """True if programs call the policy."""
        return bool(self.command or self.port)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            yield "command", f"is {self.command!r}: {error}. Write it as for a shell."
        else:
            if self.command and not shutil.which("".join(words[:1])):
                yield "command", f"is {self.command!r}: there is no program {''.join(words[:1])}."
        if self.reward not in ("verifier", "exit", "post") and ".py:" not in self.reward:
            yield "reward", f"is {self.reward!r:.80}: it must be verifier, exit, post, or FILE.py:NAME."
        elif self.reward not in ("verifier", "post") and not self.command:
            yield "reward", f"is {self.reward:.80}: programs elsewhere do not end here. They post a reward."


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
    history: Literal["exact", "strict", "keep"] = "exact"
    """Chat templates that render earlier turns differently once more follow (some drop thoughts): let the
    policy read them so, and train each turn after the context that it had (exact), refuse such templates
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
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    """Programs that call the policy over HTTP."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        if self.name and self.tools:
            yield (
                "name",
                f"is {self.name}, and env.tools is set, which is an environment too: give one of the two.",
            )
        if self.gateway.active and (self.name or self.tools):
            set_too = "name" if self.name else "tools"
            yield set_too, "is set, and env.gateway is an environment too: give one of the two."
        if doubled := [name for name in self.tools if self.tools.count(name) > 1]:
            yield "tools", f"has {doubled[0]} twice: name each tool once."

    @property
    def active(self) -> bool:
        """True if the policy writes several turns: an environment, a tool or the gateway is set."""
        return bool(self.name or self.tools or self.gateway.active)

    @property
    def rewards(self) -> bool:
        """True if the environment may give the reward itself."""
        return bool(self.name) or (self.gateway.active and self.gateway.reward != "verifier")
