"""Weights as handles of GPU memory, for servers on the trainer's own GPUs. Written for CUDA and not yet run.

On each GPU JAX gathers the tensors of a bucket, torch takes them over (DLPack) and copies them into memory of
its own - what XLA allocates need not be exportable - and the server's rank on that GPU opens its handle.
"""

from __future__ import annotations

import base64
import functools
import io
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxrl_llm.bridge.buckets import Bucket, WeightSource
from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.bridge.update import Link, Parcel
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.structs import Params

DEVICE = 6  # among the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor
VISIBLE = "CUDA_VISIBLE_DEVICES"


class IpcTransport:
    """A few kilobytes of handles in a request; the weights stay on the GPUs.

    Args:
        devices: CUDA_VISIBLE_DEVICES that each server of the pool was started with; () = the run's own.

    Raises:
        ValueError: no CUDA devices in jax or torch, several processes.
    """

    session = True
    lasting = False

    def __init__(self, source: WeightSource, devices: Sequence[str] = ()):
        self.source, self.devices = source, devices
        need = "--sglang.transport ipc: trainer and servers share GPUs of one machine, in one process"
        if jax.default_backend() != "gpu" or jax.process_count() > 1:
            raise UserError(
                f"{need}; this run is {jax.process_count()} process(es) on {jax.default_backend()}. "
                "Use --sglang.transport disk, http or group."
            )
        try:
            import torch
        except ImportError:
            raise UserError(f"{need}, and torch here to hand them over: install torch with CUDA") from None
        if not torch.cuda.is_available():
            raise UserError(f"{need}, and torch here to hand them over: this torch has no CUDA")

    def parcels(self, params: Params, label: str) -> Iterator[Parcel]:
        for parcel in self.source.parcels(params, on_device=True):
            devices = jax.local_devices()
            memory = {device.local_hardware_id: handed_over(parcel.content, device) for device in devices}
            yield parcel._replace(content=memory)

    async def connect(self, link: Link) -> None:
        pass

    async def send(self, link: Link, parcel: Parcel, end: Json) -> None:
        """The memory is kept by the parcel until the server has answered."""
        theirs = self.devices[link.pool.servers.index(link.server)] if self.devices else ""
        places = shared_devices(theirs, os.environ.get(VISIBLE, ""), link.ranks)
        if not set(places) <= parcel.content.keys():
            raise ServerError(f"{link.server.url}: on GPUs {theirs!r} where the trainer is not")
        payloads = [handles(parcel.content[place]) for place in places]
        body = {"serialized_named_tensors": payloads, **end}
        await link.update("/update_weights_from_tensor", body)


def handed_over(bucket: Bucket, device: jax.Device) -> list[tuple[str, Any]]:
    """(name, torch tensor) of the copies on this device, in memory that torch has allocated."""
    import torch

    made = []
    for tensor, array in zip(bucket.tensors, bucket.arrays, strict=True):
        (shard,) = (shard.data for shard in array.addressable_shards if shard.device == device)
        made.append((tensor.name, torch.from_dlpack(shard).clone()))
    torch.cuda.synchronize()
    return made


def handles(named: list[tuple[str, Any]]) -> str:
    """The pickle that SGLang's own serializer makes: a GPU by its UUID, not by a number that others count
    differently."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any):
        import torch

        return shared(value) if isinstance(value, torch.Tensor) else NotImplemented


def shared(tensor: Any) -> tuple[Any, tuple]:
    """How torch hands a CUDA tensor to another process, with the UUID in place of the number."""
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(tensor)
    return rebuild, (*arguments[:DEVICE], uuid_of(arguments[DEVICE]), *arguments[DEVICE + 1 :])


@functools.cache
def uuid_of(device: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def shared_devices(theirs: str, ours: str, ranks: int) -> Sequence[int]:
    """The trainer's number of the GPU of each of a server's ranks; -1 = the trainer does not see it.

    Args:
        theirs, ours: CUDA_VISIBLE_DEVICES of server and run; "" = all.
    """
    mine = [name.strip() for name in ours.split(",")] if ours else None
    names = [name.strip() for name in (theirs or ours).split(",")] if theirs or ours else None
    wanted = names[:ranks] if names else [str(rank) for rank in range(ranks)]
    place = lambda name: int(name) if mine is None else mine.index(name) if name in mine else -1
    found = [place(name) for name in wanted]
    return found + [-1] * (ranks - len(found))
