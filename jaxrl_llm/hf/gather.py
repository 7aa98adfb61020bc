"""Weights of any layout as Hugging Face tensors, in groups: for folders and for servers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.hf.names import HFTensor, Index, tensor_layout, to_hf
from jaxrl_llm.models import named_leaves
from jaxrl_llm.models.lora import merged_names, merged_weight
from jaxrl_llm.structs import Params


def group_by_size(tensors: Sequence[HFTensor], itemsize: int, limit: int) -> list[list[HFTensor]]:
    """Return the tensors in order, in groups of at most `limit` bytes; a larger one is a group of its own."""
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


def gather_tensors(
    params: Params, groups: Sequence[Sequence[HFTensor]], dtype: str, replicated: bool = False
) -> Iterator[list[jax.Array]]:
    """Yield the tensors of each group, whole and of type `dtype`; `np.asarray` brings one to the host.

    While one group is used the next one is on its way to the host, so two of them are in memory. Adapters are
    merged and quantized weights dequantized, in float32, a layer of a weight at a time. In a multi-process
    run a collective: every process iterates.

    Args:
        replicated: every device holds whole tensors, not only (with several processes) every process.
    """
    for gathered in gather_checked(params, groups, lambda _: dtype, replicated):
        yield [array for array, _ in gathered]


def gather_checked(
    params: Params,
    groups: Sequence[Sequence[HFTensor]],
    dtype_of: Callable[[HFTensor], str],
    replicated: bool = False,
) -> Iterator[list[tuple[jax.Array, jax.Array]]]:
    """Yield as `gather_tensors`, each tensor with a bool[] on the device: all its numbers are finite."""
    leaves, lora = dict(named_leaves(params)), params.config.lora
    scale = lora.scale if lora else 0.0
    current: list[tuple[jax.Array, jax.Array]] = []
    for group in groups:
        following = [_start(tensor, leaves, scale, dtype_of(tensor), replicated) for tensor in group]
        if current:
            yield current
        current = following
    yield current


def _start(
    tensor: HFTensor, leaves: dict, scale: float, dtype: str, replicated: bool
) -> tuple[jax.Array, jax.Array]:
    """Dispatch the work for one HF tensor: the devices run it while the host continues."""
    names, index = tuple(name for name, _ in tensor.parts), tensor.parts[0][1]
    weights = {part: leaves[part] for name in names for part in merged_names(name) if part in leaves}
    first = weights[names[0]]
    if isinstance(first, np.ndarray) and index:
        # or the whole stack would go to the device each time
        part = tuple(slice(i, i + 1) for i in index)
        weights, index = {name: weight[part] for name, weight in weights.items()}, (0,) * len(index)
    sharding = getattr(first, "sharding", None)
    whole = None
    if isinstance(sharding, NamedSharding) and (replicated or not sharding.is_fully_addressable):
        whole = NamedSharding(sharding.mesh, PartitionSpec())
    array, finite = _converter(names, scale, dtype, whole)(weights, index)
    if not replicated:
        array.copy_to_host_async()
    return array, finite


@functools.cache
def _converter(names: tuple[str, ...], scale: float, dtype: str, sharding: NamedSharding | None):
    """Return the jitted conversion: transposing and rounding a large matrix is fast on the device."""

    def convert(weights: dict[str, jax.Array], index: Index) -> tuple[jax.Array, jax.Array]:
        for dim, i in enumerate(index):
            weights = {k: jax.lax.dynamic_slice_in_dim(w, i, 1, axis=dim) for k, w in weights.items()}
        merged = [merged_weight(weights, name, scale) for name in names]
        matrix = (0,) * len(index) or ...
        parts = [
            to_hf(weight[matrix], tensor_layout(name)) for name, weight in zip(names, merged, strict=True)
        ]
        whole = (jnp.concatenate(parts) if len(parts) > 1 else parts[0]).astype(dtype)
        return whole, jnp.isfinite(whole).all()

    return jax.jit(convert, out_shardings=sharding)
