"""Signs of life: lines on what a command does while it prints nothing else. Imports no jax."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

FIRST = 3.0  # seconds of work before its first line
AGAIN = 10.0  # seconds between two lines

_under_way: list[str] = []  # the innermost last


@contextlib.contextmanager
def working(what: str, quiet: bool = False, first: float | None = None) -> Iterator[None]:
    """Say on stderr what a piece of work is and how long it takes, if that is more than `first` seconds.

    Args:
        quiet: say nothing, as in processes other than the first.
        first: seconds of work before the first line; None = FIRST.
    """
    began, said = time.perf_counter(), []

    def say() -> None:
        if _under_way[-1] == what:  # an inner piece has its own lines
            said.append(what)
            print(f"{what}: {time.perf_counter() - began:.0f} s so far", file=sys.stderr, flush=True)

    _under_way.append(what)
    try:
        with contextlib.nullcontext() if quiet else repeated(say, FIRST if first is None else first, AGAIN):
            yield
    finally:
        _under_way.pop()
    if said:
        print(f"{what}: took {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def repeated(action: Callable[[], None], first: float, again: float) -> Iterator[None]:
    """Call an action from a thread while the body runs: after `first` seconds, then after every `again`."""
    ended = threading.Event()

    def repeat() -> None:
        wait = first
        while not ended.wait(wait):
            action()
            wait = again

    thread = threading.Thread(target=repeat, name="repeated", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
