"""Take weights in a vLLM server, from files, requests or broadcasts, and check them before any is touched.

A plugin of vLLM: the launcher copies this file, `delta.py` and `transports/relay.py` to a folder on the
server's path (`rollout/servers/commands.py`). It imports nothing else of this project. An exception in the
middle of vLLM's own reload ends the whole engine, and a part of a fused layer leaves a mixture of old and new
weights; so `update_weights` collects the tensors of a push, compares them with their announcement and with
the model's own files, and loads all of them at its end.
"""

import base64
import hashlib
import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from jaxrl_delta import Shadow
from jaxrl_relay import join_group
from safetensors import safe_open
from safetensors.torch import load
from torch.distributed import TCPStore, broadcast, destroy_process_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "jaxrl"
IN_GROUP = "group"  # in place of base64: a broadcast has the content
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
HEAD = "lm_head.weight"  # also sent for tied embeddings: vLLM refreshes it from no other tensor


def register() -> None:
    """Make the engine known to vLLM, which calls this in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, CheckedEngine)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A process group in which the trainer's relay is rank 0.

    Attributes:
        master_address, master_port: of its store.
        rank_offset: rank of the server's first process.
        timeout: seconds that joining or a broadcast may take.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    timeout: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Some tensors of a push, from a folder, in the request or in a broadcast.

    Attributes:
        folder: with safetensors files; "" = the tensors are in `tensors`.
        tensors: a safetensors file, base64 or IN_GROUP.
        hashes: tensor's name -> SHA-256 of its bytes, for `tensors`.
        update: a piece of an update in place of all of these, base64 or IN_GROUP (`delta.py`).
        size: bytes of the broadcast.
        last: these tensors complete the push.
    """

    folder: str = ""
    tensors: str = ""
    hashes: dict[str, str] = field(default_factory=dict)
    update: str = ""
    size: int = 0
    last: bool = True


class CheckedEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a push as a whole, or refuses it and keeps the old weights."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._collected: dict[str, torch.Tensor] = {}
        self._shadow = Shadow()
        self._group = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a process group, after leaving one that a killed trainer left open."""
        self._leave_group()
        if self.parallel_config.data_parallel_size > 1:
            raise ValueError("a process group has no ranks for replicas: leave --data-parallel-size at 1")
        timeout, size = timedelta(seconds=init_info.timeout), init_info.world_size
        store = TCPStore(init_info.master_address, init_info.master_port, size, False, timeout)
        rank = init_info.rank_offset + self.parallel_config.rank
        self._group = join_group(store, size, init_info.group_name, timeout, rank=rank)

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            destroy_process_group(group)

    def start_weight_update(self) -> None:
        self._collected = {}

    def update_weights(self, update_info: dict) -> None:
        """Take tensors; load all of them with the last. Overridden: the base ends with a CUDA-only call.

        Raises:
            ValueError: they are not what was announced, or not of this model. The old weights stay.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.update:
            if self._shadow.receive(self._content(update_info.update, update_info.size)):
                self._load(shadow_tensors(self._shadow))
            return
        if update_info.folder:
            tensors = read_folder(update_info.folder)
        else:
            content = self._content(update_info.tensors, update_info.size)
            tensors = read_tensors(content, update_info.hashes)
        if repeated := sorted(self._collected.keys() & tensors.keys()):
            raise ValueError(f"tensors that were sent before: {repeated[:5]}")
        self._collected |= tensors
        if not update_info.last:
            return
        tensors, self._collected = self._collected, {}
        self._load(tensors)

    def _content(self, text: str, size: int) -> bytes:
        """Return the content of a field: base64, or a broadcast of this size."""
        if text != IN_GROUP:
            return base64.b64decode(text, validate=True)
        if self._group is None:  # broadcast() would take the server's own group
            raise ValueError("this server is in no process group with a trainer")
        data = torch.empty(size, dtype=torch.uint8)
        broadcast(data, src=0, group=self._group)
        return data.numpy().tobytes()

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load all tensors of the model.

        Raises:
            ValueError: they are not of this model. The old weights stay.
        """
        check_shapes(tensors, stored_shapes(self.model_config.model))
        # Nothing below may fail: vLLM does not recover from an error here.
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        self._collected = {}

    def shutdown(self) -> None:
        self._collected = {}
        self._leave_group()


def read_tensors(content: bytes, hashes: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file that was sent.

    Raises:
        ValueError: other tensors, or other bytes, than were announced.
    """
    tensors = load(content)
    if tensors.keys() != hashes.keys():
        raise ValueError(f"other tensors than announced: {sorted(tensors.keys() ^ hashes.keys())[:5]}")
    for name, tensor in tensors.items():
        if hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest() != hashes[name]:
            raise ValueError(f"{name} has changed on its way")
    return tensors


def shadow_tensors(shadow: Shadow) -> dict[str, torch.Tensor]:
    """Return the tensors of a shadow; they share its memory."""
    signed = {name: bits.view(f"i{bits.itemsize}") for name, bits in shadow.tensors.items()}
    return {name: torch.from_numpy(x).view(DTYPES[shadow.dtypes[name]]) for name, x in signed.items()}


def read_folder(folder: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder's safetensors files.

    Raises:
        ValueError: there are none.
    """
    tensors = {}
    for file in _files(folder):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if not tensors:
        raise ValueError(f"{folder} has no safetensors files on this machine")
    return tensors


def stored_shapes(folder: str) -> dict[str, list[int]]:
    """Return the shapes of the model's tensors by its files; empty for a folder without weights."""
    shapes = {}
    for file in _files(folder):
        with safe_open(file, "pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return shapes


def check_shapes(tensors: dict[str, torch.Tensor], shapes: dict[str, list[int]]) -> None:
    """Refuse tensors that are not exactly those of the model's files.

    Args:
        shapes: `stored_shapes`; empty = the model has no files, and nothing is compared.
    """
    if not shapes:
        return
    wrong = (tensors.keys() ^ shapes.keys()) - {HEAD}
    wrong |= {name for name in tensors.keys() & shapes.keys() if list(tensors[name].shape) != shapes[name]}
    if wrong:
        raise ValueError(f"missing, unknown or of another shape: {sorted(wrong)[:5]}")


def _files(folder: str) -> list[str]:
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if name.endswith(".safetensors")]
