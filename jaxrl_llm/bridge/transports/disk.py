"""Weights on a disk that the servers see too: a Hugging Face folder for each push."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import models
from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.bridge.update import Link, Parcel
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.structs import Params

KEPT = 2  # pushes: a server that was left out reads the newest again while the next is written
MEMORY = Path("/dev/shm")
PREFIX = "jaxrl_llm_"


class DiskTransport:
    """Writes beside the place and renames, so that no server reads half a push; keeps the last two.

    Args:
        folder: of this run alone, that every server sees under the same path; `close` removes it.
        dtype: "float32" or "bfloat16", of the weights in the files.
    """

    session = False
    lasting = True

    def __init__(self, folder: Path, dtype: str, tokenizer: Any = None):
        self.folder, self.dtype, self.tokenizer = folder, dtype, tokenizer
        self._written: list[Path] = []

    def parcels(self, params: Params, label: str) -> Iterator[Parcel]:
        """One: the folder of the push, written."""
        params, path = models.without_value_head(params), self.folder / label
        save_model(params, params.config, path, self.tokenizer, self.dtype)
        self._written.append(path)
        while len(self._written) > KEPT:
            old = self._written.pop(0)
            if jax.process_index() == 0:
                shutil.rmtree(old, ignore_errors=True)
        itemsize = jnp.dtype(self.dtype).itemsize
        yield Parcel(path, itemsize * sum(leaf.size for leaf in jax.tree.leaves(params)), last=True)

    async def connect(self, link: Link) -> None:
        pass

    async def send(self, link: Link, parcel: Parcel, end: Json) -> None:
        body = {"model_path": str(parcel.content), "load_format": "auto", **end}
        await link.update("/update_weights_from_disk", body)

    def close(self) -> None:
        """Remove what was written."""
        if jax.process_index() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def within(shared: Path, run_dir: Path) -> Path:
    """This run's own place in a folder that others use too: it alone is cleared at the end."""
    where = str(run_dir.absolute())
    return shared.absolute() / f"{run_dir.name}-{zlib.crc32(where.encode()):08x}"


def own_folder(in_memory: bool, run_dir: Path, size: int) -> Path:
    """A new folder of this run: in memory if that is asked for and three pushes fit, else in the run's.

    With several processes in the run's, which has one name for all of them.
    """
    sweep()
    fits = in_memory and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > (KEPT + 1) * size
    if not fits or jax.process_count() > 1:
        return run_dir.absolute() / "weights"
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}_", dir=MEMORY))


def sweep() -> None:
    """Give back the memory of runs that were killed."""
    for folder in MEMORY.glob(f"{PREFIX}*"):
        process = folder.name.removeprefix(PREFIX).split("_")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)
