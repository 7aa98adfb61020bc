"""The worker's end of the benchmark: a JSON line in, a JSON line out.

{"prepare": case} builds and compiles it; {"run": case, "repetition": i} does it once and times it: wall
seconds, CPU seconds of the whole process, which other load on the machine disturbs least, and the peak of
its resident memory so far in MB.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TextIO

from work import RAGGED_SETS

Run = Callable[[int], Any]


def open_channel() -> TextIO:
    """Take stdout for the protocol; the prints of libraries go to stderr. Call before other imports."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def serve(channel: TextIO, packages: tuple[str, ...], cases: dict[str, Callable[[], Run]]) -> None:
    """Serve requests until stdin ends. A case is a function that prepares and returns run(repetition)."""
    runs: dict[str, Run] = {}
    reply = lambda message: channel.write(json.dumps(message) + "\n")
    reply({"python": sys.version.split()[0], **{name: version(name) for name in packages}})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "prepare" in request:
                case = request["prepare"]
                started = time.perf_counter()
                runs[case] = cases[case]()
                runs[case](0)
                first = time.perf_counter() - started
                for repetition in range(1, RAGGED_SETS):  # every shape that will come
                    runs[case](repetition)
                reply({"first_seconds": first})
            else:
                reply(timed(runs[request["run"]], request["repetition"]))
        except Exception:
            reply({"error": traceback.format_exc()})
    os._exit(0)  # threads that wait at a gate do not hold us


def timed(run: Run, repetition: int) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    run(repetition)
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


class Gate:
    """Pauses a trainer's own loop once a step, so that its steps interleave with the steps of other systems.

    The trainer's reward function calls `arrive`; from one arrival to the next is exactly one step: the
    update of this one's rollouts, then the next rollouts.
    """

    def __init__(self):
        self._arrived: queue.Queue = queue.Queue()
        self._go: queue.Queue = queue.Queue()

    def start(self, train: Callable[[], Any]) -> None:
        """Run `train` in a thread until its first arrival."""
        threading.Thread(target=self._guard, args=(train,), daemon=True).start()
        self._wait()

    def arrive(self) -> None:
        """Pause the trainer's thread, which calls this, until the next step."""
        self._arrived.put(None)
        self._go.get()

    def step(self, repetition: int) -> None:
        """Let it run to the next arrival."""
        self._go.put(None)
        self._wait()

    def _wait(self) -> None:
        error = self._arrived.get()
        if error is not None:
            raise error

    def _guard(self, train: Callable[[], Any]) -> None:
        try:
            train()
            self._arrived.put(RuntimeError("the trainer ended by itself"))
        except BaseException as error:
            self._arrived.put(error)
