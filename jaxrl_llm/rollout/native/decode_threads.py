"""Decode threads: schedulers that share the slots of one call.

On a CPU a decoding step is many short operations, most of which run on one core. Two threads, each with half
of the slots and a separate cache, keep two cores busy: on two cores a rollout of a small model takes 0.75 of
the time. On an accelerator half of the slots take about as long as all, so one thread decodes.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import jax
from jax.sharding import Mesh

from jaxrl_llm.errors import RunError

MAX_DECODE_THREADS = 2
"""More were not measured."""
MIN_SLOTS = 8  # of a thread

T, R = TypeVar("T"), TypeVar("R")


def num_decode_threads(mesh: Mesh, slots: int) -> int:
    """Return the number of threads that so many slots are divided among."""
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MAX_DECODE_THREADS, slots // MIN_SLOTS))


def divide(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Split the items into contiguous slices whose lengths differ by at most one."""
    ends = [len(items) * i // parts for i in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


def run_decode_threads(
    parts: Sequence[T], run: Callable[[T, Callable[[], None]], R], before_chunk: Callable[[], None]
) -> list[R]:
    """Return `run(part, before_chunk)` of all parts, each in a separate thread.

    After an error in one of them, or in the thread that waits, the others end before their next chunk.

    Args:
        before_chunk: called before each chunk; an exception ends the call.

    Raises:
        Exception: the first one of a part.
    """
    if len(parts) == 1:
        return [run(parts[0], before_chunk)]
    ended, device = threading.Event(), jax.config.jax_default_device

    def check() -> None:
        before_chunk()
        if ended.is_set():
            raise RunError("rollout: another decode thread has ended with an error")

    def start(part: T) -> R:
        with jax.default_device(device):  # as the caller's: the setting is a thread's
            return run(part, check)

    with ThreadPoolExecutor(len(parts), "decode") as pool:
        futures = [pool.submit(start, part) for part in parts]
        try:
            for done in as_completed(futures):
                done.result()
        except BaseException:
            ended.set()
            raise
    return [future.result() for future in futures]
