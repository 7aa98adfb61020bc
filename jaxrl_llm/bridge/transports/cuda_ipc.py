"""Weights as handles of GPU memory, for servers on the trainer's own GPUs. Written for CUDA and not yet run.

On each GPU JAX gathers the tensors of a bucket, torch imports them (DLPack) and copies them into torch's
memory, since XLA's allocations may not be exportable, and the server's rank on the GPU opens the handle.
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
from jaxrl_llm.bridge.push import Part, WeightTransport
from jaxrl_llm.bridge.servers import Json, Receiver
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.structs import Params

DEVICE = 6  # among the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor
VISIBLE = "CUDA_VISIBLE_DEVICES"


class IpcTransport(WeightTransport):
    """Sends a few kilobytes of handles in a request; the weights stay on the GPUs.

    Args:
        devices: CUDA_VISIBLE_DEVICES that each server of the pool was started with; () = the run's own.

    Raises:
        UserError: no CUDA devices in jax or torch, or several processes.
    """

    session = True
    can_resend = False

    def __init__(self, source: WeightSource, devices: Sequence[str] = ()):
        self.source, self.devices = source, devices
        need = "--servers.transport ipc: trainer and servers share GPUs of one machine, in one process"
        try:
            import torch
        except ImportError:
            raise UserError(f"{need}, and torch here to hand them over: install torch with CUDA") from None
        if not torch.cuda.is_available():
            raise UserError(f"{need}, and torch here to hand them over: this torch has no CUDA")

    def parts(self, params: Params, label: str) -> Iterator[Part]:
        for part in self.source.parts(params, on_device=True):
            devices = jax.local_devices()
            memory = {device.local_hardware_id: copy_to_torch(part.content, device) for device in devices}
            yield part._replace(content=memory)

    async def send(self, receiver: Receiver, part: Part, options: Json) -> None:
        """Send the handles; the part keeps the memory until the server has replied."""
        server_devices = self.devices[receiver.pool.servers.index(receiver.server)] if self.devices else ""
        gpus = shared_gpus(server_devices, os.environ.get(VISIBLE, ""), receiver.ranks)
        if not set(gpus) <= part.content.keys():
            raise ServerError(f"{receiver.server.url}: on GPUs {server_devices!r} where the trainer is not")
        payloads = [pickle_handles(part.content[gpu]) for gpu in gpus]
        body = {"serialized_named_tensors": payloads, **options}
        await receiver.update("/update_weights_from_tensor", body)


def copy_to_torch(bucket: Bucket, device: jax.Device) -> list[tuple[str, Any]]:
    """Return (name, torch tensor) of the copies on this device, in memory that torch has allocated."""
    import torch

    made = []
    for tensor, array in zip(bucket.tensors, bucket.arrays, strict=True):
        (shard,) = (shard.data for shard in array.addressable_shards if shard.device == device)
        made.append((tensor.name, torch.from_dlpack(shard).clone()))
    torch.cuda.synchronize()
    return made


def pickle_handles(named: list[tuple[str, Any]]) -> str:
    """Return the pickle that SGLang's own serializer makes: it names a GPU by its UUID, not by a number."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any):
        import torch

        return reduce_tensor_by_uuid(value) if isinstance(value, torch.Tensor) else NotImplemented


def reduce_tensor_by_uuid(tensor: Any) -> tuple[Any, tuple]:
    """Return torch's reduction of a CUDA tensor for another process, with the UUID in place of the number."""
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(tensor)
    return rebuild, (*arguments[:DEVICE], uuid_of(arguments[DEVICE]), *arguments[DEVICE + 1 :])


@functools.cache
def uuid_of(device: int) -> str:
    """Return the UUID of the GPU of this number."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def shared_gpus(server_devices: str, trainer_devices: str, ranks: int) -> Sequence[int]:
    """Return the trainer's number of the GPU of each of a server's ranks; -1 = the trainer does not see it.

    Args:
        server_devices, trainer_devices: CUDA_VISIBLE_DEVICES of server and run; "" = all.
    """
    split = lambda devices: [name.strip() for name in devices.split(",")] if devices else None
    visible, names = split(trainer_devices), split(server_devices or trainer_devices)
    chosen = names[:ranks] if names else [str(rank) for rank in range(ranks)]
    number = lambda name: int(name) if visible is None else visible.index(name) if name in visible else -1
    numbers = [number(name) for name in chosen]
    return numbers + [-1] * (ranks - len(numbers))
