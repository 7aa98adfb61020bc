"""Places for requests, as many as the present servers have, for the oldest work first."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable


class RequestSlots:
    """Limits how many requests are inside; the limit may change at any time.

    Args:
        limit: returns the present limit. After it has grown, call `wake`.
    """

    def __init__(self, limit: Callable[[], int]):
        self._limit, self._inside = limit, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._arrivals = itertools.count()

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a place."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def take(self, order: int) -> AsyncIterator[None]:
        """Wait for a place, and hold it: the lowest `order` first, of equal ones the first that came.

        A conversation comes again for each turn. In the order of arrival, turns of a step that is waited for
        would stand behind all first turns of later steps, and the steps would end together.
        """
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._arrivals), place))
        self.wake()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # the place was given just before
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def wake(self) -> None:
        """Let in the first that wait, as far as there is room."""
        while self._waiting and self._inside < self._limit():
            if not (place := heapq.heappop(self._waiting)[2]).done():  # done: cancelled
                self._inside += 1
                place.set_result(None)

    def _leave(self) -> None:
        self._inside -= 1
        self.wake()
