"""The servers that weights are sent to, as far as the bridge knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

Json = dict[str, Any]
Result = TypeVar("Result")

CACHE, WEIGHTS = "kv_cache", "weights"
"""Kinds of memory that a colocated server gives back while the trainer works (SGLang's tags)."""


class Server(Protocol):
    """One server."""

    url: str
    gone: bool
    """The last request got no answer."""
    changing: asyncio.Lock
    """Held from new weights to their check: responses written meanwhile do not count yet."""
    asleep: set[str]
    """Kinds of memory that it has given back."""


class Pool(Protocol):
    """All servers of a run, and the event loop that talks to them."""

    servers: Sequence[Server]
    timeout: float
    """Seconds that one request may take."""
    breaks: int
    """Times that responses were interrupted on purpose."""

    @property
    def usable(self) -> Sequence[Server]:
        """Servers that hold the newest weights."""

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the pool's event loop and return its result."""

    async def ask(self, server: Server, path: str, body: Any = None, timeout: float = 0.0) -> Json:
        """Send a request and return the JSON object of the answer; see `rollout.sglang.client`."""

    async def everywhere(
        self,
        work: Callable[[Server], Awaitable[Any]],
        label: str = "",
        servers: Sequence[Server] | None = None,
    ) -> None:
        """Do `work` with each server at once; those that fail are left out."""


async def wake(pool: Pool, server: Server, tag: str) -> None:
    """Resume a kind of memory of a server that has released it; others would crash if asked to."""
    if tag in server.asleep:
        await pool.ask(server, "/resume_memory_occupation", {"tags": [tag]})
        server.asleep.discard(tag)
