"""Output files of commands that take hours: written window by window, continued after a kill; progress."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.host.files import replace_text, sync_to_disk
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.recipe.keys import iter_fields
from jaxrl_llm.report.progress import format_duration
from jaxrl_llm.rewards.config import RewardConfig

SPEED_KEYS = ("out", "resume", "slots", "batch_tokens", "mesh.", "reward.workers", "reward.concurrency")
"""Keys, or their beginnings, that do not change what is written."""
BAR_WIDTH = 20  # characters


class ResumableOutput:
    """A JSONL file to which windows of rows are added, and beside it the number of input rows done.

    A complete file of that name is kept until the first window is there to replace it.

    A context manager: what ends it before `finish` is followed by a line on what there is. A command that was
    killed continues behind the last whole window; process 0 writes. The file beside it
    (".NAME.progress") is removed at the end.

    Args:
        settings: of `settings_of`; a partial file of others is refused.
        resume: continue a partial file; False = write it anew.

    Raises:
        UserError: there is a partial file of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, str], resume: bool = True):
        self.path, self.settings = path, dict(settings)
        self.progress = path.with_name(f".{path.name}.progress")
        self.complete = False
        self.num_bytes, self.rows_done = on_first(lambda: self._open(resume))

    def append(self, rows: Iterable[str], rows_done: int) -> None:
        """Add lines; the first `rows_done` rows of the input are done with them."""
        self.rows_done = rows_done
        if jax.process_index():
            return
        data = "".join(rows).encode()
        with self.path.open("ab" if self.num_bytes else "wb") as file:
            file.write(data)
            sync_to_disk(file)
        self.num_bytes += len(data)
        state = {"rows": rows_done, "bytes": self.num_bytes, "settings": self.settings}
        replace_text(self.progress, json.dumps(state), sync=False)

    def __enter__(self) -> ResumableOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self.complete or jax.process_index():
            return
        if self.rows_done:
            done = f"{self.rows_done:,} rows of the input are done. The same command continues behind them"
        else:
            done = "no row of the input is done"
        print_progress(f"\n{self.path} is not complete: {done}.")

    def finish(self) -> None:
        """Remove the record of the progress: the file is complete."""
        self.complete = True
        if jax.process_index() == 0:
            self.progress.unlink(missing_ok=True)

    def _open(self, resume: bool) -> tuple[int, int]:
        """Return (bytes, input rows) of a partial file, cut to whole windows; (0, 0) without one."""
        state = self._read_progress() if resume else None
        if state is None:
            self.progress.unlink(missing_ok=True)
            return 0, 0
        before = state["settings"]
        changed = sorted(
            k for k in before.keys() | self.settings.keys() if before.get(k) != self.settings.get(k)
        )
        if changed:
            raise UserError(
                f"--out {self.path}: partial output of a command with another {', '.join(changed)}. Repeat "
                "that command to continue it, or set --resume False to write the file anew."
            )
        os.truncate(self.path, state["bytes"])
        return state["bytes"], state["rows"]

    def _read_progress(self) -> dict[str, Any] | None:
        """Return the record of a partial file; None = there is none, or it is damaged."""
        try:
            state = json.loads(self.progress.read_text())
            whole = self.path.stat().st_size >= state["bytes"] and state["rows"] >= 0
            return state if whole and isinstance(state["settings"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def settings_of(args: Any, reward: RewardConfig, source: Path) -> dict[str, str]:
    """Return a hash of each setting that determines the output, and of the size of the input file."""
    fields = [*iter_fields(args), *((f"reward.{key}", field) for key, field in iter_fields(reward))]
    names = {key: field.value for key, field in fields if not key.startswith(SPEED_KEYS)}
    names["size of the input"] = source.stat().st_size if source.is_file() else 0
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
