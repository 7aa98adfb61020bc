"""The servers that weights are pushed to, as protocols: no engine is imported here."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from jaxrl_llm.errors import InvalidReplyError, ServerError

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from jaxrl_llm.bridge.adapters import Adapter
    from jaxrl_llm.bridge.buckets import Bucket

Json = dict[str, Any]
Announced = tuple[Json, list[Any]]
"""Fields of the request that announces a broadcast, and its content: objects with a buffer of bytes."""
Result = TypeVar("Result")
PauseMode = Literal["abort", "retract", "in_place"]
"""SGLang's words for what becomes of requests in flight while weights change (`/pause_generation`)."""

CACHE, WEIGHTS = "kv_cache", "weights"
"""SGLang's tags for the memory that a colocated server releases while the trainer works."""
QUIET_LIMIT = 20.0
"""Seconds without a reply after which /health is requested."""
HEALTH_TIMEOUT = 30.0
"""Seconds that /health may take: it sleeps one, then waits up to 20 for a token."""
SHORT_TIMEOUT = 30.0  # seconds for a reply that needs no work
LAST_ON_CONNECTION: Mapping[str, str] = MappingProxyType({"Connection": "close"})
"""vLLM closes a connection after a reply 500 without saying so: a request that followed would be lost."""
MAX_SHOWN = 300  # characters of a server's message that an error shows


class ServerKind(Protocol):
    """One kind of server: its routes, and its form of what the pool asks.

    The pool's requests to generate, their replies and `info` are JSON in SGLang's form. The methods raise
    ServerError if the server refuses, fails or does not reply.
    """

    name: str
    """In messages."""
    up_route: str
    """GET answers 200 once the server works."""
    generate_route: str
    sends_tied_head: bool
    """Tied embeddings are sent as the output head, too."""
    update_options: Json
    """Fields of a request with a payload of `pack_update`."""
    drops_cache_alone: bool
    """True if `drop_cache` is a separate call after every push; else the push drops the cache."""

    def request_of(self, body: Json) -> Json:
        """Return the server's form of the pool's request to generate."""

    def reply_of(self, reply: Json, body: Json) -> Json:
        """Return the pool's form of a reply to `body`; raises any error of `parsing_reply` if it cannot."""

    async def info(self, pool: PoolLike, server: ServerLike, timeout: float) -> Json:
        """Return what a server says of itself, with "tp_size"."""

    async def score(self, receiver: Receiver, ids: list[int], adapter: str) -> tuple[str, list[float]]:
        """Return the version of the server's weights, and the log-probs of ids[1:], nats.

        Args:
            adapter: name of the adapters; "" = none.
        """

    def problem(self, info: Json) -> str:
        """Return why the server cannot be used, with the fix; "" = it can."""

    async def abort_all(self, pool: PoolLike, server: ServerLike, timeout: float) -> None:
        """Abort all requests in flight: they end with their tokens so far."""

    async def pause(self, receiver: Receiver, mode: PauseMode) -> None:
        """Stop generation until `resume`."""

    async def resume(self, receiver: Receiver, timeout: float = 0.0) -> None:
        """Continue generation."""

    async def begin(self, receiver: Receiver, session: bool) -> bool:
        """Open an update session; False = this server has none, or the transport (`session`) needs none."""

    async def end(self, receiver: Receiver, label: str, timeout: float = 0.0) -> None:
        """Close the session; `label` is of the weights, "" if they did not arrive."""

    async def send_folder(self, receiver: Receiver, folder: Path, options: Json) -> None:
        """Have the server load a Hugging Face folder that it sees."""

    def pack(self, bucket: Bucket) -> bytes:
        """Return a bucket's tensors as a part of a request."""

    def pack_update(self, piece: bytes) -> bytes:
        """Return a piece of an update (`bridge/delta.py`) as a part of a request."""

    async def held_label(self, receiver: Receiver) -> str:
        """Return the label of the weights that the server says it holds."""

    async def send_bucket(self, receiver: Receiver, payload: bytes, *, last: bool, options: Json) -> None:
        """Send the result of `pack` or `pack_update`; `last` = the push is complete with it."""

    async def join_group(self, receiver: Receiver, group: Json) -> None:
        """Have the server join a process group, given by the fields of SGLang's request."""

    async def leave_group(self, receiver: Receiver, name: str, timeout: float) -> None:
        """Have the server leave the group."""

    def announce(self, bucket: Bucket) -> Announced:
        """Return a bucket for a broadcast."""

    async def receive_broadcast(
        self, receiver: Receiver, fields: Json, *, last: bool, options: Json, name: str
    ) -> None:
        """Have the server take the broadcast that these fields announce, in the group of this name."""

    async def drop_cache(self, receiver: Receiver) -> None:
        """Drop cached keys and values of older weights."""

    async def load_adapter(self, receiver: Receiver, adapter: Adapter) -> list[str]:
        """Load an adapter. Returns the names of all that are loaded."""

    async def unload_adapter(self, receiver: Receiver, name: str) -> None:
        """Unload an adapter that no request names."""


class ServerLike(Protocol):
    """One server."""

    url: str
    unreachable: bool
    """The last request got no reply."""
    update_lock: asyncio.Lock
    """Held from new weights to their check: responses generated meanwhile do not count yet."""
    released: set[str]
    """Tags of the memory that it has released."""
    label: str
    """Of the weights that it holds; "" = not known."""


class PoolLike(Protocol):
    """All servers of a run, and the event loop that sends the requests."""

    kind: ServerKind
    servers: Sequence[ServerLike]
    timeout: float
    """Seconds that one request may take."""
    interruptions: int
    """Times that responses in flight were interrupted on purpose."""

    @property
    def usable(self) -> Sequence[ServerLike]:
        """Servers that hold the newest weights."""

    @property
    def labels_in_use(self) -> set[str]:
        """Labels that requests in flight, or the next ones, name as their adapters."""

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the pool's event loop and return its result."""

    async def request(
        self,
        server: ServerLike,
        path: str,
        body: Any = None,
        timeout: float = 0.0,
        *,
        headers: Mapping[str, str] = ...,
    ) -> Json:
        """Send a request and return the JSON object of the reply.

        Raises:
            ServerError: no reply in time, an error status, or no JSON object.
        """

    async def request_bytes(
        self, server: ServerLike, path: str, body: Any = None, timeout: float = 0.0
    ) -> bytes:
        """Send a request and return the reply, of any form.

        Raises:
            ServerError: no reply in time, or an error status.
        """

    async def update_all(
        self,
        update: Callable[[ServerLike], Awaitable[Any]],
        label: str = "",
        servers: Sequence[ServerLike] | None = None,
    ) -> None:
        """Run `update` for all servers at once. A server for which it raises an error is left out."""


@contextlib.contextmanager
def parsing_reply(url: str) -> Iterator[None]:
    """Turn an error of reading a server's reply, which is JSON but of any shape, into InvalidReplyError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        message = f"{url} gave an answer that cannot be used: {type(error).__name__} {error}"
        raise InvalidReplyError(message) from None


@dataclass
class Receiver:
    """A server during a push.

    Attributes:
        ranks: processes of the server, each with a part of the model (tensor parallelism).
        info: what the server said of itself.
        takes_delta: it holds the weights that the push changes, and gets the changes.
    """

    pool: PoolLike
    server: ServerLike
    ranks: int = 1
    info: Json = field(default_factory=dict)
    takes_delta: bool = False

    async def request(self, path: str, body: Any, timeout: float = 0.0) -> Json:
        """Send a request and return the JSON object of the reply."""
        return await self.pool.request(self.server, path, body, timeout, headers=LAST_ON_CONNECTION)

    async def in_health(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await a short request; while the reply is missing, the server must prove its health.

        Raises:
            ServerError: the request fails, or the server is unhealthy.
        """
        import asyncio  # slow to import: not for --help

        reply = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([reply], timeout=QUIET_LIMIT))[0]:
                await self.pool.request_bytes(self.server, "/health", timeout=HEALTH_TIMEOUT)
            return await reply
        finally:
            reply.cancel()

    async def update(self, path: str, body: Any, timeout: float = 0.0) -> Json:
        """Send a request, check its success and return the reply.

        Raises:
            ServerError: the reply reports no success.
        """
        reply = await self.request(path, body, timeout)
        if reply.get("success") is not True:
            message = str(reply.get("message") or reply.get("error_message") or "")[:MAX_SHOWN]
            raise ServerError(f"{self.server.url} did not take the weights ({path}): {message}")
        return reply

    async def resume_memory(self, tag: str) -> None:
        """Have the server allocate memory that it has released; SGLang crashes if it has released none."""
        if tag in self.server.released:
            await self.request("/resume_memory_occupation", {"tags": [tag]})
            self.server.released.discard(tag)
