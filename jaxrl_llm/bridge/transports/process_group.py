"""Weights over a torch process group, gloo over TCP.

Every server has a separate group and relay (relay.py), so that one that hangs or dies affects no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.push import RETRY_TIMEOUT, Part
from jaxrl_llm.bridge.servers import Json, Receiver, ServerKind, parsing_reply
from jaxrl_llm.bridge.transports.delta import DeltaTransport
from jaxrl_llm.child import Child
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.structs import Params

RELAY = Path(__file__).with_name("relay.py")
HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
TAIL = 500  # characters of its errors that are shown


class Relay:
    """A child process that is rank 0 of one server's group. Its methods block; `kill` ends them."""

    def __init__(self, python: str, address: str, ranks: int, timeout: float):
        self.address, self.name = address, f"jaxrl_llm_{uuid.uuid4().hex[:12]}"
        settings = {"address": address, "world_size": ranks + 1, "group": self.name}
        # Ctrl-C does not reach it: the run may push again until it stops.
        self._process = Child([python, "-I", str(RELAY), json.dumps(settings | {"timeout": timeout})])

    def read_line(self) -> str:
        """Return the next line of its output.

        Raises:
            ServerError: it has ended instead.
        """
        if line := self._process.stdout.readline().decode().strip():
            return line
        self._process.wait()
        raise ServerError(f"the relay of a process group has ended: {self._process.last_errors(TAIL)}")

    def send(self, parts: list[Any]) -> None:
        """Broadcast the bytes of all parts at once; returns when the server has them."""
        with contextlib.suppress(BrokenPipeError):  # `read_line` raises the reason
            self._process.stdin.write(sum(map(len, parts)).to_bytes(8, "little"))
            for part in parts:
                self._process.stdin.write(part)
            self._process.stdin.flush()
        self.read_line()

    def kill(self) -> None:
        self._process.close()


class GroupTransport:
    """Sends each bucket as one flat broadcast.

    Args:
        python: interpreter with torch, for the relays.
        timeout: seconds that joining a group may take, or one broadcast.
        delta: packs parts in place of the kind: pieces of updates.

    Raises:
        UserError: the interpreter has no torch.
    """

    session = True

    def __init__(
        self,
        source: WeightSource,
        kind: ServerKind,
        *,
        python: str,
        timeout: float,
        delta: DeltaTransport | None = None,
    ):
        self.source, self.kind, self.delta = source, kind, delta
        self.python, self.timeout, self.can_resend = python, timeout, delta is not None
        self._relays: dict[str, Relay] = {}
        self._receivers: dict[str, Receiver] = {}
        if not shutil.which(python) or subprocess.run([python, "-I", "-c", HAS_TORCH]).returncode:
            raise UserError(
                f"--servers.python {python}: it has no torch, which --servers.transport group needs. "
                "Install torch there, name another interpreter, or use --servers.transport disk or http."
            )

    def parts(self, params: Params, label: str) -> Iterator[Part]:
        if self.delta:
            yield from self.delta.parts(params, label)
            return
        for part in self.source.parts(params):
            yield part._replace(content=part.content and self.kind.announce(part.content))

    async def connect(self, receiver: Receiver) -> None:
        """Join the server in a process group, unless one works already."""
        url = receiver.server.url
        if relay := self._relays.get(url):
            if receiver.server.label == await self.kind.held_label(receiver):
                return
            self._relays.pop(url)  # the server may be another process now
            await asyncio.to_thread(relay.kill)
        relay = await asyncio.to_thread(
            Relay, self.python, address_towards(url), receiver.ranks, self.timeout
        )
        self._relays[url], self._receivers[url] = relay, receiver
        silent = (
            f"did not join the process group at {relay.address}. The server's host must be able to connect "
            "to any port of that address, and this machine to any port of the server's; transports disk and "
            "http need no such connections"
        )
        # This limit ends first: relay and server begin to count theirs later.
        async with self._or_leave_group(receiver, silent), asyncio.timeout(self.timeout):
            port = await asyncio.to_thread(relay.read_line)
            with parsing_reply("the relay"):
                group = {"master_address": relay.address, "master_port": int(port)}
            group |= {"rank_offset": 1, "world_size": receiver.ranks + 1, "group_name": relay.name}
            async with asyncio.TaskGroup() as both:
                both.create_task(self.kind.join_group(receiver, group))
                both.create_task(asyncio.to_thread(relay.read_line))

    async def send(self, receiver: Receiver, part: Part, options: Json) -> None:
        relay = self._relays[receiver.server.url]
        fields, content = await self.delta.payload(receiver, part) if self.delta else part.content
        async with self._or_leave_group(receiver), asyncio.timeout(self.timeout), asyncio.TaskGroup() as both:
            both.create_task(
                self.kind.receive_broadcast(
                    receiver, fields, last=part.last, options=options, name=relay.name
                )
            )
            both.create_task(asyncio.to_thread(relay.send, content))

    def close(self) -> None:
        """Have the servers, which may outlive this run, leave their groups; the pool must still be open."""
        for url, relay in self._relays.items():
            receiver = self._receivers[url]
            with contextlib.suppress(ServerError):
                receiver.pool.run(self.kind.leave_group(receiver, relay.name, RETRY_TIMEOUT))
            relay.kill()
        self._relays.clear()

    @contextlib.asynccontextmanager
    async def _or_leave_group(self, receiver: Receiver, silent: str = "was silent in its process group"):
        """Drop a group in which something has failed: the next push makes another.

        Args:
            silent: what a server did that gives no sign in time, for the error.
        """
        try:
            yield
        except BaseException as error:
            relay = self._relays.pop(receiver.server.url)
            await asyncio.to_thread(relay.kill)
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, TimeoutError):
                limit = f"{self.timeout:g} s (--servers.timeout)"
                error = ServerError(f"{receiver.server.url}: in {limit} it {silent}")
            raise error from None


def address_towards(url: str) -> str:
    """Return this machine's address as the server sees it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: a routing lookup
        try:
            probe.connect((parts.hostname, parts.port or 80))
        except OSError as error:
            raise ServerError(f"{url}: {error}") from None
        return probe.getsockname()[0]
