"""Places for requests, as many as the present servers have: first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class RequestSlots:
    """An asynchronous context manager that limits how many are inside; the limit may change at any time.

    Args:
        limit: returns the present limit. After it has grown, call `wake`.
    """

    def __init__(self, limit: Callable[[], int]):
        self._limit, self._inside = limit, 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a place."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self.wake()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # the place was given just before
                await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._inside -= 1
        self.wake()

    def wake(self) -> None:
        """Let in the first that wait, as far as there is room."""
        while self._waiting and self._inside < self._limit():
            if not (place := self._waiting.popleft()).done():  # done: cancelled
                self._inside += 1
                place.set_result(None)
