"""Weights of Hugging Face folders, loaded one matrix at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.folder import read_headers, refuse_remote_code
from jaxrl_llm.hf.layouts import from_hf, parse_layout
from jaxrl_llm.hf.names import TensorRows, stack_dims, tensor_rows
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.hf.stored import StoredTensor, read_values
from jaxrl_llm.models import TransformerConfig, abstract, logical_axes, named_leaves
from jaxrl_llm.models.experts.router import reads_float32
from jaxrl_llm.models.linear import matrix_dims
from jaxrl_llm.models.quantize import SCALE, quantize_weight
from jaxrl_llm.structs import Params

_MAX_READ = 16 * 2**20  # bytes of a file that are mapped at once
_MIN_READ = 2**20
_EXPONENT = {"float32": np.uint32(0x7F800000), "float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
"""Bits of the exponent, which are all set in NaN and Inf."""


class PretrainedModels(Protocol):
    """Pretrained models by the names in recipes; `plan` uses shapes instead."""

    def config(self, path: str) -> TransformerConfig:
        """Return the model's config."""

    def params(self, path: str, config: TransformerConfig, shardings: Params, dtype: DTypeLike) -> Params:
        """Return the model's weights."""


class _HubAndFolders:
    """Hugging Face folders, and hub names."""

    def config(self, path: str) -> TransformerConfig:
        return read_config(resolve_model(path))

    def params(self, path: str, config: TransformerConfig, shardings: Params, dtype: DTypeLike) -> Params:
        return load_params(resolve_model(path), config, shardings, dtype)


PRETRAINED: PretrainedModels = _HubAndFolders()


def load_params(
    folder: Path | str,
    config: TransformerConfig,
    shardings: Params | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> Params:
    """Load the weights of an HF folder; each device's shard is read directly from the files.

    Besides the weights, host memory holds one layer of one weight at a time, or one expert of each shard: at
    most 1.2 times the largest tensor, or so many experts. In a multi-process run each process reads only the
    shards of its devices.

    Args:
        folder: config.json and safetensors, one file or sharded; bf16, fp16, fp32, or quantized (fp8 in
            blocks, MXFP4), whose values are rounded once, from float32.
        config: of the model, as `read_config(folder)` returns it; if it is quantized
            (`models.lora.frozen_config`), weights of linear layers are quantized one layer at a time.
        shardings: tree of `models.shardings`; None = all on one device.
        dtype: of the weights that are not quantized; weights of `reads_float32` stay float32.

    Raises:
        UserError: weights are missing, unexpected, misshapen, damaged, pickled, outside the folder, NaN or
            Inf; or the folder needs custom code.
    """
    folder = Path(folder)
    refuse_remote_code(folder)
    stored, parts, shapes = read_headers(folder, config), tensor_rows(config), abstract(config)
    one_device = SingleDeviceSharding(jax.local_devices()[0])
    layouts = dict.fromkeys(parts, one_device) if shardings is None else dict(named_leaves(shardings))
    axes, leaves, weights = logical_axes(shapes), dict(named_leaves(shapes)), {}
    # Quantized stacks, other stacks, and single weights.
    for name, rows in parts.items():
        if not rows:  # scales come with their codes
            continue
        own = jnp.dtype(jnp.float32 if reads_float32(name) else dtype)
        shape, sharding = leaves[name].shape, layouts[name]
        if stack_dims(name) and name + SCALE in leaves:
            names = (name, name + SCALE)
            stacks = [_make_zeros(layouts[n])(leaves[n].shape, leaves[n].dtype) for n in names]
            axis = matrix_dims(axes[name])[0][-1] - len(rows[0].index) + 1
            convert = functools.partial(quantize_weight, kind=config.quantize, axis=axis)
            weights |= zip(
                names, _fill(stored, rows, stacks, jnp.dtype(jnp.float32), convert=convert), strict=True
            )
        elif stack_dims(name):
            stack = _make_zeros(sharding)(shape, own)
            (weights[name],) = _fill(stored, rows, [stack], own, convert=lambda matrices: (matrices,))
        else:
            weights[name] = _read_global(stored, rows[0], shape, sharding, dtype=own)
    return jax.tree.unflatten(jax.tree.structure(shapes), [weights[name] for name in leaves])


def _fill(
    stored, parts: list[TensorRows], stacks: list[jax.Array], dtype, *, convert: Callable[..., Sequence[Any]]
) -> list[jax.Array]:
    """Fill the stacks of one weight matrix by matrix, in place, so that no second copy exists.

    If experts are sharded, one expert of each device is read at a time.

    Args:
        stacks: zeros, which are donated; the first has the weight's shape.
        convert: maps matrices of the weight, [shards, ...] of type `dtype`, to the matrices of each stack.
    """
    dims, shape, sharding = len(parts[0].index), stacks[0].shape, stacks[0].sharding
    of_device = sharding.shard_shape(shape)[dims - 1]
    shards = shape[dims - 1] // of_device
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[dims - 1 :]))
    at_once: dict[tuple[int, ...], list[TensorRows]] = {}
    for part in parts:  # a group is in the order of the shards
        at_once.setdefault((*part.index[:-1], part.index[-1] % of_device), []).append(part)
    for index, group in at_once.items():
        matrices = convert(_read_group(stored, group, shape[dims:], sharding, dtype=dtype))
        stacks = [
            _make_set_matrices(stack.sharding, shards)(stack, matrix, index)
            for stack, matrix in zip(stacks, matrices, strict=True)
        ]
    return stacks


def _read_group(
    stored, parts: Sequence[TensorRows], shape: tuple[int, ...], sharding: Sharding, *, dtype
) -> jax.Array:
    """Return matrices of one shape as one array [matrices, ...]; each device holds one or all of them."""

    def read(bounds):
        (first, stop), *rest = bounds
        assert stop == first + 1, bounds
        return read_slice(stored[parts[first].name], parts[first], shape, tuple(rest), dtype=dtype)[None]

    return _read_sharded(read, (len(parts), *shape), sharding)


def _read_global(stored, part: TensorRows, shape, sharding: Sharding, *, dtype) -> jax.Array:
    read = lambda bounds: read_slice(stored[part.name], part, shape, bounds, dtype=dtype)
    return _read_sharded(read, tuple(shape), sharding)


def _read_sharded(
    read: Callable[[tuple[tuple[int, int], ...]], np.ndarray], shape: tuple[int, ...], sharding: Sharding
) -> jax.Array:
    """Return an array; each process reads the shards of its devices, each shard once."""
    shards: dict[tuple, np.ndarray] = {}  # devices with the same shard share one read

    def of(index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        if bounds not in shards:
            shards[bounds] = read(bounds)
        return shards[bounds]

    array = jax.make_array_from_callback(shape, sharding, of)
    return array.block_until_ready()  # else reading would overtake the transfers and fill host memory


def read_slice(
    stored: StoredTensor,
    part: TensorRows,
    shape: tuple[int, ...],
    bounds: tuple[tuple[int, int], ...],
    *,
    dtype: jnp.dtype,
) -> np.ndarray:
    """Read part of one layer of a weight, [start, stop) of each of our dims, from its HF tensor's file.

    Rows are read a few at a time and the file is unmapped in between, so that memory holds little more than
    the result.
    """
    dims, groups = parse_layout(part.layout)
    size, bound = dict(zip(dims, shape, strict=True)), dict(zip(dims, bounds, strict=True))
    # HF's dim (h e) is read for whole heads h; the slice of e is taken afterwards.
    lead = [group[0] for group in groups]
    inner = [int(np.prod([size[dim] for dim in group[1:]])) for group in groups]
    columns = tuple(slice(bound[d][0] * n, bound[d][1] * n) for d, n in zip(lead[1:], inner[1:], strict=True))
    if part.inside:
        columns = (slice(columns[0].start + part.inside, columns[0].stop + part.inside), *columns[1:])
    if part.step > 1:
        first, last = columns[-1].start * part.step + part.column, columns[-1].stop * part.step
        columns = (*columns[:-1], slice(first, last, part.step))
    cut = tuple(slice(None) if dim in lead else slice(*bound[dim]) for dim in dims)
    out = aligned_empty(tuple(stop - start for start, stop in bounds), dtype)
    rows_axis, (first, last) = dims.index(lead[0]), bound[lead[0]]
    row_bytes = inner[0] * int(np.prod(stored.shape[1:])) * stored.value_bytes
    budget = min(max(row_bytes * (last - first) // 16, _MIN_READ), _MAX_READ)
    step = max(1, budget // row_bytes)
    # A few rows at a time.
    for start in range(first, last, step):
        stop = min(start + step, last)
        rows = slice(*(part.start + row * inner[0] for row in (start, stop)))
        block = read_values(stored, (rows, *columns))
        if not _all_finite(block):
            raise UserError(
                f"{stored.file}: {part.name} holds NaN or Inf. Download the model again, or take another."
            )
        sizes = size | {dim: bound[dim][1] - bound[dim][0] for dim in lead[1:]} | {lead[0]: stop - start}
        target = [slice(None)] * len(dims)
        target[rows_axis] = slice(start - first, stop - first)
        out[tuple(target)] = from_hf(block, part.layout, tuple(sizes[dim] for dim in dims))[cut]
    return out


def _all_finite(block: np.ndarray) -> bool:
    """Return whether no exponent has all its bits set; `np.isfinite` is slow for bfloat16."""
    ones = _EXPONENT[block.dtype.name]
    bits = block.view(ones.dtype)
    return not ((bits & ones) == ones).any()


def aligned_empty(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """Return np.empty aligned to 64 bytes: on CPU, JAX uses such memory without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + size].view(dtype).reshape(shape)


@functools.cache
def _make_zeros(sharding: Sharding):
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)


@functools.cache
def _make_set_matrices(sharding: Sharding, shards: int):
    """Return the function that writes one matrix per shard of the last stacked dim, at an index in the
    shard."""

    def set_matrices(stack: jax.Array, matrices: jax.Array, index: tuple[int, ...]) -> jax.Array:
        *outer, at = index
        dim = len(outer)
        divided = stack.reshape(*stack.shape[:dim], shards, -1, *stack.shape[dim + 1 :])
        update = jnp.expand_dims(matrices, (*range(dim), dim + 1))
        start = (*outer, 0, at, *(0,) * (matrices.ndim - 1))
        return jax.lax.dynamic_update_slice(divided, update, start).reshape(stack.shape)

    return jax.jit(set_matrices, donate_argnums=0, out_shardings=sharding)
