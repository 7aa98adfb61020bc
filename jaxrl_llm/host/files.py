"""Durable files, which are on the disk when a call returns, and the user's cache folder."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

MAX_DEPTH = 100  # of objects and lists in one another; chats with tools have less than 20


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache: $XDG_CACHE_HOME/jaxrl_llm/NAME, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm" / name


def sync_to_disk(file: BinaryIO) -> None:
    """Flush a file to the disk, so that it survives a power cut."""
    file.flush()
    os.fsync(file.fileno())


def load_json(text: str | bytes) -> Any:
    """Return a JSON value.

    Raises:
        ValueError: not JSON, or nested more than MAX_DEPTH deep, too deep for later readers.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    level = [value] if sum(map(text.count, brackets)) > MAX_DEPTH else []
    for _ in range(MAX_DEPTH):
        nested = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level = [*itertools.chain.from_iterable(nested)]
    if level:
        raise ValueError("nested too deeply")
    return value


def load_object(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file; {} if it cannot be read or is something else."""
    try:
        value = load_json(file.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def inode(path: Path) -> int:
    """Return the inode number of a file or folder, which identifies it; 0 if it does not exist."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def write_json(path: Path, tree: Any) -> None:
    """Write a JSON file, on the disk when this returns."""
    with path.open("wb") as file:
        file.write((json.dumps(tree, indent=2) + "\n").encode())
        sync_to_disk(file)


def replace_lines(path: Path, rows: Sequence[Any], sync: bool = True) -> None:
    """Write lines of JSON by one rename."""
    replace_text(path, "".join(json.dumps(row) + "\n" for row in rows), sync)


def replace_text(path: Path, text: str, sync: bool = True) -> None:
    """Write a file by one rename: a kill or a full disk leaves the old or the new file. Creates its folder.

    Args:
        sync: also safe against a power cut; takes milliseconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode())
            if sync:
                sync_to_disk(file)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
