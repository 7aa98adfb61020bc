"""The tool `python`: runs a program in the sandbox."""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

from jaxrl_llm.envs.tools.base import ToolsConfig
from jaxrl_llm.envs.tools.sandbox import Sandbox


class Python:
    """Each call is a program of its own: nothing is kept from one to the next.

    Raises:
        SandboxError: no sandbox can be had here (see sandbox.py).
    """

    schema: ClassVar[dict[str, Any]] = {
        "name": "python",
        "description": "Runs a Python program and returns what it prints. It has the standard library, no "
        "network and no subprocesses; every call starts afresh.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program; print() what to see."}},
            "required": ["code"],
        },
    }

    def __init__(self, config: ToolsConfig):
        self._sandbox = Sandbox(config.python)
        self.turn = asyncio.Semaphore(config.python.concurrent or os.cpu_count() or 1)

    async def call(self, arguments: dict[str, Any]) -> str:
        return await self._sandbox.run(arguments["code"])
