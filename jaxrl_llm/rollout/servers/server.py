"""State of one server: its use, requests and failures."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxrl_llm.errors import BusyError, NoRouteError, RefusedError, ServerError, UnreachableError
from jaxrl_llm.rollout.servers import auth

FIRST_RETRY, LAST_RETRY = 1.0, 15.0  # seconds until a server that was left out is tried again


def print_line(text: str) -> None:
    """Print a line about the servers to stderr."""
    print(f"servers: {text}", file=sys.stderr, flush=True)


class Outage:
    """Context manager that turns a ServerError into a graceful stop: the run ends, and saves its state."""

    error: ServerError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> bool:
        if isinstance(error, ServerError):
            self.error = error
        return isinstance(error, ServerError)

    @property
    def reason(self) -> str:
        """The reason for which the run ends; "" = it does not."""
        return f"its servers: {self.error}" if self.error else ""


def error_from_status(url: str, path: str, status: int, text: str) -> ServerError:
    """Return the error that a reply with this status means."""
    message = f"{url} answered {status} to {path}: {text:.300}"
    if status in (401, 403):
        return RefusedError(f"{message} (set {auth.API_KEY} and {auth.ADMIN_KEY} to the keys of the server)")
    if status in (429, 503):
        return BusyError(message)
    if status == 404:
        return NoRouteError(message)
    return (RefusedError if status in (400, 413, 422) else UnreachableError)(message)


@dataclass
class Changes:
    """Changes of all servers of a pool since the start."""

    joined: int = 0  # times that a server came into use
    lost: int = 0  # times that one went out of use: left out, or gone from the list
    failures: int = 0  # times that one was left out


class Counts(NamedTuple):
    """Throughput and use of a server since the last call of `take_counts`."""

    tokens: int
    busy_seconds: float  # with a request
    left_out_seconds: float
    max_inflight: int


@dataclass(eq=False)
class Server:
    """One server. `usable` after a reply with the newest weights, until something goes wrong."""

    url: str
    usable: bool = False
    problem: str = "no weights yet"
    unreachable: bool = False  # the problem is that it does not reply
    failures: int = 0  # times it was left out
    label: str = ""  # of the weights that it was last known to hold
    update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held from new weights to their probe
    admission_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is brought into use
    released: set[str] = field(default_factory=set)  # tags of released memory: see launch.py
    next_try: float = 0.0  # when to bring it back into use
    last_reply: float = 0.0  # when it was last known to be well
    changes: Changes = field(default_factory=Changes)  # the pool's

    def __post_init__(self):
        self.url = self.url.rstrip("/")
        self._requests: dict[asyncio.Task, str] = {}  # -> label of the server's weights when it was sent
        self._tokens, self._max_inflight, self._busy_seconds, self._left_out_seconds = 0, 0, 0.0, 0.0
        self._since: dict[str, float] = {}  # "busy", "left out" -> since when
        self._retry_delay = FIRST_RETRY

    @property
    def inflight(self) -> int:
        """Requests that it is working on."""
        return len(self._requests)

    @property
    def labels_in_flight(self) -> set[str]:
        """Labels of the weights that it held when its present requests were sent."""
        return set(self._requests.values())

    def leave_out(self, error: ServerError) -> None:
        """Stop sending requests to the server; requests in flight go to other servers."""
        if "left out" not in self._since:
            print_line(f"a server is left out: {error}")
            self.failures += 1
            self.changes.failures += 1
        self._stop_use(str(error))
        self.unreachable = isinstance(error, UnreachableError | BusyError)
        self.label, self._since["left out"] = "", self._since.get("left out", time.monotonic())
        if self.unreachable:
            self.released.clear()  # the next reply comes from another process, or one in an unknown state
        self.next_try = time.monotonic() + self._retry_delay
        self._retry_delay = min(2 * self._retry_delay, LAST_RETRY)
        for request in self._requests:
            request.cancel()

    def depart(self) -> None:
        """Send it no more requests: it has left the pool. Requests in flight continue."""
        self._stop_use(f"{self.url} has left the pool")

    def readmit(self, label: str) -> None:
        """Bring it into use: it holds the weights of this label and has been probed."""
        if "left out" in self._since:
            print_line(f"{self.url} is in use again")
        self.changes.joined += not self.usable
        self.usable, self.problem, self.unreachable, self.label = True, "", False, label
        self.last_reply = time.monotonic()
        self._retry_delay = FIRST_RETRY
        self._left_out_seconds += self._end("left out")

    @contextlib.contextmanager
    def running(self, request: asyncio.Task, label: str) -> Iterator[asyncio.Task]:
        """Count a request among the server's; it is cancelled if it has not ended by then.

        Args:
            label: of the server's weights when it was sent.
        """
        if not self._requests:
            self._since["busy"] = self.last_reply = time.monotonic()
        self._requests[request] = label
        self._max_inflight = max(self._max_inflight, self.inflight)
        try:
            yield request
        finally:
            request.cancel()
            self._requests.pop(request, None)
            if not self._requests:
                self._busy_seconds += self._end("busy")

    def record_response(self, num_tokens: int) -> None:
        """Count a response."""
        self.last_reply = time.monotonic()
        self._tokens += num_tokens

    def take_counts(self) -> Counts:
        """Return the counts since the last call, and reset them."""
        now = time.monotonic()
        for state, since in self._since.items():
            self._busy_seconds += (now - since) * (state == "busy")
            self._left_out_seconds += (now - since) * (state == "left out")
            self._since[state] = now
        counts = Counts(self._tokens, self._busy_seconds, self._left_out_seconds, self._max_inflight)
        self._tokens, self._busy_seconds, self._left_out_seconds = 0, 0.0, 0.0
        self._max_inflight = self.inflight
        return counts

    def _stop_use(self, problem: str) -> None:
        self.changes.lost += self.usable
        self.usable, self.problem = False, problem

    def _end(self, state: str) -> float:
        """End a state. Returns its seconds."""
        return time.monotonic() - self._since.pop(state, time.monotonic())
