"""Built-in tools: TOOLS makes them by name. A tool of the user is any object that is an `envs.env.Tool`."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_llm.envs.config import ToolsConfig
from jaxrl_llm.envs.env import Tool
from jaxrl_llm.envs.tools.calculator import Calculator
from jaxrl_llm.envs.tools.sandbox import Python

TOOLS: dict[str, Callable[[ToolsConfig], Tool]] = {"calculator": lambda _: Calculator(), "python": Python}
