"""The share of time, and of slots, in use by work that is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Meter:
    """Work under way, integrated over time. A context manager that is entered for each piece, in any thread.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock, self.running, self._lock = clock, 0, threading.Lock()
        self._since = self._last = clock()
        self._busy = self._idle = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._advance(1)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._advance(-1)

    def read(self, slots: int = 1) -> tuple[float, float]:
        """Return (share of slots in use, share of the time without work) since the last reading.

        Args:
            slots: pieces of work that could run at once.
        """
        with self._lock:
            self._advance(0)
            elapsed = max(self._last - self._since, 1e-9)
            occupancy, idle = self._busy / elapsed / max(slots, 1), self._idle / elapsed
            self._since, self._busy, self._idle = self._last, 0.0, 0.0
        return occupancy, idle

    def _advance(self, change: int) -> None:
        now = self.clock()
        self._busy += self.running * (now - self._last)
        self._idle += (self.running == 0) * (now - self._last)
        self._last = now
        self.running += change
