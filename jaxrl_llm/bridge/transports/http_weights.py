"""Weights in requests: each bucket in the body of one; for SGLang as a pickle."""

from __future__ import annotations

import json
import pickle
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

from jaxrl_llm.bridge.buckets import Bucket, WeightSource
from jaxrl_llm.bridge.push import Part, WeightTransport
from jaxrl_llm.bridge.servers import Json, Receiver, ServerKind
from jaxrl_llm.structs import Params

STORAGE = {
    "float32": "FloatStorage",
    "bfloat16": "BFloat16Storage",
    "float8_e4m3fn": "ByteStorage",
    "uint8": "ByteStorage",
}
REBUILD = {"float8_e4m3fn": ("_rebuild_tensor_v3", b"ctorch\nfloat8_e4m3fn\n")}
"""Types without a storage -> the function that rebuilds tensors of one, and the pickle of the type."""
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001  # of torch.save's files
SIZES = {"short": 2, "int": 4, "long": 4}
MEMO = 1000  # memo index of the storage, above the indices of `_value`, which count from 0


def pickle_bucket(bucket: Bucket, as_dict: bool = False) -> bytes:
    """Return the pickle of [(name, tensor), ...], or of {name: tensor, ...}, of a bucket on the host."""
    parts = [
        *(pickle.PROTO, b"\x04"),
        *_call("torch.storage._load_from_bytes", _blob(_saved(bucket))),
        *(pickle.LONG_BINPUT, struct.pack("<I", MEMO), pickle.POP),
        *(pickle.EMPTY_DICT if as_dict else pickle.EMPTY_LIST, pickle.MARK),
    ]
    rebuild, dtype = REBUILD.get(bucket.dtype, ("_rebuild_tensor_v2", b""))
    start = 0
    for tensor, array in zip(bucket.tensors, bucket.arrays, strict=True):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        place = _value(start) + _value(tuple(array.shape)) + _value(strides) + pickle.NEWFALSE
        storage = pickle.LONG_BINGET + struct.pack("<I", MEMO)
        hooks = b"".join(_call("collections.OrderedDict", []))
        rebuilt = _call(f"torch._utils.{rebuild}", [storage, place, hooks, dtype])
        parts += [_value(tensor.name), *rebuilt, b"" if as_dict else pickle.TUPLE2]
        start += array.size
    return b"".join([*parts, pickle.SETITEMS if as_dict else pickle.APPENDS, pickle.STOP])


def _saved(bucket: Bucket) -> list[bytes | memoryview]:
    """Return the bytes that `torch.save(storage, _use_new_zipfile_serialization=False)` writes."""
    assert sys.byteorder == "little"
    count = sum(array.size for array in bucket.arrays)
    storage = _global(f"torch.{STORAGE[bucket.dtype]}")
    system = {"protocol_version": VERSION, "little_endian": True, "type_sizes": SIZES}
    named = [_value("storage"), storage, *map(_value, ("0", "cpu", count, None))]
    return [
        *(pickle.dumps(value, 2) for value in (MAGIC, VERSION, system)),
        *(pickle.PROTO, b"\x02", pickle.MARK, *named, pickle.TUPLE, pickle.BINPERSID, pickle.STOP),
        pickle.dumps(["0"], 2),
        struct.pack("<q", count),
        *bucket.bytes(),
    ]


def _call(name: str, arguments: list[bytes | memoryview]) -> list[bytes | memoryview]:
    return [_global(name), pickle.MARK, *arguments, pickle.TUPLE, pickle.REDUCE]


def _blob(parts: list[bytes | memoryview]) -> list[bytes | memoryview]:
    size = sum(map(len, parts))
    return [pickle.BINBYTES8, struct.pack("<Q", size), *parts]


def _global(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def _value(value: Any) -> bytes:
    """Return the opcodes that push a plain value on the unpickler's stack."""
    return pickle.dumps(value, 2)[2:-1]


WRITE_BYTES = 2**20  # given to the socket at once


class HttpTransport(WeightTransport):
    """Sends one payload to all servers; to SGLang once for each rank of tensor parallelism."""

    session = True
    can_resend = False

    def __init__(self, source: WeightSource, kind: ServerKind):
        self.source, self.kind = source, kind

    def parts(self, params: Params, label: str) -> Iterator[Part]:
        for part in self.source.parts(params):
            yield part._replace(content=part.content and self.kind.pack(part.content))

    async def send(self, receiver: Receiver, part: Part, options: Json) -> None:
        await self.kind.send_bucket(receiver, part.content, last=part.last, options=options)


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
