"""A pool of SGLang servers over HTTP: the least busy one is asked, one that fails is left out.

A server is in use only after it has answered with the wanted weights. Whatever goes wrong with it - no
answer in time, an error, other weights than were sent - takes it out until the next change of weights has
reached it and been checked: an outcome that is not known is never taken for success.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Json = dict[str, Any]
REACHABLE = 10.0  # seconds a running server may take to say what it is


class ServerError(RuntimeError):
    """A server, or all of them, cannot be used."""


class Refused(ServerError):
    """The server is well and does not take the request: another would not either."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status  # of HTTP


@dataclass
class Server:
    """One server and what is known of it."""

    url: str
    inflight: int = 0
    usable: bool = False
    problem: str = "no weights yet"
    failures: int = 0  # times it was left out
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held from new weights to their check

    def leave_out(self, problem: str) -> None:
        self.usable, self.problem = False, problem
        self.failures += 1


class ServerPool:
    """Requests to the servers, from a thread with its own event loop (a notebook has one of its own).

    Args:
        timeout: seconds that one request may take.
        retries: servers that a request is tried on.
        slots: requests at once on one server.
    """

    def __init__(self, urls: Sequence[str], timeout: float, retries: int, slots: int):
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self.timeout, self.retries, self.slots = timeout, retries, slots
        self.retried = 0
        self.breaks = 0  # times that responses were broken off on purpose
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()
        self._session = self.run(self._open())
        self.slot = asyncio.Semaphore(slots * len(self.servers))  # first come, first served

    def submit(self, work: Coroutine) -> Future:
        """Begin a coroutine in the pool's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine) -> Any:
        """The result of a coroutine of the pool's loop; an interrupt cancels it."""
        return wait(self.submit(work))

    def close(self) -> None:
        """Break off what is under way."""
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def usable(self) -> list[Server]:
        return [server for server in self.servers if server.usable]

    def describe(self) -> str:
        return "; ".join("in use" if s.usable else s.problem for s in self.servers)

    async def ask(self, server: Server, path: str, body: Any = None, timeout: float = 0.0) -> Json:
        """The JSON that the server answers to a POST, or to a GET where there is no body.

        Args:
            body: a dict, or JSON as an iterator over its bytes, where it is too large to be built.

        Raises:
            ServerError: no answer in time, an answer other than 200, or no JSON.
        """
        limit = aiohttp.ClientTimeout(total=timeout or self.timeout)
        method = "GET" if body is None else "POST"
        plain = body is None or isinstance(body, dict)
        sent = {"json": body} if plain else {"data": body, "headers": {"Content-Type": "application/json"}}
        try:
            async with self._session.request(method, server.url + path, timeout=limit, **sent) as answer:
                text = await answer.text()
                if answer.status != 200:
                    problem = f"{server.url} answered {answer.status} to {path}: {text:.300}"
                    refused = 400 <= answer.status < 500
                    raise Refused(problem, answer.status) if refused else ServerError(problem)
                return await answer.json(content_type=None) if text else {}
        except TimeoutError:
            raise ServerError(f"{server.url}: no answer to {path} in {limit.total:g} s") from None
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise ServerError(f"{server.url}{path}: {type(error).__name__} {error}") from None

    def check_reachable(self) -> None:
        """ValueError if a server does not answer: at the start that is a wrong address."""

        async def ask_all() -> list[Json | BaseException]:
            asked = [self.ask(server, "/model_info", timeout=REACHABLE) for server in self.servers]
            return await asyncio.gather(*asked, return_exceptions=True)

        problems = [str(said) for said in self.run(ask_all()) if isinstance(said, BaseException)]
        if problems:
            raise ValueError(f"--rollout.servers: {'; '.join(problems)}")

    async def generate(self, body: Json, home: dict[int, Server], group: int) -> Json:
        """An answer to /generate, from the server where the group's other samples are if it is free.

        It counts only if the server has not been left out meanwhile, and new weights that came meanwhile
        have been checked.

        Args:
            home: group -> server, kept by the caller: a shared prompt is read once.

        Raises:
            ServerError: no server gave one.
        """
        said: list[str] = []
        for _ in range(max(self.retries, 1)):
            server = self._pick(home, group)
            failures = server.failures
            server.inflight += 1
            try:
                answer = await self.ask(server, "/generate", body)
                async with server.changing:
                    if server.failures == failures:
                        return answer
                said.append(f"{server.url} was left out meanwhile: {server.problem}")
            except Refused:
                raise
            except ServerError as error:
                said.append(str(error))
                server.leave_out(str(error))
            finally:
                server.inflight -= 1
            self.retried += 1
        raise ServerError(f"a response failed on {len(said)} servers: {'; '.join(said)}")

    async def everywhere(self, work: Callable[[Server], Awaitable[Any]]) -> None:
        """Do `work` with each server at once; those that it fails for are left out, the others put to use.

        Raises:
            ServerError: none is left.
        """

        async def one(server: Server) -> None:
            try:
                await work(server)
                server.usable, server.problem = True, ""
            except ServerError as error:
                server.leave_out(str(error))

        await asyncio.gather(*map(one, self.servers))
        if not self.usable:
            raise ServerError(f"no SGLang server can be used: {self.describe()}")

    def _pick(self, home: dict[int, Server], group: int) -> Server:
        """The group's own server while it has a free slot, else the least busy one."""
        if not self.usable:
            raise ServerError(f"no SGLang server is left: {self.describe()}")
        least = min(self.usable, key=lambda server: server.inflight)
        own = home.setdefault(group, least)
        if own.usable and (own.inflight < self.slots or own.inflight <= least.inflight):
            return own
        home[group] = least
        return least

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


def wait(future: Future) -> Any:
    """Its result; an interrupt cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
