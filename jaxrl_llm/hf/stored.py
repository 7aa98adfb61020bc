"""Tensors in safetensors files, and their values: floats, fp8 with a scale for each block, MXFP4."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.quantization import MX_BLOCK, Quantization

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Supported types of weights in the spelling of safetensors -> bytes per element."""
COPIED = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""Types of tensors that are copied from file to file -> their names in NumPy."""
FP8 = "F8_E4M3"
SCALES = ("_scale_inv", "_scale")
"""Ends of the name of a scale, after the name of its fp8 weight. Both multiply the weight."""
_OF_SERVERS = (".activation_scale", ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
"""Ends of names of scales of activations and of caches, which weights do not have."""
_POWERS = ("F8_E8M0", "U8")  # types of scales that are powers of two, byte b = 2^(b - 127)
MXFP4 = "MXFP4"  # not of safetensors, which holds bytes
_TYPES = {
    FP8: jnp.float8_e4m3fn,
    MXFP4: jnp.uint8,  # two numbers
    **dict.fromkeys(_POWERS, jnp.float8_e8m0fnu),
    **{"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16},
}
"""Type -> its NumPy type."""
_NUMBERS = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)
_PAIRS = np.stack([_NUMBERS[np.arange(256) % 16], _NUMBERS[np.arange(256) // 16]], axis=-1)
"""Byte of MXFP4 -> its two numbers, the low half first."""
_MAX_READ = 16 * 2**20  # bytes of values that `read_pieces` reads at once
LFS_POINTER = b"version https://git-lfs"

Slices = tuple[int | slice, ...]


class StoredTensor(NamedTuple):
    """A tensor as its file declares it, or one expert's part of such a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # "BF16", ...
    source: str  # name in the file
    held: tuple[int, ...]  # shape in the file
    offset: int  # of the first byte in the file
    expert: int | None = None  # of a tensor of all experts of a layer
    start: int = 0  # first row
    scale: StoredTensor | None = None  # of a quantized tensor
    block: tuple[int, int] = (1, 1)  # rows and columns that share a scale
    joined: tuple[StoredTensor, ...] = ()  # tensors whose rows follow each other, instead of one

    @property
    def is_readable(self) -> bool:
        """True if `read_values` reads it."""
        return self.dtype in FLOATS or self.scale is not None

    @property
    def can_copy(self) -> bool:
        """True if `read_pieces` reads it."""
        return self.scale is not None or self.dtype in COPIED

    @property
    def value_bytes(self) -> int:
        """Bytes of a value that `read_values` returns: 4 if quantized."""
        return FLOATS.get(self.dtype, 4)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return names, shapes and types. The library checks that offsets, shapes and the file's size agree."""
    try:
        with safe_open(file, framework="np") as handle:
            names = list(handle.keys())
    except (SafetensorError, OSError) as error:
        if is_lfs_pointer(file):
            raise UserError(
                f"{file}: a pointer of git-lfs, not the weights. Run: git -C {file.parent} lfs pull"
            ) from error
        raise UserError(
            f"{file}: truncated or damaged ({error}); its {file.stat().st_size:,} bytes "
            "do not match its header. Copy or download it again."
        ) from error
    # The library does not return the places of tensors.
    with file.open("rb") as opened:
        length = struct.unpack("<Q", opened.read(8))[0]
        header = json.loads(opened.read(length))
    stored = {}
    for name in names:
        shape, offset = tuple(header[name]["shape"]), 8 + length + header[name]["data_offsets"][0]
        stored[name] = StoredTensor(file, shape, header[name]["dtype"], name, held=shape, offset=offset)
    return stored


def is_lfs_pointer(file: Path) -> bool:
    """Return whether a file is a git-lfs pointer, which git checks out instead of a large file."""
    with file.open("rb") as opened:
        return opened.read(len(LFS_POINTER)) == LFS_POINTER


def join_scales(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None
) -> dict[str, StoredTensor]:
    """Join quantized weights with their scales, which are then no tensors of the model.

    A weight with a scale is quantized, whatever the config lists as not converted.

    Raises:
        UserError: scales of another type or shape than the blocks of their weight, or a config without the
            size of these blocks.
    """
    is_mxfp4 = quantization is not None and quantization.method == "mxfp4"
    return _join_mxfp4(stored) if is_mxfp4 else _join_fp8(stored, quantization)


def _join_fp8(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None
) -> dict[str, StoredTensor]:
    joined, has_scales = dict(stored), False
    for name, weight in stored.items():
        found = [stored[name + end] for end in SCALES if name + end in stored]
        if weight.dtype != FP8 or len(weight.shape) < 2 or not found:
            continue
        has_scales, scale = True, found[0]
        if quantization is None:
            raise UserError(
                f"{weight.file}: {name} is fp8 with a scale, but config.json has no quantization_config with "
                "the size of its blocks (weight_block_size). Copy or download config.json again."
            )
        # Scales of whole matrices and rows have fewer dims in some folders.
        sizes = weight.shape[-2:]
        block = tuple(size or whole for size, whole in zip(quantization.block, sizes, strict=True))
        grid = (*weight.shape[:-2], *(-(-n // size) for n, size in zip(sizes, block, strict=True)))
        what = f"{name} {list(weight.shape)} in blocks of {list(block)}"
        if 0 in quantization.block and math.prod(scale.shape) == math.prod(grid):
            scale = scale._replace(shape=grid)
        _check_scale(scale, grid, what, kinds=(*FLOATS, *_POWERS))
        joined[name] = weight._replace(scale=scale._replace(held=grid), block=block)
        del joined[scale.source]
    return {name: x for name, x in joined.items() if not (has_scales and name.endswith(_OF_SERVERS))}


def _join_mxfp4(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Join blocks [experts, outputs, blocks, 16] and scales into tensors [experts, inputs, outputs]."""
    joined = dict(stored)
    for held, blocks in stored.items():
        name = held.removesuffix("_blocks")
        scale = stored.get(f"{name}_scales")
        if name == held or scale is None or blocks.dtype != "U8" or blocks.shape[3:] != (MX_BLOCK // 2,):
            continue
        experts, outputs, count, _ = blocks.shape
        _check_scale(scale, blocks.shape[:3], f"{held} {list(blocks.shape)}", kinds=_POWERS)
        shape = (experts, MX_BLOCK * count, outputs)
        joined[name] = blocks._replace(shape=shape, dtype=MXFP4, scale=scale, block=(1, MX_BLOCK))
        del joined[held], joined[f"{name}_scales"]
    return joined


def _check_scale(scale: StoredTensor, grid: tuple[int, ...], what: str, *, kinds: tuple[str, ...]) -> None:
    """Refuse scales of a shape other than `grid`, or of a type not in `kinds`."""
    if scale.shape != grid or scale.dtype not in kinds:
        raise UserError(
            f"{scale.file}: {scale.source} is {scale.dtype} {list(scale.shape)}; {what} needs scales "
            f"{list(grid)} of type {', '.join(kinds)}. Download the model again."
        )


def read_values(stored: StoredTensor, index: tuple[slice, ...]) -> np.ndarray:
    """Read part of a tensor: floats in their type, quantized weights as float32.

    Args:
        index: slices of `stored.shape`; the last one may have a step.
    """
    rows, *others = index
    rows = slice(rows.start + stored.start, rows.stop + stored.start)
    if stored.joined:
        return _read_joined(stored.joined, rows, others)
    place = (rows, *others) if stored.expert is None else (stored.expert, rows, *others)
    if stored.scale is None:
        return _read_held(stored, place)
    with np.errstate(over="ignore", invalid="ignore"):  # read_slice refuses what is not finite
        if stored.dtype == MXFP4:
            return _read_mxfp4(stored, stored.scale, place)
        return _read_fp8(stored, stored.scale, place)


def _read_joined(tensors: Sequence[StoredTensor], rows: slice, others: Sequence[slice]) -> np.ndarray:
    """Read rows of tensors as if they were one."""
    parts, first = [], 0
    for tensor in tensors:
        count = tensor.shape[0]
        own = slice(max(rows.start - first, 0), min(rows.stop - first, count))
        parts += [read_values(tensor, (own, *others))] if own.start < own.stop else []
        first += count
    return np.concatenate(parts)


def read_pieces(stored: StoredTensor, dtype: str) -> Iterator[np.ndarray]:
    """Yield a tensor as its file has it, a few MiB at a time; quantized weights as rows, rounded to
    `dtype`."""
    if stored.scale is None:
        yield from _read_bytes(stored)
        return
    count, *others = stored.shape
    step = max(1, _MAX_READ // (stored.value_bytes * math.prod(others)))
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        values = read_values(stored, (rows, *(slice(0, size) for size in others)))
        yield values.astype(jnp.dtype(dtype))


def _read_bytes(stored: StoredTensor) -> Iterator[np.ndarray]:
    left = jnp.dtype(COPIED[stored.dtype]).itemsize * math.prod(stored.held)
    with stored.file.open("rb") as file:
        file.seek(stored.offset)
        while left:
            piece = np.frombuffer(file.read(min(left, _MAX_READ)), np.uint8)
            assert piece.size, f"{stored.file} has become shorter"  # its header was checked
            left -= piece.size
            yield piece


def _read_held(stored: StoredTensor, place: Slices) -> np.ndarray:
    """Read part of a tensor as its file holds it; the file is unmapped when the result is freed."""
    kind = np.dtype(_TYPES[stored.dtype])
    return np.memmap(stored.file, kind, mode="r", offset=stored.offset, shape=stored.held)[place]


def _read_fp8(stored: StoredTensor, scale: StoredTensor, place: Slices) -> np.ndarray:
    """Read fp8 weights times the scale of each block. Blocks at the edge may be cut."""
    *lead, rows, columns = place
    values = _read_held(stored, place).astype(np.float32)
    # The blocks that the part touches, and each row's and column's place among them.
    parts = zip((rows, columns), stored.block, strict=True)
    blocks = [np.arange(part.start, part.stop, part.step) // size for part, size in parts]
    touched = [slice(block[0], block[-1] + 1) for block in blocks]
    scales = _read_held(scale, (*lead, *touched)).astype(np.float32)
    for axis, block in zip((-2, -1), blocks, strict=True):
        scales = scales.take(block - block[0], axis=axis)
    values *= scales
    return values


def _read_mxfp4(stored: StoredTensor, scale: StoredTensor, place: Slices) -> np.ndarray:
    """Read MXFP4 weights, [experts, inputs, outputs], from blocks of inputs, [experts, outputs, blocks, 16].

    A weight is one of 16 numbers times a power of two (Open Compute Project, Microscaling Formats 1.0).
    bfloat16 represents it, too.
    """
    experts, inputs, outputs = place
    blocks = slice(inputs.start // MX_BLOCK, -(-inputs.stop // MX_BLOCK))
    codes = _read_held(stored, (experts, outputs, blocks, slice(None)))
    scales = _read_held(scale, (experts, outputs, blocks)).astype(np.float32)
    values = _PAIRS[codes].reshape(*scales.shape, MX_BLOCK)
    values *= scales[..., None]
    first = inputs.start - blocks.start * MX_BLOCK
    values = values.reshape(*scales.shape[:2], -1)[..., first : first + inputs.stop - inputs.start]
    return values.swapaxes(1, 2)
