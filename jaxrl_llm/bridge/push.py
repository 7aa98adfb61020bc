"""A push: the trainer's weights to all servers at once, each step of it in order.

    gather buckets | per server: connect -> pause -> begin -> buckets -> end -> continue -> probe

The trainer's thread gathers the weights part by part; each server takes the parts at its pace, at most one
part late. A server that fails anywhere (an error, no reply in time, a probe that differs) is left out, and
the others continue without it. A paused server is continued after any failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jaxrl_llm import models
from jaxrl_llm.bridge.probe import Probe, SequenceScorer, probe_tokens
from jaxrl_llm.bridge.servers import (
    CACHE,
    SHORT_TIMEOUT,
    WEIGHTS,
    Json,
    PauseMode,
    PoolLike,
    Receiver,
    ServerLike,
    parsing_reply,
)
from jaxrl_llm.errors import RunError, ServerError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.structs import Metrics, Params

RETRY_TIMEOUT = 10.0  # seconds for a server that gave no reply last time
MAX_RANKS = 4096  # processes of one server
Problem = Callable[[Json], str]
"""(reply to /server_info) -> why the server cannot be used; "" = it can."""


class Part(NamedTuple):
    """One part of a push, the same for every server: a bucket, or a folder with all weights."""

    content: Any  # for the transport's `send`; None in processes that send nothing
    num_bytes: int  # of weights
    last: bool
    base: str = ""  # label of weights; servers that hold them take `delta_bytes` in place of `num_bytes`
    delta_bytes: int = 0


class WeightTransport(Protocol):
    """One way for weights to reach the servers."""

    session: bool
    """True if `send` needs a weight-update session of the server around it."""
    can_resend: bool
    """True if parts can be sent again later, to a server that comes back."""

    def parts(self, params: Params, label: str) -> Iterator[Part]:
        """Gather the weights, part by part. A collective: every process iterates."""

    async def connect(self, receiver: Receiver) -> None:
        """Make connections before the server is paused."""

    async def send(self, receiver: Receiver, part: Part, options: Json) -> None:
        """Give the part to the server; `options` belong into the request, too.

        Raises:
            ServerError: it has not arrived, or may not have.
        """


class Publisher:
    """Push weights under a label, and probe each server.

    Args:
        pause: treatment of responses in flight.
        tolerance: of the probe, nats.
        pool: in process 0; None elsewhere.
        score: the trainer's log-probs, a collective.
        on_first: runs a function in process 0; every process gets its result, or its error.
        wait_for_servers: returns when starting servers reply.
        problem: of a server's reply to /server_info.
        served_params: the trainer's weights -> the weights that servers compute with.

    Attributes:
        base: label of a base that stays on the servers: "", since all weights are pushed.
    """

    def __init__(
        self,
        pool: PoolLike | None,
        transport: WeightTransport,
        pause: PauseMode,
        model: TransformerConfig,
        *,
        tolerance: float,
        score: SequenceScorer,
        on_first: Callable[[Callable[[], Any]], Any],
        wait_for_servers: Callable[[], None] = lambda: None,
        problem: Problem = lambda info: "",
        served_params: Callable[[Params], Params] = lambda params: params,
    ):
        self.pool, self.transport, self.pause, self.tolerance = pool, transport, pause, tolerance
        self.score, self.on_first, self.wait_for_servers = score, on_first, wait_for_servers
        self.problem, self.served_params = problem, served_params
        self.base = ""
        self.probe_ids = probe_tokens(model)

    def publish(self, params: Params, label: str) -> Metrics:
        """Give all servers these weights. A collective.

        Raises:
            ServerError: no server took them.
            RunError: weights are NaN or Inf; the servers keep their weights.
        """
        start = time.perf_counter()
        check_finite(params)
        probe = self.make_probe(params, label)
        self.on_first(self.wait_for_servers)
        push = None
        if self.pool:
            push = Push(self, label, probe.check)
            push.start(push.update, label, self.pool.servers)
        _, gather_seconds = gather_into(push, self.transport.parts(params, label))
        metrics = self.on_first(
            lambda: push.finish() | {"bridge/probe_mean_abs": max(probe.differences.values())}
        )
        return metrics | push_metrics(start, gather_seconds, metrics["rollout/publish_bytes"])

    def make_probe(self, params: Params, label: str, adapter: str = "") -> Probe:
        """Return the probe of these weights. A collective.

        Args:
            label: of the weights that the server is to hold. adapter: name that its request gives; "" = none.
        """
        expected = self.score(self.served_params(params), self.probe_ids, 1.0)
        return Probe(self.probe_ids, expected, label, self.tolerance, adapter=adapter)


def check_finite(params: Params) -> None:
    """Refuse weights that are NaN or Inf: a probe would blame the servers.

    Raises:
        RunError: names them.
    """
    if bad := models.nonfinite(params):
        raise RunError(
            f"not sent to the servers: weights hold NaN or Inf: {', '.join(bad)}. Lower "
            "--optim.learning_rate, or start from another --model.path."
        )


def gather_into(push: Push | None, parts: Iterator[Part]) -> tuple[int, float]:
    """Put gathered parts into a push, if this process has one. A collective.

    Returns: bytes of the parts; seconds of waiting for them.
    """
    num_bytes, seconds = 0, 0.0
    try:
        while True:
            before = time.perf_counter()
            part = next(parts, None)
            seconds += time.perf_counter() - before
            if part is None:
                return num_bytes, seconds
            num_bytes += part.num_bytes
            if push:
                push.put(part)
    except BaseException:
        if push:
            push.abandon()
        raise


def push_metrics(start: float, gather_seconds: float, num_bytes: int) -> Metrics:
    """Return the metrics of a push that began at `start` (`time.perf_counter`) and has ended."""
    seconds = time.perf_counter() - start
    return {
        "rollout/publish_seconds": seconds,
        "rollout/publish_bytes": num_bytes,
        "bridge/gather_seconds": gather_seconds,
        "bridge/gigabytes_per_second": num_bytes / seconds / 1e9,
    }


class Push:
    """One push under way. Parts are `put` by the thread that gathers them.

    Args:
        publisher: in process 0.
        label: of the weights.
        check: of a server that has received everything, before it counts.
    """

    def __init__(self, publisher: Publisher, label: str, check: Callable[[Receiver], Awaitable[Any]]):
        self.publisher, self.pool, self.transport = publisher, publisher.pool, publisher.transport
        self.label, self.check = label, check
        self.wire_seconds: Counter[str] = Counter()  # by address, since `start`: spent in sending
        self.pause_seconds: dict[str, float] = {}
        self.sent_bytes: Counter[str] = Counter()  # of weights
        self.full_bytes = 0  # of all weights
        self._full: set[str] = set()  # servers that got all weights
        self._inboxes: dict[int, asyncio.Queue[Part | None]] = {}
        self._sent: list[Part] = []  # where parts last

    def start(
        self, update: Callable[[ServerLike], Awaitable[Any]], label: str, receivers: Sequence[ServerLike]
    ) -> None:
        """Begin to update all servers of the pool.

        Args:
            update: of one server; it calls `self.update` for the receivers.
            label: that an updated server holds.
            receivers: servers that get the parts as they are gathered.
        """
        self.wire_seconds, self.pause_seconds = Counter(), {}
        self.pool.run(self._start(update, label, list(receivers)))

    @property
    def complete(self) -> bool:
        """All parts are there to be sent again."""
        return bool(self._sent) and self._sent[-1].last

    def put(self, part: Part | None) -> None:
        """Hand out the next part; waits until the slowest server has taken the one before."""
        self.pool.run(self._put(part))

    def finish(self) -> Metrics:
        """Wait until every server has the weights or is left out.

        Raises:
            ServerError: no server has them.
        """
        self.pool.run(self._join())
        sent = max(self.sent_bytes.values(), default=0)
        return {
            "rollout/publish_bytes": sent,
            "bridge/sent_fraction": sent / max(self.full_bytes, 1),
            "bridge/full_pushes": len(self._full),
            "bridge/wire_seconds": max(self.wire_seconds.values(), default=0.0),
            "bridge/pause_seconds": max(self.pause_seconds.values(), default=0.0),
            "servers/usable": len(self.pool.usable),
        }

    def abandon(self) -> None:
        """End a push whose remaining parts will not come: the servers continue, left out."""
        with contextlib.suppress(ServerError):
            self.put(None)  # not cancelled: a request that is cut off may be carried out after the next one
            self.finish()

    async def _start(self, update: Any, label: str, receivers: list[ServerLike]) -> None:
        self._inboxes = {id(server): asyncio.Queue(1) for server in receivers}
        servers = list(dict.fromkeys([*receivers, *self.pool.servers]))
        self._task = asyncio.create_task(self.pool.update_all(update, label, servers))

    async def _put(self, part: Part | None) -> None:
        if part:
            self.full_bytes += part.num_bytes
        if self.transport.can_resend and part:
            self._sent.append(part)
        await asyncio.gather(*(inbox.put(part) for inbox in self._inboxes.values()))

    async def _join(self) -> None:
        await self._task

    def expects(self, server: ServerLike) -> bool:
        """Return whether parts are being put that this server has not taken."""
        return id(server) in self._inboxes

    async def update(self, server: ServerLike) -> None:
        """Push to one server, now or, where parts last, when it comes back later."""
        if id(server) not in self._inboxes:
            if not self.complete:
                raise ServerError(f"{server.url} waits for the next push")
            self._inboxes[id(server)] = asyncio.Queue()
            for part in self._sent:
                self._inboxes[id(server)].put_nowait(part)
        try:
            await self._push_to(server, self._inboxes[id(server)])
        finally:
            inbox = self._inboxes.pop(id(server))
            if inbox.full():  # `_put` must not wait for a server that has failed
                inbox.get_nowait()

    async def _push_to(self, server: ServerLike, inbox: asyncio.Queue[Part | None]) -> None:
        receiver = await make_receiver(self.pool, server, self.publisher.problem)
        await self.transport.connect(receiver)
        part = await self._next(inbox)
        if part.base and part.base == server.label:  # and its process is the same
            receiver.takes_delta = part.base == await self.pool.kind.held_label(receiver)
        async with server.update_lock:  # later responses count only after the probe
            start = time.perf_counter()
            await receiver.resume_memory(WEIGHTS)
            async with paused_generation(receiver, self.publisher.pause):
                async with update_session(receiver, self.label, self.transport.session):
                    await self._send(receiver, part)
                    while not part.last:
                        part = await self._next(inbox)
                        await self._send(receiver, part)
                if self.publisher.pause == "in_place" or self.pool.kind.drops_cache_alone:
                    await self.pool.kind.drop_cache(receiver)
            self.pause_seconds[server.url] = time.perf_counter() - start
            await receiver.resume_memory(CACHE)
            await self.check(receiver)

    async def _next(self, inbox: asyncio.Queue[Part | None]) -> Part:
        part = await inbox.get()
        if part is None:
            raise ServerError("the trainer broke off a push")
        return part

    async def _send(self, receiver: Receiver, part: Part) -> None:
        start = time.perf_counter()
        # Cached keys and values are of the old weights. Dropping them in place would end the server: an
        # assertion of SGLang's fails where responses in flight still read them.
        options: Json = {"flush_cache": part.last and self.publisher.pause != "in_place"}
        if part.last:
            options["weight_version"] = self.label
        await self.transport.send(receiver, part, options)
        url, num_bytes = receiver.server.url, part.delta_bytes if receiver.takes_delta else part.num_bytes
        self.sent_bytes[url] += num_bytes
        if not receiver.takes_delta:
            self._full.add(url)
        self.wire_seconds[url] += time.perf_counter() - start


async def make_receiver(pool: PoolLike, server: ServerLike, problem: Problem) -> Receiver:
    """Return a server as the receiver of a push. A server that does not reply in time gets no weights.

    Args:
        problem: of its reply to /server_info.

    Raises:
        ServerError: it does not reply, or has a problem.
    """
    timeout = RETRY_TIMEOUT if server.unreachable else SHORT_TIMEOUT
    info = await pool.kind.info(pool, server, min(timeout, pool.timeout))
    ranks = info.get("tp_size", 1)
    with parsing_reply(server.url):
        if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"/server_info: tp_size {str(ranks)[:20]!r}")
        text = pool.kind.problem(info) or problem(info)
    if text:
        raise ServerError(f"{server.url} {text}")
    return Receiver(pool, server, ranks, info)


@contextlib.asynccontextmanager
async def paused_generation(receiver: Receiver, mode: PauseMode) -> AsyncIterator[None]:
    """Pause a server's generation inside the context; it continues afterwards, also after an error."""
    kind = receiver.pool.kind
    receiver.pool.interruptions += 1
    try:
        await kind.pause(receiver, mode)
        yield
    except BaseException:
        with contextlib.suppress(ServerError):
            await kind.resume(receiver, SHORT_TIMEOUT)
        raise
    await kind.resume(receiver)


@contextlib.asynccontextmanager
async def update_session(receiver: Receiver, label: str, session: bool) -> AsyncIterator[None]:
    """Open the weight-update session of servers that have one.

    Args:
        label: of the weights.
        session: of the transport.
    """
    kind = receiver.pool.kind
    if not await kind.begin(receiver, session):
        yield
        return
    try:
        yield
    except BaseException:
        with contextlib.suppress(ServerError):
            await kind.end(receiver, "", SHORT_TIMEOUT)
        raise
    await kind.end(receiver, label)
