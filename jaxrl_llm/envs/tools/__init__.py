"""Tools in the box: TOOLS makes them by name. A tool of your own is any object that is a `Tool`."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_llm.envs.tools.base import SandboxConfig, SearchConfig, Tool, ToolError, ToolsConfig
from jaxrl_llm.envs.tools.calculator import Calculator
from jaxrl_llm.envs.tools.python import Python
from jaxrl_llm.envs.tools.search import Search

TOOLS: dict[str, Callable[[ToolsConfig], Tool]] = {
    "calculator": Calculator,
    "python": Python,
    "search": Search,
}

__all__ = ["TOOLS", "SandboxConfig", "SearchConfig", "Tool", "ToolError", "ToolsConfig"]
