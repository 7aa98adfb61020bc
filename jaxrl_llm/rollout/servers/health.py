"""Health checks of a pool of servers: membership, health and recovery."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl_llm.addresses import mask_text
from jaxrl_llm.bridge.servers import HEALTH_TIMEOUT, QUIET_LIMIT
from jaxrl_llm.errors import ServerError, UnreachableError
from jaxrl_llm.rollout.servers import auth
from jaxrl_llm.rollout.servers.pool import ServerPool
from jaxrl_llm.rollout.servers.server import Server, print_line

CHECK_INTERVAL = 1.0  # seconds


async def run_health_checks(
    pool: ServerPool,
    members: Callable[[], Sequence[str]] | None = None,
    restart: Callable[[str], str] | None = None,
) -> None:
    """Check the servers until cancelled.

    A server that was left out, or is new, gets the newest weights and is used once it has been probed; it is
    tried again after 1, 2, 4, ... at most 15 seconds. The health of one that has
    requests and gives no replies is checked.

    Args:
        members: returns the present addresses.
        restart: starts the server of an address again if it has ended, and returns a message; "" = it runs.
    """
    jobs: set[asyncio.Task] = set()
    while True:
        await asyncio.sleep(CHECK_INTERVAL)
        if members:
            pool.set_servers(await asyncio.to_thread(members))  # a shared disk may hang
        for server in pool.servers:
            if pool.memory_released or not pool.label:
                continue
            if restart and (problem := restart(server.url)):
                print_line(problem)
                server.leave_out(UnreachableError(problem))
            elif job := _due(pool, server):
                jobs.add(task := asyncio.create_task(job))
                task.add_done_callback(jobs.discard)


def _due(pool: ServerPool, server: Server):
    """Return the check or admission of a server that is due now, if any."""
    now = time.monotonic()
    if server.admission_lock.locked():
        return None
    if not server.usable:
        return pool.admit(server) if now >= server.next_try else None
    quiet = server.inflight and now - server.last_reply > QUIET_LIMIT and not server.update_lock.locked()
    return _check_health(pool, server) if quiet else None


async def _check_health(pool: ServerPool, server: Server) -> None:
    async with server.admission_lock:
        failures = server.failures
        try:
            await pool.request_bytes(server, "/health", timeout=HEALTH_TIMEOUT)
            server.last_reply = time.monotonic()
        except ServerError as error:
            if server.failures == failures:
                server.leave_out(error)


class ServerList:
    """Addresses in a text file, one a line; # begins a comment. The file is read at every call.

    A change counts when two calls in a row have read the same: a file may be read while it is written.
    """

    def __init__(self, path: Path, engine: str):
        self.path, self.engine = path, engine
        self._known: list[str] = []
        self._last: list[str] | None = None  # addresses of the last call
        self._printed: set[str] = set()

    def __call__(self) -> list[str]:
        """Return the addresses that may be used. While the file cannot be read they stay as they were."""
        try:
            urls = read_addresses(self.path)
        except (OSError, ValueError) as error:
            self._print_once(f"{self.path}: {error}; the servers stay as they were")
            return self._known
        before, self._last = self._last, urls
        if before not in (None, urls):
            return self._known
        for url in {url for url in urls if urls.count(url) > 1}:
            self._print_once(f"{self.path}: {mask_text(url)} is there twice, and counts once")
        problems = {url: auth.address_problem(url, self.engine) for url in urls}
        for problem in filter(None, problems.values()):
            self._print_once(f"{self.path}: {problem}")
        self._known = [url for url in dict.fromkeys(urls) if not problems[url]]
        return self._known

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            print_line(text)


def read_addresses(path: Path) -> list[str]:
    """Return the addresses in the file.

    Raises:
        OSError, ValueError: the file cannot be read, or is not text.
    """
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line.rstrip("/") for line in lines if line]
