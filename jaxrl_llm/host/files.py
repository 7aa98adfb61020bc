"""Durable files, which are on the disk when a call returns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO


def sync_to_disk(file: BinaryIO) -> None:
    """Flush a file to the disk, so that it survives a power cut."""
    file.flush()
    os.fsync(file.fileno())


def write_json(path: Path, tree: Any) -> None:
    """Write a JSON file, on the disk when this returns."""
    with path.open("wb") as file:
        file.write((json.dumps(tree, indent=2) + "\n").encode())
        sync_to_disk(file)


def replace_json(path: Path, tree: Any) -> None:
    """Write a JSON file by one rename: a kill leaves no part of it. Its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    write_json(temporary, tree)
    os.replace(temporary, path)
