"""An event loop in a thread, to which other threads give coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines of other threads in an event loop of a daemon thread, until `close`."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop and return its result; an interrupt cancels it."""
        return result_of(self.start(work))

    def close(self, seconds: float, finish: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel all coroutines, await `finish()` and end the loop. Raises the error of `finish`.

        Args:
            seconds: for the coroutines to end, and again for `finish`; a loop that has not ended then is
                abandoned, and ends by itself once no coroutine blocks its thread.
        """

        if self.loop.is_closed():
            return

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=seconds)
            if finish:
                await finish()

        ended = self.start(end())
        # Only after `end`: a loop that is stopped before it leaves a coroutine that was never awaited.
        ended.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
        wait([ended], timeout=2 * seconds)
        if not ended.done():
            return
        self._thread.join(timeout=seconds)
        if not self._thread.is_alive():
            self.loop.close()
        ended.result()


def result_of(future: Future[Result]) -> Result:
    """Return a future's result; an interrupt cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
