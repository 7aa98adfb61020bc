"""A pool of SGLang servers over HTTP: the least busy one is asked, one that fails is left out.

A server is in use only after it has answered with the wanted weights. Whatever goes wrong with it - no
answer in time, an error, an answer that cannot be true, other weights than were sent - takes it out until
the newest weights have reached it (again) and been checked: an outcome that is not known is never taken
for success. `tending.tend` brings servers back while others work. A wait for servers has a limit
(`patience`), and says what it waits for.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.errors import BusyError, RefusedError, ServerError, UnreachableError, UserError
from jaxrl_llm.rollout.sglang.client import Client
from jaxrl_llm.rollout.sglang.server import Server, nonsense, say
from jaxrl_llm.structs import Metrics

Result = TypeVar("Result")
REACHABLE = 30.0  # seconds a running server may take to say what it is
WORD = 30.0  # seconds between two words about a wait


class ServerPool:
    """Requests to the servers, from a thread with its own event loop (a notebook has one of its own).

    Args:
        timeout: seconds that one request may take.
        retries: servers that a request is tried on.
        slots: requests at once on one server.
        patience: seconds to wait for a server when none can be used, or all are too busy.
        router: address of a router in front of the servers, which then gets what is to be generated;
            "" = none.

    Attributes:
        servers: those of now; they may come and go.
    """

    def __init__(
        self,
        urls: Sequence[str],
        timeout: float,
        retries: int,
        slots: int,
        patience: float = 0.0,
        router: str = "",
    ):
        self.servers = [Server(url) for url in urls]
        self.timeout, self.retries, self.slots, self.patience = timeout, retries, slots, patience
        self.router = Server(router) if router else None
        self.retried = 0
        self.breaks = 0  # times that responses were broken off on purpose
        self.label = ""  # of the newest weights
        self.resting = False  # colocated: nobody is brought into use
        self._work: Callable[[Server], Awaitable[Any]] | None = None  # gives a server the newest weights
        self._widest, self._next_word = len(self.servers), 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()
        self._client = self.run(self._open(timeout))
        self.ask, self.ask_text = self._client.ask, self._client.ask_text
        self.slot = asyncio.Semaphore(slots * len(self.servers))  # first come, first served

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine of the pool's loop; an interrupt cancels it."""
        return wait(self.start(work))

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin a coroutine in the pool's loop: its future. `close` ends it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self.run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def usable(self) -> list[Server]:
        return [server for server in self.servers if server.usable]

    def describe(self) -> str:
        said = dict.fromkeys("in use" if s.usable else s.problem for s in self.servers)
        return "; ".join(said) or "the pool has no servers"

    def metrics(self) -> Metrics:
        """How the servers did since the last call; `retried` and `failures` since the start."""
        found = [server.take_counts() for server in self.servers]
        speeds = [counts.tokens / counts.busy for counts in found if counts.busy] or [0.0]
        return {
            "servers/retried": self.retried,
            "servers/failures": sum(server.failures for server in self.servers),
            "servers/left_out_seconds": sum(counts.left_out for counts in found),
            "servers/inflight/max": max((counts.inflight for counts in found), default=0),
            "servers/tokens_per_second/min": min(speeds),
            "servers/tokens_per_second/max": max(speeds),
        }

    def check_reachable(self) -> None:
        """ValueError if a server does not answer: at the start that is a wrong address."""

        async def ask_all() -> list[Json | BaseException]:
            everybody = [*self.servers, *([self.router] if self.router else [])]
            asked = [self.ask(server, "/model_info", timeout=REACHABLE) for server in everybody]
            return await asyncio.gather(*asked, return_exceptions=True)

        problems = [str(said) for said in self.run(ask_all()) if isinstance(said, BaseException)]
        if problems:
            raise UserError(f"--rollout.servers: {'; '.join(problems)}")

    async def generate(
        self, body: Json, home: dict[int, Server], group: int, read: Callable[[Json, str], Result]
    ) -> Result:
        """An answer to /generate, from the server where the group's other samples are if it is free.

        It counts only if the server has not been left out meanwhile, and new weights that came meanwhile
        have been checked.

        Args:
            home: group -> server, kept by the caller: a shared prompt is read once.
            read: (the answer, label of the weights that the server had been given) -> what it says;
                ValueError, TypeError or LookupError if it cannot be true.

        Raises:
            ServerError: no server gave one.
        """
        said: list[str] = []
        deadline, pause = time.monotonic() + self.patience, 0.25
        while len(said) < max(self.retries, 1):
            server = await self._pick(home, group)
            failures = server.failures
            try:
                return await self._generate_on(server, body, group, read)
            except ServerError as error:
                down = server is self.router and isinstance(error, UnreachableError)
                if isinstance(error, RefusedError):
                    raise
                if isinstance(error, BusyError) or down:
                    if time.monotonic() > deadline:
                        raise
                    self._tell(f"{error}; trying again for {self.patience:g} s")
                    await asyncio.sleep(pause * random.uniform(0.5, 1))
                    pause = min(2 * pause, 8.0)
                    continue
                said.append(str(error))
                if server.failures == failures and server is not self.router:
                    server.leave_out(error)
                self.retried += 1
        raise ServerError(f"a response failed {len(said)} times: {'; '.join(dict.fromkeys(said))}")

    async def everywhere(
        self,
        work: Callable[[Server], Awaitable[Any]],
        label: str = "",
        servers: Sequence[Server] | None = None,
    ) -> None:
        """Do `work` with each server at once; those that it fails for are left out, the others put to use.

        It is done again, in time, with a server that is left out later or comes later.

        Args:
            servers: None = those of now.

        Raises:
            ServerError: none can be used; said at once where they answer, after `patience` where they do not.
        """
        self._work, self.label, self.resting = work, label, False
        await asyncio.gather(*map(self.admit, self.servers if servers is None else servers))
        if not self.servers or any(server.gone for server in self.servers):
            await self._until_usable()
        if not self.usable:
            raise ServerError(f"no SGLang server can be used: {self.describe()}")
        if self.router:
            self.router.label = label

    async def admit(self, server: Server) -> None:
        """Give a server the newest weights; put it to use if that goes well."""
        async with server.admitting:
            work, label = self._work, self.label
            if work is None:
                return
            try:
                await work(server)
            except ServerError as error:
                server.leave_out(error)
            except (ValueError, TypeError, LookupError) as error:
                server.leave_out(nonsense(server.url, error))
            else:
                if work is self._work and server in self.servers:
                    server.put_to_use(label)

    def replace(self, urls: Sequence[str]) -> None:
        """The servers of now. One that has gone gets no more requests; a new one is used once admitted."""
        known = {server.url: server for server in self.servers}
        self.servers = [known.pop(url, None) or Server(url) for url in dict.fromkeys(urls)]
        for server in known.values():
            server.usable, server.problem = False, f"{server.url} has left the pool"
        for _ in range(self.slots * (len(self.servers) - self._widest)):
            self.slot.release()
        self._widest = max(self._widest, len(self.servers))

    async def _generate_on(
        self, server: Server, body: Json, group: int, read: Callable[[Json, str], Result]
    ) -> Result:
        failures, label = server.failures, server.label
        sticky = {"X-SMG-Routing-Key": str(group)} if server is self.router else {}
        with server.working(
            asyncio.create_task(self.ask(server, "/generate", body, headers=sticky))
        ) as request:
            await asyncio.wait({request})
            if request.cancelled():
                raise ServerError(f"{server.url} was left out meanwhile: {server.problem}")
            said = request.result()
            try:
                answer = read(said, label)
            except (ValueError, TypeError, LookupError) as error:
                raise nonsense(server.url, error) from None
            server.heard(said)
            async with server.changing:
                if server.failures != failures:
                    raise ServerError(f"{server.url} was left out meanwhile: {server.problem}")
                return answer

    async def _pick(self, home: dict[int, Server], group: int) -> Server:
        """The group's own server while it has a free slot, else the least busy one."""
        if self.router:
            return self.router
        await self._until_usable()
        least = min(self.usable, key=lambda server: server.inflight)
        own = home.setdefault(group, least)
        if own.usable and (own.inflight < self.slots or own.inflight <= least.inflight):
            return own
        home[group] = least
        return least

    async def _until_usable(self) -> None:
        deadline = time.monotonic() + self.patience
        while not self.usable:
            if time.monotonic() >= deadline:
                waited = f" for {self.patience:g} s (--sglang.patience)" if self.patience else ""
                raise ServerError(f"no SGLang server can be used{waited}: {self.describe()}")
            self._tell(f"no server can be used; waiting {self.patience:g} s for one: {self.describe()}")
            await asyncio.sleep(0.1)

    def _tell(self, text: str) -> None:
        """A word about a wait, now and then."""
        if time.monotonic() >= self._next_word:
            self._next_word = time.monotonic() + WORD
            say(text)

    async def _open(self, timeout: float) -> Client:
        return Client(timeout)

    async def _shut(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()


def wait(future: Future[Result]) -> Result:
    """Its result; an interrupt cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
