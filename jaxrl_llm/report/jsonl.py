"""JSON-lines files that survive kills and full disks: one object with a "step" per line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the rows, without lines that a kill or a full disk cut short."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append lines of strict JSON (NaN is a ValueError), also after a line that was cut short."""
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read() == b"\n" else "\n" + text
        file.write(text.encode())


def truncate_after(path: Path, step: int) -> None:
    """Delete the lines of steps after `step`, and those that were cut short."""
    if path.exists():
        kept = (json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step)
        replace_text(path, "".join(kept))


def replace_text(path: Path, text: str) -> None:
    """Replace a file by one rename: a kill leaves either the old or the new file."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
