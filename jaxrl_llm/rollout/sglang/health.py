"""Care for a pool of servers while others work with it: who belongs to it, who is well, who comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl_llm.errors import ServerError, UnreachableError
from jaxrl_llm.rollout.sglang import auth
from jaxrl_llm.rollout.sglang.pool import ServerPool
from jaxrl_llm.rollout.sglang.server import Server, say

LOOK = 1.0  # seconds between two looks
QUIET = 20.0  # seconds without an answer to anything, after which a server is asked whether it is well
HEALTH = 30.0  # seconds for that: /health sleeps a second, then waits up to 20 for a token


async def tend(
    pool: ServerPool,
    members: Callable[[], Sequence[str]] | None = None,
    revive: Callable[[str], str] | None = None,
) -> None:
    """Care for the servers until cancelled.

    A server that was left out, or is new, gets the newest weights and is put to use once they have been
    checked; it is tried again after 1, 2, 4, ... at most 15 seconds. One that has requests and says nothing
    is asked whether it is well.

    Args:
        members: the addresses of now.
        revive: starts the server of an address again if it has ended, and says so; "" = it runs.
    """
    jobs: set[asyncio.Task] = set()
    while True:
        await asyncio.sleep(LOOK)
        if members:
            pool.replace(members())
        for server in pool.servers:
            if pool.resting or not pool.label:
                continue
            if revive and (problem := revive(server.url)):
                say(problem)
                server.leave_out(UnreachableError(problem))
            elif job := _due(pool, server):
                jobs.add(task := asyncio.create_task(job))
                task.add_done_callback(jobs.discard)


def _due(pool: ServerPool, server: Server):
    """What is to be done with a server now, if anything."""
    now = time.monotonic()
    if server.admitting.locked():
        return None
    if not server.usable:
        return pool.admit(server) if now >= server.next_try else None
    silent = server.inflight and now - server.last_answer > QUIET and not server.changing.locked()
    return _check_health(pool, server) if silent else None


async def _check_health(pool: ServerPool, server: Server) -> None:
    async with server.admitting:
        failures = server.failures
        try:
            await pool.ask(server, "/health", timeout=HEALTH)
            server.last_answer = time.monotonic()
        except ServerError as error:
            if server.failures == failures:
                server.leave_out(error)


class ServerList:
    """Addresses in a text file, one a line; # begins a comment. Read whenever it is called."""

    def __init__(self, path: Path):
        self.path = path
        self._known: list[str] = []
        self._said: set[str] = set()

    def __call__(self) -> list[str]:
        """Those that may be used. While the file cannot be read they stay as they were."""
        try:
            urls = read_list(self.path)
        except OSError as error:
            self._tell(f"{self.path}: {error.strerror}; the servers stay as they were")
            return self._known
        for url in urls:
            if problem := auth.problem(url):
                self._tell(f"{self.path}: {problem}")
        self._known = [url for url in urls if not auth.problem(url)]
        return self._known

    def _tell(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)


def read_list(path: Path) -> list[str]:
    """The addresses in the file."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line.rstrip("/") for line in lines if line]
