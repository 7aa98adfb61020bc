"""Stopping on request: SIGTERM, SIGINT and a wall-clock budget, agreed on by all processes.

Exit codes of a training run: 0 finished; EXIT_STOPPED (75, `EX_TEMPFAIL`: "try again") stopped on request,
or for want of its servers, with its state saved, so the same command continues it; 143 or 130 ended at once
by a second SIGTERM or SIGINT, nothing saved since the last checkpoint; 1 an error.
"""

from __future__ import annotations

import os
import signal
import time

from jaxrl_llm.errors import UserError
from jaxrl_llm.host.processes import agree

EXIT_STOPPED = 75

_WALL_CLOCK = 1  # smaller than any signal number, so that a signal wins


class Stop:
    """Asks the loop to stop. Build it in the main thread, after `jax.distributed.initialize`.

    (That order matters: JAX installs a SIGTERM handler of its own there, which this one replaces.)

    Args:
        max_runtime_seconds: wall-clock budget counted from here; 0 = none.
    """

    def __init__(self, max_runtime_seconds: float = 0.0):
        if max_runtime_seconds < 0:
            raise UserError(f"max_runtime_seconds is {max_runtime_seconds}: give seconds, or 0 for no limit")
        self.max_runtime_seconds = max_runtime_seconds
        self._start = time.monotonic()
        self._last_call: float | None = None
        self._longest_step = 0.0
        self._signal = 0
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}

    def requested(self, step: int, reserve: float = 0.0) -> str | None:
        """Why to stop before `step`, or None. Every process calls it once at the top of every step.

        Args:
            step: the step about to start.
            reserve: seconds that the last save may need (`Checkpointer.longest_save`).

        Returns: "SIGTERM", "SIGINT" or "wall clock N s", the same in all processes.
        """
        now = time.monotonic()
        if self._last_call is not None:
            self._longest_step = max(self._longest_step, now - self._last_call)
        self._last_call = now
        reason = agree(self._signal or self._out_of_time(now, reserve))
        if reason == 0:
            return None
        if reason == _WALL_CLOCK:
            return f"wall clock {self.max_runtime_seconds:g} s"
        return signal.Signals(reason).name

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _out_of_time(self, now: float, reserve: float) -> int:
        if not self.max_runtime_seconds:
            return 0
        ends = now - self._start + self._longest_step + reserve
        return _WALL_CLOCK if ends >= self.max_runtime_seconds else 0

    def _handle(self, number: int, frame) -> None:
        if self._signal:
            os._exit(128 + number)
        self._signal = number
        name = signal.Signals(number).name
        # os.write: the signal may have come in the middle of a print.
        os.write(2, f"{name}: saving after this step, then stopping; again = exit at once\n".encode())
