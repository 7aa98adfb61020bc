"""A pool of servers of one kind: the least busy one gets a request, one that fails is left out.

A server is in use only after a reply with the newest weights. Any failure - no reply in time, an error, a
reply that cannot be true, other weights than were sent - takes it out of use until the newest weights have
reached it (again) and been probed: an unknown outcome never counts as success. Health checks (health.py)
bring servers back while others work. A wait for servers has a limit (`patience`), and its reason is printed
on stderr.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.bridge.servers import Json, ServerKind, parsing_reply
from jaxrl_llm.errors import BusyError, LostError, RefusedError, ServerError, UnreachableError, UserError
from jaxrl_llm.loop_thread import LoopThread, Result
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.rollout.servers.request_slots import RequestSlots
from jaxrl_llm.rollout.servers.server import Changes, Server, print_line
from jaxrl_llm.rollout.servers.validate import Generated, max_reply_bytes
from jaxrl_llm.structs import Metrics

if TYPE_CHECKING:
    from jaxrl_llm.rollout.servers.client import Client

Read = Callable[[Json, Json, str], Generated]
"""(reply, request, label of the weights that had been sent to the server) -> its tokens; an error of
`parsing_reply` if it cannot be true."""
START_TIMEOUT = 30.0  # seconds for the first reply of a running server
CLOSE_SECONDS = 30.0  # for requests to end
LOG_INTERVAL = 30.0  # seconds between two lines about a wait
POLL_INTERVAL = 0.1
MAX_LOST = 30
"""Times that one response may lose its server. A pool whose servers come and go loses some by chance; a
request that ends every server must end the run."""


class ServerResponse(NamedTuple):
    """A reply to /generate, and the address of its server."""

    generated: Generated
    server: str


class ServerPool:
    """Send requests to the servers, from a thread with a separate event loop (a notebook has one already).

    Args:
        urls: repeated addresses count once.
        timeout: time limit of a request, seconds.
        retries: times that a request is tried, on one server or another.
        slots: requests at once on one server.
        patience: seconds to wait if no server is usable, or all are too busy.
        kind: of all of them, and of the router.
        router: address of a router in front of the servers, which then gets all requests to generate;
            "" = none.

    Attributes:
        servers: the present ones; they may come and go.
    """

    def __init__(
        self,
        urls: Sequence[str],
        timeout: float,
        retries: int,
        slots: int,
        *,
        patience: float = 0.0,
        router: str = "",
        kind: ServerKind = KINDS["sglang"],
    ):
        self.kind = kind
        self.changes = Changes()
        members = dict.fromkeys(url.rstrip("/") for url in urls)
        self.servers = [Server(url, changes=self.changes) for url in members]
        self._departing: list[Server] = []  # no members any more, with requests in flight
        self.timeout, self.retries, self.slots, self.patience = timeout, retries, slots, patience
        self.router = Server(router) if router else None
        self.excluded: dict[str, Server] = {}  # by address: not used again
        self.retried = 0
        self.interruptions = 0  # times that responses were interrupted on purpose
        self.label = ""  # of the newest weights
        self.names_adapters = False  # requests give the label of their server's weights as their adapters
        self.memory_released = False  # colocated: no server is brought into use
        self._update: Callable[[Server], Awaitable[Any]] | None = None  # gives a server the newest weights
        self._next_line = 0.0
        # Requests of any thread go to one event loop.
        self._thread = LoopThread("servers")
        self._client = self.run(self._open(timeout))
        self.request, self.request_bytes = self._client.request, self._client.request_bytes
        self.places = RequestSlots(self._num_slots)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the pool's loop and return its result; an interrupt cancels it."""
        return self._thread.run(work)

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin a coroutine in the pool's loop. `close` ends it."""
        return self._thread.start(work)

    def close(self) -> None:
        """End all requests, and the loop."""
        self._thread.close(CLOSE_SECONDS, self._client.close)

    @property
    def usable(self) -> list[Server]:
        return [server for server in self.servers if server.usable]

    @property
    def labels_in_use(self) -> set[str]:
        """Labels of weights that requests in flight, or the next ones, rest on."""
        servers = [*self.servers, *([self.router] if self.router else [])]
        return {label for server in servers for label in (server.label, *server.labels_in_flight)} - {""}

    def describe(self) -> str:
        """Return the state of the servers, for a message."""
        states = dict.fromkeys(
            "in use" if server.usable else server.problem
            for server in [*self.servers, *self.excluded.values()]
        )
        return "; ".join(states) or "the pool has no servers"

    def metrics(self) -> Metrics:
        """Return counts since the last call; `retried`, `failures`, `joined` and `lost` since the start."""
        counts = [server.take_counts() for server in self.servers]
        speeds = [each.tokens / each.busy_seconds for each in counts if each.busy_seconds] or [0.0]
        return {
            "servers/retried": self.retried,
            "servers/failures": self.changes.failures,
            "servers/joined": self.changes.joined,
            "servers/lost": self.changes.lost,
            "servers/left_out_seconds": sum(each.left_out_seconds for each in counts),
            "servers/inflight/max": max((each.max_inflight for each in counts), default=0),
            "servers/tokens_per_second/min": min(speeds),
            "servers/tokens_per_second/max": max(speeds),
        }

    def check_reachable(self, problem: Callable[[Json], str]) -> None:
        """Refuse addresses without a reply, or with an unsuitable server: at the start, this is a mistake.

        Args:
            problem: returns the problem of a server's reply to /server_info, with the fix, or "".

        Raises:
            UserError: a server does not reply or is unsuitable; the message names it.
        """

        async def check(server: Server) -> None:
            await self.request_bytes(server, self.kind.up_route, timeout=START_TIMEOUT)
            if server is not self.router:
                info = await self.kind.info(self, server, START_TIMEOUT)
                with parsing_reply(server.url):
                    text = self.kind.problem(info) or problem(info)
                if text:
                    raise ServerError(f"{server.url} {text}")

        async def request_all() -> list[BaseException | None]:
            servers = [*self.servers, *([self.router] if self.router else [])]
            return await asyncio.gather(*map(check, servers), return_exceptions=True)

        problems = [str(reply) for reply in self.run(request_all()) if isinstance(reply, BaseException)]
        if problems:
            raise UserError(f"--rollout.servers: {'; '.join(problems)}")

    async def generate(
        self, body: Json, group_servers: dict[int, Server], group: int, read: Read
    ) -> ServerResponse:
        """Return a response to /generate, from the server of the group's other samples if it has a slot.

        It counts only if the server was not left out meanwhile, and any new weights have been probed. A
        request that one server refuses is tried on every other server. A server that is lost is no failure of
        the request, up to `MAX_LOST` times.

        Args:
            group_servers: group -> server, kept by the caller: a shared prompt is read once.

        Raises:
            RefusedError: every server refuses the request.
            ServerError: no server gave a response.
        """
        # Refusals are final for a server, busy servers are retried, failures leave a server out.
        problems: list[str] = []
        refusals: dict[Server, str] = {}
        deadline, pause, lost = time.monotonic() + self.patience, 0.25, 0
        while len(problems) < max(self.retries, 1):
            server = await self._pick(group_servers, group, refusals, deadline)
            failures = server.failures
            try:
                return await self._generate_on(server, body, group, read)
            except RefusedError as error:
                refusals[server] = str(error)
                self._print_wait(f"a refused request is tried on another server: {error}")
                if server is self.router:  # the router may choose another server next time
                    problems.append(str(error))
            # Busy servers and a router that is down: wait, and try again.
            except ServerError as error:
                down = server is self.router and isinstance(error, UnreachableError)
                if isinstance(error, BusyError) or down:
                    if time.monotonic() > deadline:
                        raise
                    self._print_wait(f"{error}; trying again for {self.patience:g} s")
                    await asyncio.sleep(pause * random.uniform(0.5, 1))
                    pause = min(2 * pause, 8.0)
                    continue
                lost += isinstance(error, LostError)
                if not isinstance(error, LostError) or lost >= MAX_LOST:
                    problems.append(str(error))
                if server.failures == failures and server is not self.router:
                    server.leave_out(error)
                deadline, pause = time.monotonic() + self.patience, 0.25
            self.retried += 1
        different = "; ".join(dict.fromkeys(problems))
        raise ServerError(f"a response failed {len(problems)} times (--servers.retries): {different}")

    async def update_all(
        self,
        update: Callable[[Server], Awaitable[Any]],
        label: str = "",
        servers: Sequence[Server] | None = None,
    ) -> None:
        """Run `update` for all servers at once; servers for which it fails are left out.

        It runs again later for a server that was left out or that is new.

        Args:
            servers: None = the present ones.

        Raises:
            ServerError: no server is usable; raised immediately if servers reply, else after `patience`.
        """
        self._update, self.label, self.memory_released = update, label, False
        await asyncio.gather(*map(self.admit, self.servers if servers is None else servers))
        if not self.servers or any(server.unreachable for server in self.servers):
            await self._until_usable()
        if not self.usable:
            raise ServerError(f"no {self.kind.name} server can be used: {self.describe()}")
        if self.router:
            self.router.label = label

    async def admit(self, server: Server) -> None:
        """Give a server the newest weights; use it if that goes well."""
        async with server.admission_lock:
            update, label = self._update, self.label
            if update is None:
                return
            try:
                await update(server)
            except ServerError as error:
                server.leave_out(error)
            else:
                if update is self._update and server in self.servers:
                    server.readmit(label)
                    self.places.wake()

    def set_servers(self, urls: Sequence[str]) -> None:
        """Change the members of the pool: removed servers get no more requests, new ones are admitted first.

        A server that was excluded may come back once its address has been away.
        """
        known = {server.url: server for server in self.servers}
        self.excluded = {url: server for url, server in self.excluded.items() if url in urls}
        members = [url for url in dict.fromkeys(urls) if url not in self.excluded]
        self.servers = [known.pop(url, None) or Server(url, changes=self.changes) for url in members]
        for server in known.values():
            server.depart()
        self._departing = [s for s in [*self._departing, *known.values()] if s.inflight]
        self.places.wake()

    def exclude(self, url: str, error: ServerError) -> None:
        """Leave a server out for good."""
        for server in self.servers:
            if server.url == url:
                server.leave_out(error)
                self.excluded[url] = server
        self.servers = [server for server in self.servers if server.url != url]

    def _num_slots(self) -> int:
        """Return how many requests may run: `slots` on each server in use, and the requests that run on
        departing servers.

        Without a server in use, a few wait for one. A router has servers that are not known here.
        """
        count = len(self.servers) if self.router else len(self.usable)
        return self.slots * max(count, 1) + sum(server.inflight for server in self._departing)

    async def _generate_on(self, server: Server, body: Json, group: int, read: Read) -> ServerResponse:
        failures, label = server.failures, server.label
        sticky = {"X-SMG-Routing-Key": str(group)} if server is self.router else {}
        body = {**body, "rid": uuid.uuid4().hex} | ({"lora_path": label} if self.names_adapters else {})
        limit = max_reply_bytes(body)
        route, asked = self.kind.generate_route, self.kind.request_of(body)
        work = self.request(server, route, asked, headers=sticky, max_bytes=limit)
        with server.running(asyncio.create_task(work), label) as request:
            await asyncio.wait({request})
            if request.cancelled():
                raise LostError(f"{server.url} was left out meanwhile: {server.problem}")
            try:
                reply = request.result()
            except RefusedError as error:
                if self.names_adapters and label in str(error):  # its process may be another one
                    raise ServerError(f"{server.url} has lost its adapters: {error}") from None
                raise
            with parsing_reply(server.url):
                generated = read(self.kind.reply_of(reply, body), body, label)
            server.record_response(len(generated.ids))
            async with server.update_lock:
                if server.failures != failures:
                    raise LostError(f"{server.url} was left out meanwhile: {server.problem}")
                return ServerResponse(generated, server.url)

    async def _pick(
        self, group_servers: dict[int, Server], group: int, refusals: Mapping[Server, str], deadline: float
    ) -> Server:
        """Return the group's server if it has a free slot, else the least busy server.

        Raises:
            RefusedError: all servers, or all usable ones until the deadline, have refused the request.
        """
        if self.router:
            return self.router
        await self._until_usable()
        while not (left := [server for server in self.usable if server not in refusals]):
            if time.monotonic() >= deadline or len(self.usable) == len(self.servers):
                raise RefusedError(f"every server refuses a request: {'; '.join(refusals.values())}")
            await asyncio.sleep(POLL_INTERVAL)
            await self._until_usable()
        least = min(left, key=lambda server: server.inflight)
        own = group_servers.setdefault(group, least)
        if own in left and (own.inflight < self.slots or own.inflight <= least.inflight):
            return own
        group_servers[group] = least
        return least

    async def _until_usable(self) -> None:
        deadline = time.monotonic() + self.patience
        while not self.usable:
            hopeless = self.excluded and not self.servers
            if hopeless or time.monotonic() >= deadline:
                waited = f" for {self.patience:g} s (--servers.patience)" * bool(
                    self.patience and not hopeless
                )
                raise ServerError(f"no {self.kind.name} server can be used{waited}: {self.describe()}")
            self._print_wait(f"no server can be used; waiting {self.patience:g} s for one: {self.describe()}")
            await asyncio.sleep(POLL_INTERVAL)

    def _print_wait(self, text: str) -> None:
        """Print a line about a wait now and then."""
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LOG_INTERVAL
            print_line(text)

    async def _open(self, timeout: float) -> Client:
        from jaxrl_llm.rollout.servers.client import Client  # aiohttp is slow to import: not without servers

        return Client(timeout)
