"""Weights over a torch process group: gloo over TCP, or NCCL between GPUs.

Every server has a group and a relay of its own (relay.py), so that one that hangs or dies takes nobody along.
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
from urllib.parse import urlsplit

from jaxrl_llm.bridge.buckets import Bucket, WeightSource
from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.bridge.update import AGAIN, Link, Parcel
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.structs import Params

RELAY = Path(__file__).with_name("relay.py")
HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
TAIL = 500  # characters of its errors that are shown


class Relay:
    """A process that is rank 0 of one server's group. Its methods block; `kill` ends them from outside."""

    def __init__(self, python: str, backend: str, address: str, ranks: int, timeout: float):
        self.address, self.name = address, f"jaxrl_llm_{uuid.uuid4().hex[:12]}"
        wanted = {"backend": backend, "address": address, "world_size": ranks + 1, "group": self.name}
        self._process = subprocess.Popen(
            [python, "-I", str(RELAY), json.dumps(wanted | {"timeout": timeout})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def heard(self) -> str:
        """The next word it says.

        Raises:
            ServerError: it has ended instead.
        """
        if word := self._process.stdout.readline().decode().strip():
            return word
        _, problem = self._process.communicate()
        raise ServerError(f"the relay of a process group has ended: {problem.decode()[-TAIL:].strip()}")

    def send(self, bucket: Bucket) -> None:
        """Broadcast it; returns when the server has it all."""
        parts = bucket.bytes()
        with contextlib.suppress(BrokenPipeError):  # `heard` says why
            self._process.stdin.write(sum(map(len, parts)).to_bytes(8, "little"))
            for part in parts:
                self._process.stdin.write(part)
            self._process.stdin.flush()
        self.heard()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError, ValueError):
                pipe.close()


class GroupTransport:
    """Buckets as one flat broadcast each.

    Args:
        python: interpreter with torch, for the relays.
        backend: "gloo" or "nccl".
        timeout: seconds that joining a group may take, or one broadcast.

    Raises:
        ValueError: the interpreter has no torch.
    """

    session = True
    lasting = False

    def __init__(self, source: WeightSource, python: str, backend: str, timeout: float):
        self.source, self.python, self.backend, self.timeout = source, python, backend, timeout
        self._relays: dict[str, Relay] = {}
        self._links: dict[str, Link] = {}
        if not shutil.which(python) or subprocess.run([python, "-I", "-c", HAS_TORCH]).returncode:
            raise UserError(
                f"--sglang.relay_python {python}: it has no torch, which --sglang.transport group needs. "
                "Install torch there, name another interpreter, or use --sglang.transport disk or http."
            )

    def parcels(self, params: Params, label: str) -> Iterator[Parcel]:
        return self.source.parcels(params)

    async def connect(self, link: Link) -> None:
        """Meet the server in a group, if there is none that holds."""
        if link.server.url in self._relays:
            return
        relay = await asyncio.to_thread(
            Relay, self.python, self.backend, address_towards(link.server.url), link.ranks, self.timeout
        )
        self._relays[link.server.url], self._links[link.server.url] = relay, link
        async with self._or_apart(link):
            body = {"master_address": relay.address, "master_port": int(await self._heard(relay))}
            body |= {"rank_offset": 1, "world_size": link.ranks + 1}
            body |= {"group_name": relay.name, "backend": self.backend}
            async with asyncio.TaskGroup() as both:
                both.create_task(link.update("/init_weights_update_group", body))
                both.create_task(self._heard(relay))

    async def send(self, link: Link, parcel: Parcel, end: Json) -> None:
        bucket, relay = parcel.content, self._relays[link.server.url]
        body = {
            "names": [tensor.name for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "dtypes": [bucket.dtype] * len(bucket.tensors),
            "group_name": relay.name,
            "load_format": "flattened_bucket",
            **end,
        }
        async with self._or_apart(link), asyncio.timeout(self.timeout), asyncio.TaskGroup() as both:
            both.create_task(link.update("/update_weights_from_distributed", body))
            both.create_task(asyncio.to_thread(relay.send, bucket))

    def close(self) -> None:
        """The servers, which may go on without this run, leave their groups; the pool must still be open."""
        for url, relay in self._relays.items():
            link = self._links[url]
            with contextlib.suppress(ServerError):
                body = {"group_name": relay.name}
                link.pool.run(link.ask("/destroy_weights_update_group", body, AGAIN))
            relay.kill()
        self._relays.clear()

    async def _heard(self, relay: Relay) -> str:
        async with asyncio.timeout(self.timeout):
            return await asyncio.to_thread(relay.heard)

    @contextlib.asynccontextmanager
    async def _or_apart(self, link: Link):
        """A group in which something has failed is of no more use: the next push makes another."""
        try:
            yield
        except BaseException as error:
            relay = self._relays.pop(link.server.url)
            await asyncio.to_thread(relay.kill)
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, TimeoutError):
                error = ServerError(
                    f"{link.server.url}: its process group said nothing in {self.timeout:g} s"
                )
            raise error from None


def address_towards(url: str) -> str:
    """This machine's address as the server sees it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: asks the routing table
        try:
            probe.connect((parts.hostname, parts.port or 80))
        except OSError as error:
            raise ServerError(f"{url}: {error}") from None
        return probe.getsockname()[0]
