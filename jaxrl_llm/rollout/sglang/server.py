"""One SGLang server, and what is known of it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxrl_llm.errors import BusyError, NoRouteError, RefusedError, ServerError, UnreachableError
from jaxrl_llm.rollout.sglang import auth

FIRST_TRY, LONGEST_TRY = 1.0, 15.0  # seconds until a server that was left out is tried again


def say(text: str) -> None:
    print(f"sglang: {text}", file=sys.stderr, flush=True)


class Outage:
    """A context that servers may leave: the reason to end the run, with all that was reached saved."""

    error: ServerError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> bool:
        if isinstance(error, ServerError):
            self.error = error
        return isinstance(error, ServerError)

    @property
    def reason(self) -> str:
        return f"its servers: {self.error}" if self.error else ""


def error_of(url: str, path: str, status: int, text: str) -> ServerError:
    """What an answer with this status means."""
    said = f"{url} answered {status} to {path}: {text:.300}"
    if status in (401, 403):
        return RefusedError(f"{said} (set {auth.API_KEY} and {auth.ADMIN_KEY} to the keys of the server)")
    if status in (429, 503):
        return BusyError(said)
    if status == 404:
        return NoRouteError(said)
    return (RefusedError if status in (400, 413, 422) else UnreachableError)(said)


def nonsense(url: str, error: Exception) -> ServerError:
    return ServerError(f"{url} gave an answer that cannot be used: {type(error).__name__} {error}")


class Counts(NamedTuple):
    """Of a server, since they were last taken."""

    tokens: int
    busy: float  # seconds with a request
    left_out: float  # seconds
    inflight: int  # most requests at once


@dataclass(eq=False)
class Server:
    """One server. `usable` after it has answered with the wanted weights, until something goes wrong."""

    url: str
    usable: bool = False
    problem: str = "no weights yet"
    gone: bool = False  # the problem is that it does not answer
    failures: int = 0  # times it was left out
    label: str = ""  # of the weights that it was last seen to hold
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held from new weights to their check
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is brought into use
    asleep: set[str] = field(default_factory=set)  # what of its memory has been given back: see colocated.py
    next_try: float = 0.0  # when to bring it back into use
    last_answer: float = 0.0  # when it was last known to be well

    def __post_init__(self):
        self.url = self.url.rstrip("/")
        self._requests: set[asyncio.Task] = set()
        self._tokens, self._peak, self._busy, self._left_out = 0, 0, 0.0, 0.0
        self._since: dict[str, float] = {}  # "busy", "left out" -> since when
        self._pause = FIRST_TRY

    @property
    def inflight(self) -> int:
        return len(self._requests)

    def leave_out(self, error: ServerError) -> None:
        """No more requests for it; those that it has are for others to do."""
        if "left out" not in self._since:
            say(f"a server is left out: {error}")
            self.failures += 1
        self.usable, self.problem, self.gone = (
            False,
            str(error),
            isinstance(error, UnreachableError | BusyError),
        )
        self.label, self._since["left out"] = "", self._since.get("left out", time.monotonic())
        if self.gone:
            self.asleep.clear()  # whatever answers next is another process, or one of which nothing is known
        self.next_try = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_TRY)
        for request in self._requests:
            request.cancel()

    def put_to_use(self, label: str) -> None:
        if "left out" in self._since:
            say(f"{self.url} is in use again")
        self.usable, self.problem, self.gone, self.label = True, "", False, label
        self.last_answer = time.monotonic()
        self._pause = FIRST_TRY
        self._left_out += self._ended("left out")

    @contextlib.contextmanager
    def working(self, request: asyncio.Task) -> Iterator[asyncio.Task]:
        """Counts it among the server's requests; it is cancelled if it has not ended by then."""
        if not self._requests:
            self._since["busy"] = self.last_answer = time.monotonic()
        self._requests.add(request)
        self._peak = max(self._peak, self.inflight)
        try:
            yield request
        finally:
            request.cancel()
            self._requests.discard(request)
            if not self._requests:
                self._busy += self._ended("busy")

    def heard(self, said: dict[str, Any]) -> None:
        """It has answered: this."""
        self.last_answer = time.monotonic()
        self._tokens += len(said["meta_info"]["output_token_logprobs"])

    def take_counts(self) -> Counts:
        """What it did since the last call."""
        now = time.monotonic()
        for what in self._since:
            self._busy += (now - self._since[what]) * (what == "busy")
            self._left_out += (now - self._since[what]) * (what == "left out")
            self._since[what] = now
        counts = Counts(self._tokens, self._busy, self._left_out, self._peak)
        self._tokens, self._busy, self._left_out, self._peak = 0, 0.0, 0.0, self.inflight
        return counts

    def _ended(self, what: str) -> float:
        return time.monotonic() - self._since.pop(what, time.monotonic())
