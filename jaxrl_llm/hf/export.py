"""Write a Hugging Face folder: sharded safetensors, config, tokenizer; complete or absent."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.hf.carried import PROCESSOR_FILES, Carried, nothing_carried
from jaxrl_llm.hf.config import check_round_trip, to_hf_config
from jaxrl_llm.hf.folder import INDEX, SINGLE, shorten_names
from jaxrl_llm.hf.gather import gather_checked, group_by_size, stacked_runs
from jaxrl_llm.hf.names import Encode, Encoding, HFTensor, hf_tensors, stored_dtype, tensor_bytes
from jaxrl_llm.hf.stored import COPIED, StoredTensor, read_pieces
from jaxrl_llm.hf.tokenizer import classifier_tokenizer, generation_config, save_tokenizer, special_ids
from jaxrl_llm.host.files import sync_to_disk, write_json
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.structs import Params

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_STORED = {ours: stored for stored, ours in COPIED.items()}
_MAX_STACK = 2**30
"""Bytes of a layer's experts that are gathered at once; a larger stack is gathered in pieces."""
_OTHER_FILES = 2**20  # bytes of config and tokenizer, at most
_EXPORTED = {
    "config.json": re.compile(
        r"(generation_)?config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
        r"|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|chat_template\.(jinja|json)"
        r"|vocab\.(json|txt)|merges\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
        rf"|{'|'.join(map(re.escape, PROCESSOR_FILES))}"
    ),
    "adapter_config.json": re.compile(r"adapter_config\.json|adapter_model\.safetensors"),
}
"""File that marks an earlier export -> names of the export's files, which may be replaced."""
_TEMPLATES = "additional_chat_templates"  # folder that transformers writes for several templates


def save_model(
    params: Params,
    config: TransformerConfig,
    folder: Path | str,
    tokenizer: Any = None,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 4 * 2**30,
    encode: Encode | None = None,
    carried: Carried | None = None,
) -> Path:
    """Write a folder that `transformers` and this project load; replaces an earlier export.

    Tensors (or a layer's experts) are gathered to the host one at a time, while the previous one is written.
    The folder is written under another name and then renamed, so it is never incomplete. In a multi-process
    run every process calls this and process 0 writes.

    Baichuan 1 (7B) is written as Llama, with separate q, k and v: the decoder is the same, and the folder
    needs no custom code. For Baichuan 2, the 13B models and Qwen 1, transformers needs the *.py files of the
    published folders, which are not written.

    Args:
        params: of any sharding; adapters are merged, quantized weights dequantized (`hf.gather`).
        tokenizer: of transformers; None = weights and config only.
        dtype: of the weights in the files.
        max_shard_bytes: maximum size of a file; a larger tensor gets a separate file.
        encode: encoding of tensors that are not stored in `dtype`; None = all tensors are.
        carried: parts of the base folder, copied byte for byte, or in `dtype` if they are quantized; None =
            the language model alone, as servers get it.

    Raises:
        UserError: unknown dtype, a config that the family cannot express, no space on the disk, or a folder
            that holds anything but an earlier export.
        RunError: weights that are NaN or Inf in `dtype`; names them. An earlier export stays.
        OSError: the disk fails or fills up. An earlier export stays.
    """
    folder = Path(folder).absolute()
    if dtype not in DTYPES:
        raise UserError(f"export: dtype={dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    config = export_config(config)
    if tokenizer is not None and config.value_head:
        tokenizer = classifier_tokenizer(tokenizer, config.vocab_size)
    # Copied tensors have separate files, in which each is at a multiple of its type's size, as in files of
    # the safetensors library.
    carried = carried or nothing_carried(config)
    tensors = [tensor._replace(name=carried.name(tensor.name)) for tensor in export_tensors(config, encode)]
    copies = [_copied(name, tensor, dtype) for name, tensor in carried.tensors.items()]
    copies.sort(key=lambda tensor: jnp.dtype(stored_dtype(tensor, dtype)).itemsize, reverse=True)
    shards = plan_files(tensors, copies, dtype=dtype, limit=max_shard_bytes)
    raw = carried.complete(_raw(config, dtype, tokenizer))
    if carried.outer:
        check_round_trip(config, raw, "the base folder's config.json with the model's keys")

    def write_rest(path: Path) -> None:
        write_description(path, raw, shards, tokenizer)
        for file in carried.outer.files if carried.outer else ():
            shutil.copyfile(file, path / file.name)

    write_folder(
        params,
        folder,
        {name: tensors for name, tensors, _ in shards},
        dtype,
        write_rest=write_rest,
        copied=carried.tensors,
    )
    return folder


def write_folder(
    params: Params,
    folder: Path,
    files: dict[str, list[HFTensor]],
    dtype: str,
    *,
    write_rest: Callable[[Path], None],
    config_name: str = "config.json",
    copied: Mapping[str, StoredTensor] | None = None,
) -> None:
    """Write a folder of safetensors under another name and rename it: complete or absent. A collective.

    Args:
        folder: absolute.
        files: name -> tensors; one tensor, or a layer's experts, is gathered at a time.
        write_rest: writes the other files to a folder, on process 0.
        config_name: the file that marks an earlier export: "config.json" or "adapter_config.json".
        copied: tensors of another folder, in files without others; process 0 copies them.

    Raises:
        UserError, RunError, OSError: as `save_model`.
    """
    size = sum(tensor_bytes(tensor, dtype) for tensors in files.values() for tensor in tensors)
    copied = copied or {}
    partial = folder.with_name(f".{folder.name}.partial")
    on_first(lambda: _make_partial(folder, partial, size, config_name))
    try:
        for name, tensors in files.items():
            if tensors[0].name in copied:
                on_first(functools.partial(_copy_shard, partial / name, tensors, copied, dtype=dtype))
            else:
                _write_shard(partial / name, tensors, params, dtype)
        on_first(lambda: (write_rest(partial), _replace(partial, folder)))
    finally:  # an incomplete export must not fill the disk
        if jax.process_index() == 0:
            shutil.rmtree(partial, ignore_errors=True)


def check_export_folder(folder: Path, config_name: str = "config.json", size: int = 0) -> None:
    """Refuse an export folder that holds anything else, hours before the export.

    Args:
        config_name: as for `write_folder`.
        size: bytes of the export, 0 = not known yet.

    Raises:
        UserError: the message names the files; or no space on the disk.
    """
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: a file; the export needs a folder")
    if Path.cwd().is_relative_to(folder.resolve()):
        raise UserError(f"{folder}: holds the working directory; choose another folder")
    inside = sorted(folder.iterdir()) if folder.exists() else []
    foreign = [path.name for path in inside if not _is_exported(path, config_name)]
    if inside and (foreign or not (folder / config_name).is_file()):
        what = foreign[0] if foreign else inside[0].name
        raise UserError(f"{folder}: holds {what}, which is not part of an export; choose another folder")
    check_export_disk(folder, size)


def save_description(
    config: TransformerConfig, folder: Path, tokenizer: Any = None, dtype: str = "bfloat16"
) -> Path:
    """Write only config and tokenizer, enough for a server that gets its weights later. Process 0 writes."""
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_description(folder, _raw(export_config(config), dtype, tokenizer), [], tokenizer)
    return folder


def export_config(config: TransformerConfig) -> TransformerConfig:
    """Return the config of the folder: Baichuan 1 (7B) becomes Llama, with separate q, k and v."""
    is_llama = config.family == "baichuan" and not (config.alibi or config.normalize_head)
    return dataclasses.replace(config, family="llama") if is_llama else config


def export_tensors(config: TransformerConfig, encode: Encode | None = None) -> list[HFTensor]:
    """Return the tensors of the folder."""
    tensors = hf_tensors(export_config(config))
    return encode(tensors) if encode else tensors


def _raw(config: TransformerConfig, dtype: str, tokenizer: Any) -> dict[str, Any]:
    """Return the content of config.json, of a language model alone."""
    keys = to_hf_config(config, dtype) | dict(nothing_carried(config).keys)
    if not tokenizer:
        return keys
    # Without the key transformers takes a padding id of the family, which may be another token or none.
    return keys | {"pad_token_id": None} | special_ids(tokenizer)


def _copied(name: str, tensor: StoredTensor, dtype: str) -> HFTensor:
    """Return the description of a tensor that is copied, in its type; `dtype` if it is quantized."""
    kept = COPIED[tensor.dtype] if tensor.scale is None else dtype
    return HFTensor(name, tensor.shape, (), (), encoding=Encoding(kept, lambda values: values))


def _copy_shard(
    path: Path, tensors: list[HFTensor], stored: Mapping[str, StoredTensor], *, dtype: str
) -> None:
    """Write one file of tensors of another folder, a few MiB at a time."""
    pieces = (piece for tensor in tensors for piece in read_pieces(stored[tensor.name], dtype))
    write_safetensors(path, tensors, pieces, dtype)


def plan_files(*parts: list[HFTensor], dtype: str, limit: int) -> list[tuple[str, list[HFTensor], int]]:
    """Return (file name, its tensors, bytes) of each file, filled in order; parts are in separate files."""
    size = jnp.dtype(dtype).itemsize
    groups = [group for tensors in parts if tensors for group in group_by_size(tensors, size, limit)]
    sizes = [sum(tensor_bytes(tensor, dtype) for tensor in group) for group in groups]
    n = len(groups)
    names = [SINGLE] if n == 1 else [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    return list(zip(names, groups, sizes, strict=True))


def _make_partial(folder: Path, partial: Path, size: int, config_name: str) -> None:
    """Make the temporary folder, if `size` bytes can be exported to `folder`."""
    check_export_folder(folder, config_name, size)
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir(parents=True)


def check_export_disk(target: Path, size: int, others: int = _OTHER_FILES) -> None:
    """Refuse an absolute path to which `size` bytes cannot be written; 0 = of a size to be known.

    Args:
        others: further bytes of metadata, at most.

    Raises:
        UserError: no permission, or no space on the disk.
    """
    parent = next(path for path in target.parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{parent}: cannot be written to; choose another folder for the export")
    free, needed = shutil.disk_usage(parent).free, size + others
    if size and free < needed:
        raise UserError(f"{target}: the export needs {needed:,} bytes, but {free:,} are free on that disk")


def _is_exported(path: Path, config_name: str) -> bool:
    """Return whether an export writes this file, or the folder of several chat templates."""
    if path.is_dir():
        templates = path.name == _TEMPLATES and config_name == "config.json"
        return templates and all(file.is_file() and file.suffix == ".jinja" for file in path.iterdir())
    return path.is_file() and bool(_EXPORTED[config_name].fullmatch(path.name))


def _write_shard(path: Path, tensors: list[HFTensor], params: Params, dtype: str) -> None:
    """Write one file of weights. Every process gathers the weights; process 0 writes.

    Raises:
        RunError: tensors are not finite.
        OSError: of process 0, on every process.
    """
    flags: list[bool] = []
    size = jnp.dtype(dtype).itemsize
    groups = [group for run in stacked_runs(tensors) for group in group_by_size(run, size, _MAX_STACK)]
    gathered = gather_checked(params, groups, dtype)
    arrays = (flags.append(finite) or array for group in gathered for array, finite in group)
    failure = None
    if jax.process_index() == 0:
        try:
            write_safetensors(path, tensors, arrays, dtype)
        except OSError as error:
            failure = error
    for _ in arrays:  # gathering them takes all processes
        pass
    on_first(lambda: _raise(failure))
    bad = [tensor.name for tensor, finite in zip(tensors, flags, strict=True) if not finite]
    refuse_not_finite(bad, f"{len(tensors)} tensors of {path.name}", dtype)


def refuse_not_finite(bad: list[str], among: str, dtype: str) -> None:
    """Raise RunError if tensors are NaN or Inf.

    Args:
        bad: names of these tensors.
        among: all tensors, for the message.
        dtype: type of the file.
    """
    if bad:
        raise RunError(
            f"not exported: {len(bad)} of {among} hold NaN or Inf as {dtype}: "
            f"{shorten_names(bad)}. An earlier export is untouched. Export an earlier checkpoint (python -m "
            "jaxrl_llm export --step N), or another dtype if they are only too large for this one."
        )


def write_safetensors(path: Path, tensors: list[HFTensor], arrays: Iterator[np.ndarray], dtype: str) -> None:
    """Write a safetensors file tensor by tensor; the library's writer needs all tensors in memory.

    Args:
        arrays: the tensors, or pieces of them, in the order of the file.
    """
    with path.open("wb") as file:
        file.write(safetensors_head(tensors, dtype))
        for array in arrays:
            file.write(np.asarray(array).reshape(-1).view(np.uint8))
        sync_to_disk(file)


def safetensors_head(tensors: list[HFTensor], dtype: str) -> bytes:
    """Return the bytes of a safetensors file before its tensors: their names, types, shapes and places."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        start, end = end, end + tensor_bytes(tensor, dtype)
        own = _STORED[stored_dtype(tensor, dtype)]
        header[tensor.name] = {"dtype": own, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def write_description(folder: Path, raw: dict[str, Any], shards, tokenizer: Any) -> None:
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, tensors, _ in shards for tensor in tensors}
        total = sum(size for _, _, size in shards)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
        write_json(folder / "generation_config.json", generation_config(tokenizer))
    write_json(folder / "config.json", raw)


def _replace(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`. An old folder is first renamed: a rename cannot replace a nonempty folder."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
