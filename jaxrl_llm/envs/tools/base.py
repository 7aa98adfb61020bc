"""What a tool is, and the settings of those in the box."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl_llm.errors import UserError


class ToolError(Exception):
    """A call that failed; the model reads the text."""


class Tool(Protocol):
    """Something that a model may call. One instance serves many conversations of one event loop.

    One of which only so many calls run at once has a semaphore `turn`: to wait for it costs a call no time.
    """

    schema: dict[str, Any]
    """OpenAI's function schema: {"name", "description", "parameters": a JSON schema}."""

    async def call(self, arguments: dict[str, Any]) -> str:
        """What the model reads. `arguments` have been checked against the schema.

        Raises:
            ToolError: the call failed; its text is what the model reads.
        """


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of one program that a model runs. It is one process with one thread."""

    seconds: float = 10.0
    """Time on the clock."""
    cpu_seconds: int = 5
    """Time on a processor."""
    memory_mb: int = 512
    """Address space."""
    disk_mb: int = 16
    """Files in its own /tmp, in memory on top of memory_mb, gone when it ends."""
    output_bytes: int = 8000
    """What it may print; of more, the beginning and the end are kept."""
    code_chars: int = 100_000
    """Length of the program."""
    concurrent: int = 0
    """Programs that run at once (0 = one a processor); more wait, which costs them none of their seconds."""
    allow_unsandboxed: bool = False
    """Where bubblewrap is missing, run programs WITHOUT a sandbox: they can read and delete your files and
    use the network. Only for a machine with nothing to lose."""

    def __post_init__(self):
        for name in ("seconds", "cpu_seconds", "memory_mb", "disk_mb", "output_bytes", "code_chars"):
            if getattr(self, name) <= 0:
                raise UserError(f"--env.toolbox.python.{name} must be above 0, not {getattr(self, name)}")
        if self.concurrent < 0:
            raise UserError(f"--env.toolbox.python.concurrent must be 0 or more, not {self.concurrent}")


@dataclass(frozen=True)
class SearchConfig:
    """The corpus that is searched."""

    path: str = ""
    """JSONL with "text" (or "contents") and "title" in each line, or a folder of .txt and .md files."""
    results: int = 3
    """Passages in an answer."""
    passage_words: int = 200
    """Words of a passage; longer texts are cut into several."""

    def __post_init__(self):
        for name in ("results", "passage_words"):
            if getattr(self, name) < 1:
                raise UserError(f"--env.toolbox.search.{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class ToolsConfig:
    """Settings of the tools in the box."""

    python: SandboxConfig = field(default_factory=SandboxConfig)
    """The sandbox of the tool `python`."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """The corpus of the tool `search`."""
