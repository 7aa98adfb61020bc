"""Progress of a run in a notebook: one output that is updated in place."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Mapping
from typing import Any

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
    """Return a metric as text, "" where the row has none."""
    value = row.get(name)
    return f"{value:.4g}" if isinstance(value, int | float) else ""
