"""Take changes of weights in an SGLang server, and check them before any is loaded.

A loader of SGLang's `--custom-weight-loader`: the launcher copies this file and `delta.py` to a folder on the
server's path (`rollout/servers/commands.py`). It imports nothing else of this project. SGLang reports no
error of a loader: an exception ends the server. That is better than a reply 200 after an update that was not
loaded; and the trainer sends changes only to a server that reports the version that they start from.
"""

import torch
from jaxrl_delta import Shadow

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
SHADOW = Shadow()  # of the model in this process


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Take a piece of an update; load all tensors with the last one.

    Args:
        named_tensors: one, the bytes of the piece.

    Raises:
        ValueError: a piece of another update, or other bits than the trainer's.
    """
    ((_, piece),) = named_tensors
    if SHADOW.receive(piece.cpu().numpy().tobytes()):
        signed = {name: bits.view(f"i{bits.itemsize}") for name, bits in SHADOW.tensors.items()}
        model.load_weights(
            [(name, torch.from_numpy(x).view(DTYPES[SHADOW.dtypes[name]])) for name, x in signed.items()]
        )
