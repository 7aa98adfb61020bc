"""Progress of a run: a live panel on a terminal or in a notebook, else lines; evaluations stay as lines."""

from __future__ import annotations

import contextlib
import html
import os
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from jaxrl_llm.host.command import repeated

SHOWN = ("reward/mean", "accuracy", "loss", "kl", "entropy", "response_tokens/mean")
HELD_OUT = "eval/"
MAX_ROWS = 12  # of the table
INTERVAL = 0.2  # seconds between two updates


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook (Jupyter, Colab, VS Code)."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")


class NotebookPanel:
    """A bar of the steps, the phase, and a table of the evaluations and the last step.

    Args:
        total: steps of the run.
        done: steps of the checkpoint that the run continues from.
    """

    def __init__(self, total: int, done: int):
        from IPython.display import display  # a notebook has it

        self.total, self.done, self.phase_name, self.rate = total, done, "starting", ""
        self.evaluations: list[Mapping[str, Any]] = []
        self.last: Mapping[str, Any] | None = None
        self.drawn = time.monotonic()
        self.handle = display(self.content(), raw=True, display_id=True)

    def phase(self, name: str) -> None:
        """Show the present phase; "" = none."""
        self.phase_name = name
        self._draw()

    def step(self, step: int, row: Mapping[str, Any], rate: str) -> None:
        """Show a step; `row` is its line of metrics.jsonl, `rate` its speed and the remaining time."""
        self.done, self.last, self.rate = step, row, rate
        if any(name.startswith(HELD_OUT) for name in row):
            self.evaluations.append(row)
        self._draw()

    def close(self) -> None:
        """Show the last state, which stays in the notebook."""
        self.phase_name, self.drawn = "", 0.0
        self._draw()

    def content(self) -> dict[str, str]:
        """Return the panel by MIME type."""
        state = "  ".join(filter(None, (f"step {self.done}/{self.total}", self.phase_name, self.rate)))
        rows = [row for row in self.evaluations[-MAX_ROWS:] if row is not self.last]
        rows += [self.last] if self.last else []
        held_out = sorted({name for row in rows for name in row if name.startswith("eval/pass@")})
        names = [name for name in (*held_out, "eval/accuracy", *SHOWN) if any(_number(r, name) for r in rows)]
        table = [["step", *names], *([str(r["step"]), *(_number(r, name) for name in names)] for r in rows)]
        cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in table]
        lines = "".join(f"<tr>{line}</tr>" for line in cells) if rows else ""
        bar = f'<progress value="{self.done}" max="{self.total}"></progress> {html.escape(state)}'
        return {"text/html": f"<div>{bar}<table>{lines}</table></div>", "text/plain": state}

    def _draw(self) -> None:
        if time.monotonic() - self.drawn >= INTERVAL:
            self.handle.update(self.content(), raw=True)
            self.drawn = time.monotonic()


def _number(row: Mapping[str, Any], name: str) -> str:
    """Return a metric as text, or ""."""
    value = row.get(name)
    return f"{value:.4g}" if isinstance(value, int | float) else ""


PROGRESS_METRICS = ("epoch", *SHOWN, "grad_norm")
WINDOW = 10  # last steps, from which the remaining time is estimated
OCCASIONAL = ("time/evaluate", "time/checkpoint")  # not in every step
ONCE = ("time/compile", "time/start", "time/profile")  # in few steps
QUIET_SECONDS = 10.0  # without a line, after which plain progress prints the phase
TICK = 1.0  # seconds between two looks at the clock
MAX_EVAL_METRICS = 8  # in a line
RESULTS = ("pass@", "maj@", "accuracy", "win_rate", "reward", "loss")  # of evaluations, first in the line


class PhaseColumn(ProgressColumn):
    """The phase of the run, and the time since it began."""

    def render(self, task: Task) -> Text:
        phase, since = task.fields["phase"], task.fields["since"]
        text = f"{phase} {format_duration(time.perf_counter() - since)}" if phase else ""
        return Text(text, style="cyan")


class Progress:
    """Steps done, phase, tokens per second, remaining time and the last metrics.

    Args:
        kind: "rich" redraws one panel, "plain" prints a line per step (files, pipes), "auto" is rich if
            stdout is a terminal and a `NotebookPanel` in a notebook, "none" prints only messages.
        total: steps of the run.
        done: steps of the checkpoint that the run continues from.
    """

    def __init__(self, kind: Literal["auto", "rich", "plain", "none"], total: int, done: int = 0):
        self.panel = NotebookPanel(total, done) if kind == "auto" and in_notebook() else None
        self.kind = ("rich" if on_terminal() else "plain") if kind == "auto" else kind
        self.total, self.done, self.phase_name = total, done, "start"
        self.remaining = RemainingTime(total)
        self.printed = self.since = time.perf_counter()  # the last line; the phase
        self.live, self.start = None, done
        if self.kind == "rich":
            self.bar = Bar(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[rate]}"),
                PhaseColumn(),
            )
            self.task = self.bar.add_task(
                "", total=total, completed=done, phase=self.phase_name, since=self.printed, rate=""
            )
            redirected = sys.stderr.isatty()  # other output to stderr then appears above the panel
            self.live = Live(self.bar, console=Console(), refresh_per_second=4, redirect_stderr=redirected)
            self.live.start()
        self.ticking = contextlib.ExitStack()
        if self.panel or self.kind == "plain":
            tick = weakref.WeakMethod(self.tick)  # a display that is dropped ends its thread
            self.ticking.enter_context(repeated(lambda: (tick() or (lambda: None))(), TICK, TICK))

    def tick(self) -> None:
        """Show that a long phase goes on; the panel of a terminal does it by itself."""
        now = time.perf_counter()
        if self.panel:
            self.panel.phase(self.phase_name and f"{self.phase_name} {format_duration(now - self.since)}")
        elif self.phase_name and now - self.printed >= QUIET_SECONDS:
            compiles = ", which compiles its programs" if self.done == self.start else ""
            step = f"step {min(self.done + 1, self.total)}/{self.total}{compiles}"
            self.message(f"{step}: {self.phase_name}, {now - self.since:.0f} s so far")

    def phase(self, name: str) -> None:
        """Show the present phase of the run, "" = none."""
        self.phase_name, self.since = name, time.perf_counter()
        if self.panel:
            self.panel.phase(name)
        elif self.live:
            self.bar.update(self.task, phase=name, since=self.since)

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Show that a step is done; `row` is its line of metrics.jsonl."""
        self.done = step
        line = "" if self.panel else format_evaluation(row)
        if self.kind != "none" and line:
            self.message(f"evaluation at step {step}/{self.total}  {line}")
        left = self.remaining.after(step, row)
        speed = f"{row.get('tokens_per_second') or 0:,.0f} tokens/s"
        part = " of the SFT warm-up" if step < self.remaining.warm_up else ""
        rate = speed if left is None else f"{speed}  {format_duration(left)}{part} left"
        if self.panel:
            self.panel.step(step, row, rate)
        elif self.live:
            self.bar.update(self.task, completed=step, rate=rate)
            self.live.update(Group(self.bar, Text(format_metrics(row), style="dim")))
        elif self.kind == "plain" and row.get("kind") != "start":
            parts = (f"step {step}/{self.total}", format_metrics(row), rate)
            self.message("  ".join(part for part in parts if part))

    def message(self, text: str) -> None:
        """Print a line, above the panel."""
        self.printed = time.perf_counter()
        if self.live:
            self.live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """End the live display; the last panel stays on the screen."""
        self.ticking.close()
        if self.panel:
            self.panel.close()
            self.panel = None
        elif self.live:
            self.bar.update(self.task, phase="")
            self.live.stop()
            self.live = None


class RemainingTime:
    """Estimate of the time to the end of a run.

    A step takes the median time of the last steps. Evaluations and checkpoints are not in every step and
    count by their average over the steps of this start; compilation and start-up do not count. During the SFT
    warm-up, the estimate is for its end, since later steps are longer by an unknown factor.

    Args:
        total: steps of the run.
    """

    def __init__(self, total: int):
        self.total, self.warm_up = total, 0  # steps; the warm-up's steps come first
        self.recent, self.kind = deque(maxlen=WINDOW), ""
        self.steps, self.occasional = 0, 0.0

    def after(self, step: int, row: Mapping[str, Any]) -> float | None:
        """Return the seconds left after a step, during the SFT warm-up until its end; None = unknown."""
        kind = row.get("kind", "train")
        if kind != self.kind:
            self.recent.clear()
            self.kind = kind
        if kind == "start":
            return None
        spent = lambda names: sum(row.get(name) or 0.0 for name in names)
        self.steps += 1
        self.occasional += spent(OCCASIONAL)
        self.recent.append(max((row.get("time/step") or 0.0) - spent(OCCASIONAL + ONCE), 0.0))
        end = self.warm_up if kind == "warm_start" and step < self.total else self.total
        if end <= step < self.total:
            return None
        return (end - step) * (statistics.median(self.recent) + self.occasional / self.steps)


def on_terminal() -> bool:
    """Return whether stdout is a terminal that can redraw lines; a notebook's is not."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def format_metrics(row: Mapping[str, Any]) -> str:
    """Return the main metrics in a row as text, and `nonfinite` if updates were skipped."""
    keys = (*PROGRESS_METRICS, "nonfinite") if row.get("nonfinite") else PROGRESS_METRICS
    pairs = ((key, row.get(key)) for key in keys)
    return "  ".join(f"{key} {value:.4g}" for key, value in pairs if isinstance(value, int | float))


def format_evaluation(row: Mapping[str, Any]) -> str:
    """Return the held-out metrics in a row as text: "pass@1 0.5 maj@4 0.6"; "" without such metrics."""
    pairs = [(key.removeprefix("eval/"), value) for key, value in row.items() if key.startswith("eval/")]
    pairs = [(key, value) for key, value in pairs if isinstance(value, int | float)]
    pairs.sort(key=lambda pair: not pair[0].startswith(RESULTS))
    text = [f"{key} {value:.4g}" for key, value in pairs[:MAX_EVAL_METRICS]]
    more = len(pairs) - len(text)
    return "  ".join(text + [f"and {more} more in metrics.jsonl"] * bool(more))


def format_duration(seconds: float) -> str:
    """Return seconds as text: 3725 -> "1:02:05", 65 -> "1:05"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
