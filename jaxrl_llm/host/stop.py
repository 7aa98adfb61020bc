"""Stopping a run on request: SIGTERM, SIGINT and a wall-clock budget, agreed on by all processes.

Exit codes of a training run:

    0          finished
    75         EX_TEMPFAIL, "try again": stopped by a signal, by --max_runtime or by the loss of all servers,
               with its state saved; the same command continues it
    143, 130 ended by SIGTERM, SIGINT: by the first signal before the first step (imports, start-up), with
    nothing to save, or immediately by a second signal; the checkpoints are kept 1 the run failed; its
    checkpoints are kept 2 bad input

A signal during a step, a compilation, an evaluation or a save is announced immediately and handled after the
step. After one during the export, the export is finished.
"""

from __future__ import annotations

import contextlib
import signal
import time

from jaxrl_llm.host.processes import agree
from jaxrl_llm.host.signals import deferred, received_signal, unwinding

EXIT_STOPPED = 75

_WALL_CLOCK = 1  # below the signals' numbers, so that a signal takes precedence


class Stop(contextlib.AbstractContextManager):
    """Requests to stop the training loop; a context manager inside which signals are deferred to the loop.

    Args:
        max_runtime_seconds: wall-clock budget counted from here; 0 = none.
    """

    def __init__(self, max_runtime_seconds: float = 0.0):
        self.max_runtime_seconds = max_runtime_seconds
        self._start = time.monotonic()
        self._last_call: float | None = None
        self._longest_step = 0.0
        self._closing = contextlib.ExitStack()
        self._closing.enter_context(unwinding())
        self._closing.enter_context(deferred("saving after this step, then stopping"))

    def requested(self, step: int, reserve: float = 0.0) -> str:
        """Return the reason to stop before `step`, "" = none. Every process calls it once at every step.

        Args:
            step: the step about to start.
            reserve: seconds that the last save may need (`Checkpointer.longest_save`).

        Returns: "SIGTERM", "SIGINT" or "wall clock N s", the same in all processes.
        """
        now = time.monotonic()
        if self._last_call is not None:
            self._longest_step = max(self._longest_step, now - self._last_call)
        self._last_call = now
        return self._agreed(received_signal() or self._out_of_time(now, reserve))

    def signalled(self) -> str:
        """Return "SIGTERM" or "SIGINT" if any process has received it, else "". A collective."""
        return self._agreed(received_signal())

    def close(self) -> None:
        """Restore the previous response to signals."""
        self._closing.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _agreed(self, reason: int) -> str:
        reason = agree(reason)
        if reason == _WALL_CLOCK:
            return f"wall clock {self.max_runtime_seconds:g} s"
        return signal.Signals(reason).name if reason else ""

    def _out_of_time(self, now: float, reserve: float) -> int:
        if not self.max_runtime_seconds:
            return 0
        ends = now - self._start + self._longest_step + reserve
        return _WALL_CLOCK if ends >= self.max_runtime_seconds else 0
