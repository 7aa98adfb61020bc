"""Weights of any layout as Hugging Face tensors, in groups: for folders and for servers."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.hf.layouts import Join, join_parts, to_hf
from jaxrl_llm.hf.names import Encoding, HFTensor, Index, stored_dtype
from jaxrl_llm.models import TransformerConfig, named_leaves
from jaxrl_llm.models.lora import adapter_scale, merged_names, merged_weight
from jaxrl_llm.structs import Params


def group_by_size(tensors: Sequence[HFTensor], itemsize: int, limit: int) -> list[list[HFTensor]]:
    """Split the tensors, in order, into groups of at most `limit` bytes; a larger tensor is a separate
    group."""
    groups: list[list[HFTensor]] = [[]]
    size = 0
    for tensor in tensors:
        own = itemsize * math.prod(tensor.shape)
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += own
    return groups


def stacked_runs(tensors: Sequence[HFTensor]) -> list[list[HFTensor]]:
    """Split the tensors, in order, into runs that are contiguous in our stacks: a layer's experts."""
    runs: list[list[HFTensor]] = []
    for tensor in tensors:
        if runs and tensor.parts == _next_parts(runs[-1][-1]):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs


def _next_parts(tensor: HFTensor) -> tuple[tuple[str, Index], ...]:
    return tuple((name, (*index[:-1], index[-1] + 1)) for name, index in tensor.parts if index)


def gather_tensors(
    params: Params, groups: Sequence[Sequence[HFTensor]], dtype: str, replicated: bool = False
) -> Iterator[list[np.ndarray] | list[jax.Array]]:
    """Yield the tensors of each group, whole and of type `dtype` (`stored_dtype`), on the host.

    While one group is used, the next is copied to the host, so two groups are in memory. Contiguous experts
    of a layer are gathered at once and split on the host. Adapters are merged and quantized weights
    dequantized in float32, one layer of a weight at a time. In a multi-process run a collective: every
    process iterates.

    Args:
        replicated: the tensors stay on the devices, and every device holds whole tensors.
    """
    for gathered in gather_checked(params, groups, dtype, replicated):
        yield [array for array, _ in gathered]


def gather_checked(
    params: Params, groups: Sequence[Sequence[HFTensor]], dtype: str, replicated: bool = False
) -> Iterator[list[tuple[Any, Any]]]:
    """Yield each tensor of `gather_tensors` with a bool: all its numbers are finite."""
    leaves = dict(named_leaves(params))
    on_host = list if replicated else np.asarray
    start = functools.partial(_start, leaves, params.config, dtype, replicated=replicated)
    current: list[tuple[Any, Any]] = []
    for group in [*groups, []]:
        following = list(map(start, stacked_runs(group)))
        if current:
            yield [pair for run in current for pair in zip(*map(on_host, run), strict=True)]
        current = following


def _start(
    leaves: dict, config: TransformerConfig, dtype: str, run: list[HFTensor], *, replicated: bool
) -> tuple[Any, Any]:
    """Dispatch the work for the tensors of a run to the devices, while the host continues.

    Returns: the tensors [N, ...], and which of them are finite [N]; `replicated`: tuples of N arrays.
    """
    names, index = tuple(name for name, _ in run[0].parts), run[0].parts[0][1]
    scale = adapter_scale(config, names[0])  # all parts share it
    form = run[0].encoding or stored_dtype(run[0], dtype)
    weights = {part: leaves[part] for name in names for part in merged_names(name) if part in leaves}
    first = weights[names[0]]
    if isinstance(first, np.ndarray) and index:
        # otherwise each call would copy the whole stack to the device
        part = (*(slice(i, i + 1) for i in index[:-1]), slice(index[-1], index[-1] + len(run)))
        weights, index = {name: weight[part] for name, weight in weights.items()}, (0,) * len(index)
    sharding = getattr(first, "sharding", None)
    whole = None
    if isinstance(sharding, NamedSharding) and (replicated or not sharding.is_fully_addressable):
        whole = NamedSharding(sharding.mesh, PartitionSpec())
    parts = tuple(zip(names, run[0].layouts, strict=True))
    shape = (len(run), *run[0].shape)
    convert = _converter(parts, run[0].join, shape, scale, form=form, sharding=whole, cut=replicated)
    arrays, finite = convert(weights, index)
    if not replicated:
        arrays.copy_to_host_async()
    return arrays, finite


@functools.cache
def _converter(
    parts: tuple[tuple[str, str], ...],
    join: Join,
    shape: tuple[int, ...],
    scale: float,
    *,
    form: Encoding | str,
    sharding: NamedSharding | None,
    cut: bool,
):
    """Return the jitted conversion: transposing and rounding a large matrix is fast on the device.

    Args:
        shape: of the result, the number of tensors first.
    """
    count = shape[0]

    def convert(weights: dict[str, jax.Array], index: Index) -> tuple[Any, Any]:
        for dim, i in enumerate(index):
            size = count if dim == len(index) - 1 else 1
            weights = {k: jax.lax.dynamic_slice_in_dim(w, i, size, axis=dim) for k, w in weights.items()}
        converted = []
        for name, layout in parts:
            merged = merged_weight(weights, name, scale)
            stack = merged.reshape(count, *merged.shape[len(index) :])
            converted.append(jax.vmap(functools.partial(to_hf, layout=layout))(stack))
        whole = join_parts(converted, join, shape)
        whole = jax.vmap(form.apply)(whole) if isinstance(form, Encoding) else whole.astype(form)
        finite = jnp.isfinite(whole).all(axis=tuple(range(1, whole.ndim)))
        return (tuple(whole), tuple(finite)) if cut else (whole, finite)

    return jax.jit(convert, out_shardings=sharding)
