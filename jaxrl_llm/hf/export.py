"""Write a Hugging Face folder: sharded safetensors, config, tokenizer; complete or absent."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.folder import INDEX, SINGLE
from jaxrl_llm.hf.gather import gather, group_by_size
from jaxrl_llm.hf.names import HFTensor, hf_tensors, to_hf_config
from jaxrl_llm.hf.tokenizer import generation_config, save_tokenizer, special_ids
from jaxrl_llm.host.processes import agree
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.structs import Params

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_OURS = (".safetensors", ".json", ".jinja", ".txt", ".model")  # what an export may consist of


def save_model(
    params: Params,
    config: TransformerConfig,
    folder: Path | str,
    tokenizer: Any = None,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 4 * 2**30,
) -> Path:
    """Write the folder that `transformers` and this project load; an earlier export there is replaced.

    One tensor at a time is gathered to the host, while the one before is written. The folder is written
    beside its place and renamed, so it is never half there. In a multi-process run every process calls this
    and the first one writes.

    Baichuan is written as Llama, q, k and v apart: the same decoder, and loads without the folder's own code.

    Args:
        params: of any sharding.
        tokenizer: of transformers; None = weights and config only.
        dtype: of the weights in the files.
        max_shard_bytes: of a file; a larger tensor gets a file of its own.

    Raises:
        ValueError: unknown dtype, a config the family cannot express, no room on the disk, or a folder that
            holds something other than an earlier export.
    """
    folder = Path(folder).absolute()
    if dtype not in DTYPES:
        raise UserError(f"export: dtype={dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    config = as_written(config)
    raw = _raw(config, dtype, tokenizer)
    shards = _plan(hf_tensors(config), jnp.dtype(dtype).itemsize, max_shard_bytes)
    _refuse_a_bad_place(folder, sum(size for _, _, size in shards))
    writer = jax.process_index() == 0
    partial = folder.with_name(f".{folder.name}.partial")
    if writer:
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
        partial.mkdir(parents=True)
    try:
        for name, tensors, _ in shards:
            _write_shard(partial / name if writer else None, tensors, params, dtype)
        if writer:
            _write_rest(partial, raw, shards, tokenizer)
            _replace(partial, folder)
    finally:  # a disk that fills up must not keep what nobody can use
        if writer:
            shutil.rmtree(partial, ignore_errors=True)
    agree(0)  # nobody goes on before the folder is there
    return folder


def save_description(
    config: TransformerConfig, folder: Path, tokenizer: Any = None, dtype: str = "bfloat16"
) -> Path:
    """Only config and tokenizer: enough for a server that gets its weights later. Process 0 writes."""
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _write_rest(folder, _raw(as_written(config), dtype, tokenizer), [], tokenizer)
    return folder


def as_written(config: TransformerConfig) -> TransformerConfig:
    """The config of the folder: Baichuan becomes Llama, q, k and v apart."""
    return dataclasses.replace(config, family="llama") if config.family == "baichuan" else config


def _raw(config: TransformerConfig, dtype: str, tokenizer: Any) -> dict[str, Any]:
    """What config.json holds."""
    return to_hf_config(config, dtype) | (special_ids(tokenizer) if tokenizer else {})


def _plan(tensors: list[HFTensor], itemsize: int, limit: int) -> list[tuple[str, list[HFTensor], int]]:
    """(file name, its tensors, bytes) of each file, filled in order."""
    groups = group_by_size(tensors, itemsize, limit)
    sizes = [itemsize * sum(math.prod(tensor.shape) for tensor in group) for group in groups]
    n = len(groups)
    names = [SINGLE] if n == 1 else [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    return list(zip(names, groups, sizes, strict=True))


def _refuse_a_bad_place(folder: Path, size: int) -> None:
    """ValueError on every process if the first one cannot export there."""
    problem = _why_not(folder, size) if jax.process_index() == 0 else None
    if agree(problem is not None):
        raise UserError(problem or f"{folder}: the first process cannot export there; its message says why")


def _why_not(folder: Path, size: int) -> str | None:
    """What stands in the way of an export of `size` bytes to `folder`."""
    if folder.exists() and not folder.is_dir():
        return f"{folder}: a file; the export needs a folder"
    inside = list(folder.iterdir()) if folder.exists() else []
    foreign = [path.name for path in inside if path.is_dir() or path.suffix not in _OURS]
    if inside and (foreign or not (folder / "config.json").is_file()):
        what = foreign[0] if foreign else inside[0].name
        return f"{folder}: holds {what}, which is no part of an export; choose another folder"
    parent = next(path for path in folder.parents if path.exists())
    if not os.access(parent, os.W_OK):
        return f"{parent}: cannot be written to; choose another folder for the export"
    free = shutil.disk_usage(parent).free
    if free < size + 2**20:
        return f"{folder}: the export needs {size:,} bytes, but {free:,} are free on that disk"
    return None


def _write_shard(path: Path | None, tensors: list[HFTensor], params: Params, dtype: str) -> None:
    """One safetensors file, tensor by tensor (the library's writer wants all of them in memory).

    Without a path the tensors are only gathered, for the process that writes.
    """
    gathered = gather(params, [[tensor] for tensor in tensors], dtype)
    if path is None:
        for arrays in gathered:
            jax.block_until_ready(arrays)
        return
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        start, end = end, end + jnp.dtype(dtype).itemsize * math.prod(tensor.shape)
        header[tensor.name] = {"dtype": DTYPES[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (array,) in gathered:
            file.write(np.asarray(array).reshape(-1).view(np.uint8))
        _sync(file)


def _write_rest(folder: Path, raw: dict[str, Any], shards, tokenizer: Any) -> None:
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, tensors, _ in shards for tensor in tensors}
        total = sum(size for _, _, size in shards)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
        _write_json(folder / "generation_config.json", generation_config(tokenizer))
    _write_json(folder / "config.json", raw)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("wb") as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _replace(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`. What was there goes aside first: a rename cannot replace a full folder."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
