"""Parts that other installed packages add, found by their entry points."""

from __future__ import annotations

import importlib.metadata
from typing import Any


def load_extensions(group: str) -> list[Any]:
    """Return the objects that installed packages list under the entry points `jaxrl_llm.GROUP`.

    Args:
        group: "commands" (tables like `jaxrl_llm.__main__.COMMANDS`), "unknown_keys" or
            "unknown_algorithms" (functions that answer a name of another system; "" = unknown).
    """
    points = importlib.metadata.entry_points(group=f"jaxrl_llm.{group}")
    return [point.load() for point in sorted(points, key=lambda point: point.name)]
