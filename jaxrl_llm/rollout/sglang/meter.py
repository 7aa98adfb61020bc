"""How busy the servers are: requests in flight, integrated over time."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxrl_llm.structs import Metrics


class Meter:
    """Entered for each request; all from one thread.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock, self.running = clock, 0
        self._since = self._last = clock()
        self._work = self._idle = 0.0

    def __enter__(self) -> None:
        self._advance(1)

    def __exit__(self, *_: object) -> None:
        self._advance(-1)

    def read(self, slots: int) -> Metrics:
        """Of the time since the last reading: the share of slots in use, and of time with nothing to do.

        Args:
            slots: requests that could run at once.
        """
        self._advance(0)
        elapsed = max(self._last - self._since, 1e-9)
        found = {
            "servers/occupancy": self._work / elapsed / max(slots, 1),
            "servers/idle_fraction": self._idle / elapsed,
        }
        self._since, self._work, self._idle = self._last, 0.0, 0.0
        return found

    def _advance(self, change: int) -> None:
        now = self.clock()
        self._work += self.running * (now - self._last)
        self._idle += (self.running == 0) * (now - self._last)
        self._last = now
        self.running += change
