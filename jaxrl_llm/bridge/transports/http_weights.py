"""Weights in requests: each bucket a pickle in the body of /update_weights_from_tensor."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator

from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.push import Part
from jaxrl_llm.bridge.servers import Json, Receiver
from jaxrl_llm.bridge.transports.torch_pickle import pickle_bucket
from jaxrl_llm.structs import Params

WRITE_BYTES = 2**20  # given to the socket at once


class HttpTransport:
    """Sends one payload to all servers, once for each rank of tensor parallelism: SGLang reads it so."""

    session = True
    can_resend = False

    def __init__(self, source: WeightSource):
        self.source = source

    def parts(self, params: Params, label: str) -> Iterator[Part]:
        for part in self.source.parts(params):
            content = part.content and base64.b64encode(pickle_bucket(part.content))
            yield part._replace(content=content)

    async def connect(self, receiver: Receiver) -> None:
        pass

    async def send(self, receiver: Receiver, part: Part, options: Json) -> None:
        await receiver.update(
            "/update_weights_from_tensor", request_pieces(part.content, receiver.ranks, options)
        )


async def request_pieces(payload: bytes, ranks: int, options: Json) -> AsyncIterator[bytes | memoryview]:
    """Yield {"serialized_named_tensors": [payload, ...], **options} in pieces, so that it is never whole."""
    view = memoryview(payload)
    yield b'{"serialized_named_tensors": ['
    for rank in range(ranks):
        yield b', "' if rank else b'"'
        for start in range(0, len(view), WRITE_BYTES):
            yield view[start : start + WRITE_BYTES]
        yield b'"'
    yield b"], " + json.dumps(options).encode()[1:]
