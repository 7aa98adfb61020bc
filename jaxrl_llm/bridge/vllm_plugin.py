"""Take weights in a vLLM server, from files or requests, and check them before any is touched.

A plugin of vLLM: the launcher copies this file and `delta.py` to a folder on the server's path
(`rollout/servers/commands.py`). It imports nothing else of this project. An exception in the middle of
vLLM's own reload ends the whole engine, and a part of a fused layer leaves a mixture of old and new weights;
so `update_weights` collects the tensors of a push, compares them with their announcement and with the model's
own files, and loads all of them at its end.
"""

import base64
import hashlib
import os
from dataclasses import dataclass, field

import torch
from jaxrl_delta import Shadow
from safetensors import safe_open
from safetensors.torch import load
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "jaxrl"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
HEAD = "lm_head.weight"  # also sent for tied embeddings: vLLM refreshes it from no other tensor


def register() -> None:
    """Make the engine known to vLLM, which calls this in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, CheckedEngine)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: no connection is made."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Some tensors of a push, from a folder or in the request.

    Attributes:
        folder: with safetensors files; "" = the tensors are in `tensors`.
        tensors: a safetensors file, base64.
        hashes: tensor's name -> SHA-256 of its bytes, for `tensors`.
        update: a piece of an update in place of all of these, base64 (`delta.py`).
        last: these tensors complete the push.
    """

    folder: str = ""
    tensors: str = ""
    hashes: dict[str, str] = field(default_factory=dict)
    update: str = ""
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

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

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
            if self._shadow.receive(base64.b64decode(update_info.update, validate=True)):
                self._load(shadow_tensors(self._shadow))
            return
        tensors = read_folder(update_info.folder) if update_info.folder else read_request(update_info)
        if repeated := sorted(self._collected.keys() & tensors.keys()):
            raise ValueError(f"tensors that were sent before: {repeated[:5]}")
        self._collected |= tensors
        if not update_info.last:
            return
        tensors, self._collected = self._collected, {}
        self._load(tensors)

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


def read_request(info: UpdateInfo) -> dict[str, torch.Tensor]:
    """Return the tensors in a request.

    Raises:
        ValueError: other tensors, or other bytes, than were announced.
    """
    tensors = load(base64.b64decode(info.tensors, validate=True))
    if tensors.keys() != info.hashes.keys():
        raise ValueError(f"other tensors than announced: {sorted(tensors.keys() ^ info.hashes.keys())[:5]}")
    for name, tensor in tensors.items():
        if hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest() != info.hashes[name]:
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
