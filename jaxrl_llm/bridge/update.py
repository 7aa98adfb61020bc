"""One change of weights, on all servers at once: pause, session, parcels, go on, check.

A server that fails anywhere in it - an error, no answer in time - is left out, and the others go on without
it. Whatever happens to it in between, one that was told to pause is told to go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from jaxrl_llm.bridge.servers import CACHE, WEIGHTS, Json, Pool, Server, wake
from jaxrl_llm.errors import NoRouteError, RefusedError, ServerError
from jaxrl_llm.structs import Params

Pause = Literal["abort", "retract", "in_place"]
AGAIN = 10.0  # seconds that one which did not answer last time may take
ANSWERS = 30.0  # seconds a server may take to say what it is, or to be told that a push has failed


class Parcel(NamedTuple):
    """Part of a push, the same for every server."""

    content: Any  # what the transport's `send` makes something of; None where there is no pool
    size: int  # bytes of weights
    last: bool


@dataclass
class Link:
    """A server that is being given weights.

    Attributes:
        ranks: processes that each hold a part of the model (tensor parallelism).
    """

    pool: Pool
    server: Server
    ranks: int = 1

    async def ask(self, path: str, body: Any, timeout: float = 0.0) -> Json:
        return await self.pool.ask(self.server, path, body, timeout)

    async def update(self, path: str, body: Any) -> None:
        """A POST whose answer says whether it succeeded.

        Raises:
            ServerError: it has not.
        """
        said = await self.ask(path, body)
        if not said.get("success"):
            raise ServerError(
                f"{self.server.url} did not take the weights ({path}): {said.get('message', said)!s:.300}"
            )


class WeightTransport(Protocol):
    """How weights reach the servers."""

    session: bool
    """Whether `send` wants a session of the server around it."""
    lasting: bool
    """Whether parcels can be sent again later, to a server that comes back."""

    def parcels(self, params: Params, label: str) -> Iterator[Parcel]:
        """The push, piece by piece. A collective: every process iterates."""

    async def connect(self, link: Link) -> None:
        """What must be there before the server is paused."""

    async def send(self, link: Link, parcel: Parcel, end: Json) -> None:
        """Give the parcel to the server; `end` goes into the request, too.

        Raises:
            ServerError: it has not arrived, or may not have.
        """


class Update:
    """A push under way. Parcels are `put` from the thread that gathers them, one ahead of the slowest server.

    Args:
        check: the last step with each server, when it generates again but its answers do not count yet.
        pause: what becomes of responses in flight; see SGLangConfig.
    """

    def __init__(
        self,
        pool: Pool,
        transport: WeightTransport,
        pause: Pause,
        label: str,
        check: Callable[[Server], Awaitable[None]],
    ):
        self.pool, self.transport, self.pause, self.label, self.check = pool, transport, pause, label, check
        self.wire_seconds: dict[str, float] = {}  # by address: spent in sending
        self.pause_seconds: dict[str, float] = {}
        self._inboxes: dict[int, asyncio.Queue[Parcel | None]] = {}
        self._past: list[Parcel] = []  # where they last
        pool.run(self._start())

    def put(self, parcel: Parcel | None) -> None:
        self.pool.run(self._put(parcel))

    def finish(self) -> None:
        """Raises ServerError if no server has the weights."""
        self.pool.run(self._join())

    def abandon(self) -> None:
        """The rest will not come: the servers go on, left out."""
        with contextlib.suppress(ServerError):
            self.put(None)  # not cancelled: a request that is cut off may be carried out after the next one
            self.finish()

    async def _start(self) -> None:
        servers = list(self.pool.servers)
        self._inboxes = {id(server): asyncio.Queue(1) for server in servers}
        self._task = asyncio.create_task(self.pool.everywhere(self._one, self.label, servers))

    async def _put(self, parcel: Parcel | None) -> None:
        if self.transport.lasting and parcel:
            self._past.append(parcel)
        await asyncio.gather(*(inbox.put(parcel) for inbox in self._inboxes.values()))

    async def _join(self) -> None:
        await self._task

    async def _one(self, server: Server) -> None:
        """The push for one server, while it goes on or, where parcels last, later."""
        if id(server) not in self._inboxes:
            if not (self._past and self._past[-1].last):
                raise ServerError(f"{server.url} waits for the next push")
            self._inboxes[id(server)] = asyncio.Queue()
            for parcel in self._past:
                self._inboxes[id(server)].put_nowait(parcel)
        try:
            await self._give(server, self._inboxes[id(server)])
        finally:
            inbox = self._inboxes.pop(id(server))
            if inbox.full():  # nobody waits any longer to put something there
                inbox.get_nowait()

    async def _give(self, server: Server, inbox: asyncio.Queue[Parcel | None]) -> None:
        link = Link(self.pool, server, await ranks_of(self.pool, server))
        await self.transport.connect(link)
        parcel = await self._next(inbox)
        async with server.changing:  # what it writes from here on counts once it has been checked
            began = time.perf_counter()
            around = session(link) if self.transport.session else contextlib.nullcontext()
            await wake(self.pool, server, WEIGHTS)
            async with paused(link, self.pause):
                async with around:
                    await self._send(link, parcel)
                    while not parcel.last:
                        parcel = await self._next(inbox)
                        await self._send(link, parcel)
                if self.pause == "in_place":
                    # Refused while responses in flight read what is cached, and answered in plain text.
                    with contextlib.suppress(ServerError):
                        await link.ask("/flush_cache", {})
            self.pause_seconds[server.url] = time.perf_counter() - began
            await wake(self.pool, server, CACHE)
            await self.check(server)

    async def _next(self, inbox: asyncio.Queue[Parcel | None]) -> Parcel:
        parcel = await inbox.get()
        if parcel is None:
            raise ServerError("a push was broken off by the trainer")
        return parcel

    async def _send(self, link: Link, parcel: Parcel) -> None:
        began = time.perf_counter()
        # Cached keys and values are of the old weights. To drop them in place would end the server: an
        # assertion of SGLang's fails where responses in flight still read them.
        end: Json = {"flush_cache": parcel.last and self.pause != "in_place"}
        if parcel.last:
            end["weight_version"] = self.label
        await self.transport.send(link, parcel, end)
        spent = time.perf_counter() - began
        self.wire_seconds[link.server.url] = self.wire_seconds.get(link.server.url, 0.0) + spent


async def ranks_of(pool: Pool, server: Server) -> int:
    """Its tensor parallelism. One that cannot say so in time need not be given weights."""
    limit = AGAIN if server.gone else ANSWERS
    said = await pool.ask(server, "/server_info", timeout=min(limit, pool.timeout))
    return int(said.get("tp_size", 1))


@contextlib.asynccontextmanager
async def paused(link: Link, mode: str) -> AsyncIterator[None]:
    """The server writes nothing inside; afterwards it goes on, whatever has happened."""
    link.pool.breaks += 1
    try:
        await link.ask("/pause_generation", {"mode": mode})
        yield
    except BaseException:
        with contextlib.suppress(ServerError):
            await link.ask("/continue_generation", {}, ANSWERS)
        raise
    await link.ask("/continue_generation", {})


@contextlib.asynccontextmanager
async def session(link: Link) -> AsyncIterator[None]:
    """What SGLang wants around tensors since 0.5.21; older servers do not know it and need none."""
    if not await _begin(link):
        yield
        return
    try:
        yield
    except BaseException:
        with contextlib.suppress(ServerError):
            await link.ask("/end_weight_update", {}, ANSWERS)
        raise
    await link.update("/end_weight_update", {})


async def _begin(link: Link) -> bool:
    """Open a session, after ending one that a killed trainer has left; False = the server has none."""
    try:
        await link.update("/begin_weight_update", {})
    except NoRouteError:
        return False
    except RefusedError as refusal:
        if "already open" not in str(refusal):
            raise
        await link.update("/end_weight_update", {})
        await link.update("/begin_weight_update", {})
    return True
