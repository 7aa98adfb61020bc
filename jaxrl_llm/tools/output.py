"""Output files of commands that take hours: written window by window, continued after a kill; progress."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxrl_llm.data.config import is_date
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.host.devices import open_devices
from jaxrl_llm.host.files import load_json, load_object, replace_text, sync_to_disk
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.recipe.keys import iter_fields
from jaxrl_llm.report.progress import format_duration

Dated = TypeVar("Dated")
"""Arguments of a command with `chat`, `out` and `resume`."""
SPEED_KEYS = (
    *("out", "resume", "slots", "batch_tokens", "window", "mesh."),
    *("reward.workers", "reward.concurrency"),
)
"""Keys, or prefixes of keys, that do not change the output."""
INPUT_SIZE = "size of the input"  # a setting
BAR_WIDTH = 20  # characters


class ResumableOutput:
    """A JSONL file that grows by windows of rows, with a record (".NAME.progress") beside it.

    The record has the settings and the number of input rows done, and identifies our files. A complete file
    of the same settings is kept until the first window replaces it. A context manager: if it exits before
    `finish`, the number of finished rows is printed. A killed command continues after the last whole window;
    process 0 writes.

    Args:
        settings: of `settings_of`; a file with other settings is refused.
        resume: continue a partial file; False = overwrite any file.
        date: of chat templates, kept for `with_date`.

    Raises:
        UserError: the file has other settings, or is not ours.
    """

    def __init__(self, path: Path, settings: Mapping[str, str], resume: bool = True, date: str = ""):
        self.path, self.settings, self.date = path, dict(settings), date
        self.progress = progress_file(path)
        self.complete = False
        self.num_bytes, self.rows_done = on_first(lambda: self._open(resume))

    def append(self, rows: Iterable[str], rows_done: int) -> None:
        """Add lines; the first `rows_done` rows of the input are done with them."""
        if jax.process_index() == 0:
            data = "".join(rows).encode()
            if not self.num_bytes:  # a kill before the next record leaves a file that is known as ours
                self._record(self.rows_done)
            with self.path.open("ab" if self.num_bytes else "wb") as file:
                file.write(data)
                sync_to_disk(file)
            self.num_bytes += len(data)
            self._record(rows_done)
        self.rows_done = rows_done

    def __enter__(self) -> ResumableOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self.complete or jax.process_index():
            return
        if self.rows_done:
            done = f"{self.rows_done:,} rows of the input are done. The same command continues after them"
        else:
            done = "no row of the input is done"
        print_progress(f"\n{self.path} is not complete: {done}.")

    def finish(self) -> None:
        """Record that the file is complete."""
        self.complete = True
        if jax.process_index() == 0:
            self._record(self.rows_done, complete_at=self.path.stat().st_mtime_ns)

    def _record(self, rows_done: int, **more: int) -> None:
        state = {"rows": rows_done, "bytes": self.num_bytes, "settings": self.settings, "date": self.date}
        replace_text(self.progress, json.dumps({**state, **more}), sync=False)

    def _open(self, resume: bool) -> tuple[int, int]:
        """Return (bytes, input rows) of a partial file, cut to whole windows; (0, 0) = start over."""
        state = self._read_record() if resume else None
        if state is None:
            if resume and self.path.is_file() and self.path.stat().st_size:
                raise UserError(
                    f"--out {self.path}: exists, and is not this command's output, or was changed since. Set "
                    "another --out, or --resume False to write the file anew."
                )
            return 0, 0
        complete, before = "complete_at" in state, state["settings"]
        keys = (before.keys() | self.settings.keys()) - ({INPUT_SIZE} if complete else set())
        if changed := sorted(k for k in keys if before.get(k) != self.settings.get(k)):
            what = "output" if complete else "partial output"
            fix = "Set another --out" if complete else "Repeat that command to continue it"
            raise UserError(
                f"--out {self.path}: {what} of a command with another {', '.join(changed)}. {fix}, or set "
                "--resume False to write the file anew."
            )
        if complete:
            return 0, 0
        os.truncate(self.path, state["bytes"])
        return state["bytes"], state["rows"]

    def _read_record(self) -> dict[str, Any] | None:
        """Return the record of the file; None if it is missing, damaged, or of another file."""
        try:
            state, file = load_json(self.progress.read_text()), self.path.stat()
            ours = file.st_size >= state["bytes"] and state["rows"] >= 0
            ours = ours and state.get("complete_at", file.st_mtime_ns) == file.st_mtime_ns
            return state if ours and isinstance(state["settings"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def progress_file(path: Path) -> Path:
    """Return the record beside an output file."""
    return path.with_name(f".{path.name}.progress")


def with_date(args: Dated) -> Dated:
    """Return the settings of a command with a date for chat templates, so that all its rows have the same
    date: the date of the partial output that the command continues, else today. A collective.
    """
    if args.chat.date:
        return args
    open_devices()
    date = on_first(lambda: _partial_date(args) or str(datetime.date.today()))
    return dataclasses.replace(args, chat=dataclasses.replace(args.chat, date=date))


def _partial_date(args: Any) -> str:
    """Return the date of the partial output that a command continues, or ""."""
    state = load_object(progress_file(args.out)) if args.resume else {}
    date = "" if "complete_at" in state else state.get("date")
    return date if isinstance(date, str) and is_date(date) else ""


def settings_of(args: Any, source: Path) -> dict[str, str]:
    """Return a hash of each setting that determines the output, and of the size of the input file."""
    names = {key: field.value for key, field in iter_fields(args) if not key.startswith(SPEED_KEYS)}
    names[INPUT_SIZE] = source.stat().st_size if source.is_file() else 0
    return {key: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for key, value in names.items()}


def json_line(row: dict[str, Any], model: str) -> str:
    """Return a row of an output file.

    Raises:
        RunError: a number is NaN or infinite, which JSON has no word for.
    """
    try:
        return json.dumps(row, allow_nan=False) + "\n"
    except ValueError as error:
        raise RunError(
            f"{model} computes log-probs that are NaN or infinite: its activations overflow. Try --dtype "
            "float32, or another checkpoint."
        ) from error


@dataclasses.dataclass
class ProgressBar:
    """Rows done, rate and remaining time on stderr; on a terminal one line is redrawn."""

    total: int
    unit: str
    done: int = 0

    def __post_init__(self):
        self.started, self.first = time.monotonic(), self.done

    def update(self, done: int, note: str = "") -> None:
        """Show that `done` rows of the input are done."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = (done - self.first) / seconds
        left = f"{format_duration((self.total - done) / rate)} left" if rate and done < self.total else ""
        parts = [f"{done}/{self.total} {self.unit}", f"{rate:,.1f} {self.unit}/s", note, left]
        text = ", ".join(part for part in parts if part)
        if jax.process_index():
            return
        if not sys.stderr.isatty():
            print_progress(text)
            return
        filled = BAR_WIDTH * done // max(self.total, 1)
        bar = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"
        end = "\n" if done >= self.total else ""
        print(f"\r\x1b[K{bar} {text}", end=end, file=sys.stderr, flush=True)


def print_progress(text: str) -> None:
    """Print a line to stderr, which keeps stdout free."""
    print(text, file=sys.stderr, flush=True)
