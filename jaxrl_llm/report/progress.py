"""Progress of a run: a live panel on a terminal or in a notebook, else one line per step."""

from __future__ import annotations

import os
import statistics
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from jaxrl_llm.report.notebook import NotebookPanel, in_notebook

PROGRESS_METRICS = (
    "eval/pass@1",
    "eval/accuracy",
    "reward/mean",
    "accuracy",
    "loss",
    "kl",
    "entropy",
    "response_tokens/mean",
    "grad_norm",
)
WINDOW = 10  # last steps, from which the remaining time is estimated


class Progress:
    """Steps done, phase, tokens per second, remaining time and the last metrics.

    Args:
        kind: "rich" redraws one panel, "plain" prints a line per step (files, pipes), "auto" is rich where
            stdout is a terminal and a `NotebookPanel` in a notebook, "none" prints only messages.
        total: steps of the run.
        done: steps of the checkpoint that the run continues from.
    """

    def __init__(self, kind: Literal["auto", "rich", "plain", "none"], total: int, done: int = 0):
        self.panel = NotebookPanel(total, done) if kind == "auto" and in_notebook() else None
        self.kind = ("rich" if on_terminal() else "plain") if kind == "auto" else kind
        self.total, self.recent = total, deque(maxlen=WINDOW)
        self.live = None
        if self.kind == "rich":
            self.bar = Bar(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[rate]}"),
                TextColumn("[cyan]{task.fields[phase]}"),
            )
            self.task = self.bar.add_task("", total=total, completed=done, phase="starting", rate="")
            redirected = sys.stderr.isatty()  # other output to stderr then appears above the panel
            self.live = Live(self.bar, console=Console(), refresh_per_second=4, redirect_stderr=redirected)
            self.live.start()

    def phase(self, name: str) -> None:
        """Show the present phase of the run; "" = none."""
        if self.panel:
            self.panel.phase(name)
        elif self.live:
            self.bar.update(self.task, phase=name)

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Show that a step is done; `row` is its line of metrics.jsonl."""
        self.recent.append(row.get("time/step") or 0.0)
        left = (self.total - step) * statistics.median(self.recent)  # the first steps compile
        rate = f"{row.get('tokens_per_second') or 0:,.0f} tokens/s  {format_duration(left)} left"
        if self.panel:
            self.panel.step(step, row, rate)
        elif self.live:
            self.bar.update(self.task, completed=step, rate=rate)
            self.live.update(Group(self.bar, Text(format_metrics(row, "  "), style="dim")))
        elif self.kind == "plain":
            parts = (f"step {step}/{self.total}", format_metrics(row, "  "), rate)
            print("  ".join(part for part in parts if part), flush=True)

    def message(self, text: str) -> None:
        """Print a line, above the panel."""
        if self.live:
            self.live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """End the live display; the last panel stays on the screen."""
        if self.panel:
            self.panel.close()
            self.panel = None
        elif self.live:
            self.bar.update(self.task, phase="")
            self.live.stop()
            self.live = None


def on_terminal() -> bool:
    """Return whether stdout is a terminal that can redraw lines; a notebook's is not."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def format_metrics(row: Mapping[str, Any], separator: str) -> str:
    """Return the main metrics in a row as text, and `nonfinite`, of skipped updates, where there are any."""
    keys = (*PROGRESS_METRICS, "nonfinite") if row.get("nonfinite") else PROGRESS_METRICS
    pairs = ((key, row.get(key)) for key in keys)
    return separator.join(f"{key} {value:.4g}" for key, value in pairs if isinstance(value, int | float))


def format_duration(seconds: float) -> str:
    """Return seconds as text: 3725 -> "1:02:05", 65 -> "1:05"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
