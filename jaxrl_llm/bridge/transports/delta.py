"""Weights in requests: the bits that have changed since the version that a server holds, or all of them."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_llm.bridge.buckets import Bucket, WeightSource
from jaxrl_llm.bridge.delta import Entry, Piece, as_bits, encode, sha256_of, write_piece
from jaxrl_llm.bridge.push import Part, WeightTransport
from jaxrl_llm.bridge.servers import Json, Receiver, ServerKind
from jaxrl_llm.errors import ServerError
from jaxrl_llm.hf.export import DTYPES
from jaxrl_llm.hf.names import HFTensor
from jaxrl_llm.structs import Params

CACHED = 2  # whole buckets that are packed: servers take the same one at about the same time


Change = tuple[Entry, bytes | np.ndarray]
"""A tensor, and its content in an update from the version before."""


@dataclass(frozen=True)
class DeltaBucket:
    """A bucket of a push.

    Attributes:
        push: number of the push. piece: its place among the changes. entries: of its tensors, whole.
        changes: payload for servers that hold the base; None = there is no base.
    """

    push: int
    piece: Piece
    entries: list[Entry]
    changes: Any


class DeltaTransport(WeightTransport):
    """Sends changed bits to servers that hold the version of the push before, and whole tensors to others.

    The host keeps a copy of the tensors as they were sent last. A push that breaks off has no successor: the
    next one is whole for every server, as the first of a run is.

    Args:
        pack: piece of an update -> payload; None = for a request.
    """

    session = True
    can_resend = True

    def __init__(self, source: WeightSource, kind: ServerKind, pack: Callable[[bytes], Any] | None = None):
        self.source, self.kind, self.pack = source, kind, pack or kind.pack_update
        self._held: dict[str, np.ndarray] = {}  # name -> bits; in process 0
        self._label, self._push = "", 0
        self._packed: dict[tuple[int, int], Any] = {}
        self._lock = threading.Lock()  # servers that come back read `_held` while the next push changes it

    def parts(self, params: Params, label: str) -> Iterator[Part]:
        with self._lock:
            self._push += 1
            self._packed.clear()
        base, self._label = self._label, ""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for index, part in enumerate(self.source.parts(params)):
                if part.content is None:  # not process 0
                    yield part
                    continue
                bucket: Bucket = part.content
                of_type = functools.partial(self._change, dtype=DTYPES[bucket.dtype])
                with self._lock:
                    changes = list(threads.map(of_type, bucket.tensors, map(as_bits, bucket.arrays)))
                yield self._packed_part(part, changes, Piece(base, label, index, part.last))
        self._label = label

    def _change(self, tensor: HFTensor, bits: np.ndarray, dtype: str) -> Change:
        """Return the changes of a tensor, and keep its new bits."""
        old = self._held.get(tensor.name)
        content: bytes | np.ndarray = bits if old is None else encode(old, bits)
        whole = old is None or len(content) >= bits.nbytes
        content = bits if whole else content
        self._held[tensor.name] = bits
        size = bits.nbytes if whole else len(content)
        digest = sha256_of(bits)
        return Entry(tensor.name, dtype, tensor.shape, whole, size=size, sha256=digest), content

    def _packed_part(self, part: Part, changes: list[Change], piece: Piece) -> Part:
        """Return the part of a push, with the payload of its changes."""
        entries, contents = map(list, zip(*changes, strict=True))
        payload = self.pack(write_piece(piece, entries, contents)) if piece.base else None
        arrays = [self._held[entry.name] for entry in entries]
        whole = [
            replace(entry, is_whole=True, size=bits.nbytes)
            for entry, bits in zip(entries, arrays, strict=True)
        ]
        delta_bytes = sum(entry.size for entry in entries)
        content = DeltaBucket(self._push, piece, whole, payload)
        return part._replace(content=content, base=piece.base, delta_bytes=delta_bytes)

    async def send(self, receiver: Receiver, part: Part, options: Json) -> None:
        payload = await self.payload(receiver, part)
        options = self.kind.update_options | options
        await self.kind.send_bucket(receiver, payload, last=part.last, options=options)

    async def payload(self, receiver: Receiver, part: Part) -> Any:
        """Return the payload of a part for a server."""
        bucket = part.content
        return bucket.changes if receiver.takes_delta else await asyncio.to_thread(self._whole, bucket)

    def _whole(self, bucket: DeltaBucket) -> Any:
        """Return the payload of a bucket's whole tensors.

        Raises:
            ServerError: the next push has started.
        """
        key = bucket.push, bucket.piece.index
        with self._lock:
            if bucket.push != self._push:
                raise ServerError("a server that came back waits for the next push, which has started")
            if key not in self._packed:
                while len(self._packed) >= CACHED:
                    self._packed.pop(next(iter(self._packed)))
                arrays = [self._held[entry.name] for entry in bucket.entries]
                piece = write_piece(replace(bucket.piece, base=""), bucket.entries, arrays)
                self._packed[key] = self.pack(piece)
            return self._packed[key]
