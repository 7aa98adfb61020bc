"""Weights on a disk that the servers see too: a Hugging Face folder for each push."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxrl_llm import models
from jaxrl_llm.bridge.push import Part, WeightTransport
from jaxrl_llm.bridge.servers import Json, Receiver
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.hf.export import export_tensors, save_model
from jaxrl_llm.hf.names import Encode, tensor_bytes
from jaxrl_llm.structs import Params

KEPT = 2  # pushes: a server that was left out reads the newest again while the next is written
MEMORY = Path("/dev/shm")
PREFIX = "jaxrl_llm_"
LOCK = ".lock"  # in a folder in memory; held for the life of the run


class DiskTransport(WeightTransport):
    """Writes to a temporary name and renames, so that no server reads half a push; keeps the last two.

    Args:
        folder: of this run alone, that every server sees under the same path (`weight_folder`).
        dtype: "float32" or "bfloat16", of the weights in the files.
        encode: of tensors that are not in `dtype`; None = all are.
    """

    session = False
    can_resend = True

    def __init__(self, folder: Path, dtype: str, tokenizer: Any = None, encode: Encode | None = None):
        self.folder, self.dtype, self.tokenizer, self.encode = folder, dtype, tokenizer, encode
        self._pushes: list[Path] = []

    def parts(self, params: Params, label: str) -> Iterator[Part]:
        """Write the folder of the push, which is its one part.

        Raises:
            ServerError: it cannot be written. The run then ends as without servers, and saves its state.
        """
        params, path = models.without_value_head(params), self.folder / label
        try:
            save_model(params, params.config, path, self.tokenizer, dtype=self.dtype, encode=self.encode)
        except (OSError, UserError) as error:
            raise ServerError(
                f"the weights for the servers are not written: {error}. Free some space there, or set "
                "--servers.folder to a folder on another disk that the servers see too"
            ) from error
        self._pushes.append(path)
        while len(self._pushes) > KEPT:
            old = self._pushes.pop(0)
            if jax.process_index() == 0:
                shutil.rmtree(old, ignore_errors=True)
        tensors = export_tensors(params.config, self.encode)
        yield Part(path, sum(tensor_bytes(tensor, self.dtype) for tensor in tensors), last=True)

    async def send(self, receiver: Receiver, part: Part, options: Json) -> None:
        await receiver.pool.kind.send_folder(receiver, part.content, options)


@contextlib.contextmanager
def weight_folder(run_dir: Path, shared: str, in_memory: bool, num_bytes: int) -> Iterator[Path]:
    """Provide a folder of this run alone for weights; removed at the end.

    Args:
        shared: folder that servers elsewhere see too; "" = none.
        in_memory: whether servers run here: then in /dev/shm, if KEPT + 1 pushes fit there and the run has
            one process. Otherwise in the run directory, which has one name for all processes.
        num_bytes: of one push.
    """
    remove_abandoned()
    free = shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0
    with contextlib.ExitStack() as closing:
        if shared:  # a folder for each run: others may share it
            number = zlib.crc32(str(run_dir.absolute()).encode())
            folder = Path(shared).absolute() / f"{run_dir.name}-{number:08x}"
        elif in_memory and jax.process_count() == 1 and free > (KEPT + 1) * num_bytes:
            folder, file = _lock_new_folder()
            closing.enter_context(file)
        else:
            folder = run_dir.absolute() / "weights"
        try:
            yield folder
        finally:
            if jax.process_index() == 0:
                shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Free the memory of killed runs: no process holds the locks of their folders."""
    for folder in MEMORY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _lock_new_folder() -> tuple[Path, TextIO]:
    """Make a folder in memory. Returns its open lock file, too: the lock ends with this process."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY))
        file = (folder / LOCK).open("w")
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                return folder, file
        file.close()  # another run took it for abandoned before it was locked
