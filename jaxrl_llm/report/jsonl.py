"""JSON-lines files that survive kills and full disks: one object with a "step" per line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.host.files import load_json, replace_lines

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the rows, without lines that a kill or a full disk cut short."""
    return scan_rows(path)[0]


def scan_rows(path: Path) -> tuple[list[Row], list[int]]:
    """Return the rows, and the numbers (from 1) of the lines that are not rows."""
    rows: list[Row] = []
    damaged = []
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.exists() else [], 1):
        row = None
        with contextlib.suppress(ValueError):
            row = load_json(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif line.strip():
            damaged.append(number)
    return rows, damaged


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append lines of strict JSON (NaN is a ValueError), also after a line that was cut short."""
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read() == b"\n" else "\n" + text
        file.write(text.encode())


def truncate_after(path: Path, step: int) -> None:
    """Delete the lines of steps after `step`, and partial lines."""
    if path.exists():
        replace_lines(path, [row for row in read_rows(path) if row["step"] <= step], sync=False)
