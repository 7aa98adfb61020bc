"""The event loop that pool, environments and gateway run in a thread."""

import asyncio
import gc
import threading
import time

import pytest

from jaxrl_llm.loop_thread import LoopThread


def test_close_cancels_coroutines_and_raises_the_error_of_finish():
    thread = LoopThread("test")
    assert thread.run(asyncio.sleep(0, 7)) == 7
    endless = thread.start(asyncio.sleep(3600))

    async def finish():
        raise OSError("not closed")

    with pytest.raises(OSError, match="not closed"):
        thread.close(5.0, finish)
    assert endless.cancelled() and thread.loop.is_closed()
    thread.close(5.0)  # as often as one likes


def test_a_blocked_loop_is_abandoned_and_ends_by_itself():
    thread, blocks, free = LoopThread("test"), threading.Event(), threading.Event()

    async def block():
        blocks.set()
        free.wait()

    thread.start(block())
    blocks.wait()
    thread.close(0.05)
    assert not thread.loop.is_closed()
    free.set()
    end = time.monotonic() + 60
    while thread.loop.is_running():
        assert time.monotonic() < end
        time.sleep(0.01)
    thread.loop.close()
    gc.collect()  # tells of a coroutine that was never awaited
