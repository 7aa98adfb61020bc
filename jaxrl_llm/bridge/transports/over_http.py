"""Weights in requests: each bucket a pickle in the body of /update_weights_from_tensor."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator

from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.bridge.transports.torch_pickle import pickled
from jaxrl_llm.bridge.update import Link, Parcel
from jaxrl_llm.structs import Params

PIECE = 2**20  # bytes given to the socket at once


class HttpTransport:
    """One payload for all servers; it crosses the network once for each, and once more for each further rank
    of tensor parallelism, since SGLang wants the same bytes for every one of them."""

    session = True
    lasting = False

    def __init__(self, source: WeightSource):
        self.source = source

    def parcels(self, params: Params, label: str) -> Iterator[Parcel]:
        for parcel in self.source.parcels(params):
            content = parcel.content and base64.b64encode(pickled(parcel.content))
            yield parcel._replace(content=content)

    async def connect(self, link: Link) -> None:
        pass

    async def send(self, link: Link, parcel: Parcel, end: Json) -> None:
        await link.update("/update_weights_from_tensor", body(parcel.content, link.ranks, end))


async def body(payload: bytes, ranks: int, end: Json) -> AsyncIterator[bytes | memoryview]:
    """{"serialized_named_tensors": [payload, ...], **end}, piece by piece: nobody need hold it whole."""
    view = memoryview(payload)
    yield b'{"serialized_named_tensors": ['
    for rank in range(ranks):
        yield b', "' if rank else b'"'
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]
        yield b'"'
    yield b"], " + json.dumps(end).encode()[1:]
