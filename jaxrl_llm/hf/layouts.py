"""Layouts of matrices: dims of ours -> dims of Hugging Face's, and tensors joined from several."""

from __future__ import annotations

import functools
import math
import re
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Join = Literal["rows", "inside", "columns", "diagonal", "ranks", "blocks"]
"""Arrangement of a tensor's parts: "rows" concatenates them; "inside" concatenates the parts of each expert;
"columns" interleaves them along the last dim;
"diagonal" is the block diagonal B of an adapter whose A has the "rows" of several. For adapters of all
experts of a layer, the ranks add up: "ranks" is A, [(experts parts rank), inputs], and "blocks" is B, block
diagonal in this rank, [(outputs parts), (parts rank experts)], with interleaved outputs."""


def to_hf(ours: np.ndarray | jax.Array, layout: str) -> np.ndarray | jax.Array:
    """Return one matrix of a weight in HF's layout: "d h e -> (h e) d" turns [D, H, E] into [H*E, D]."""
    source, groups = parse_layout(layout)
    order = [source.index(dim) for group in groups for dim in group]
    return ours.transpose(order).reshape(hf_shape(ours.shape, layout))


def from_hf(tensor: np.ndarray, layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a view in our layout, of shape `shape`: the inverse of `to_hf`."""
    source, groups = parse_layout(layout)
    flat = [dim for group in groups for dim in group]
    sizes = dict(zip(source, shape, strict=True))
    return tensor.reshape([sizes[dim] for dim in flat]).transpose([flat.index(dim) for dim in source])


@functools.cache
def parse_layout(layout: str) -> tuple[list[str], list[list[str]]]:
    """Split "d h e -> (h e) d" into (["d", "h", "e"], [["h", "e"], ["d"]])."""
    source, target = layout.split(" -> ")
    return source.split(), [(a or b).split() for a, b in re.findall(r"\(([^)]*)\)|(\S+)", target)]


def join_parts(parts: list[jax.Array], join: Join, shape: tuple[int, ...]) -> jax.Array:
    """Join parts in HF's layout, [N, ...] each, into N tensors; `shape` is the shape of the result."""
    if join in ("rows", "inside"):
        return jnp.concatenate(parts, axis=1 + (join == "inside")) if len(parts) > 1 else parts[0]
    if join == "ranks":
        return jnp.concatenate(parts, axis=2).reshape(shape)
    if join == "columns":
        return jnp.stack(parts, axis=-1).reshape(shape)
    zeros = lambda i, j: jnp.zeros((*parts[i].shape[:-1], parts[j].shape[-1]), parts[i].dtype)
    row = lambda i: [part if i == j else zeros(i, j) for j, part in enumerate(parts)]
    rows = [jnp.concatenate(row(i), axis=-1) for i in range(len(parts))]
    return jnp.concatenate(rows, axis=-2) if join == "diagonal" else jnp.stack(rows, axis=-2).reshape(shape)


def hf_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Return the shape of `to_hf` of a matrix of this shape."""
    source, groups = parse_layout(layout)
    sizes = dict(zip(source, shape, strict=True))
    return tuple(math.prod(sizes[dim] for dim in group) for group in groups)
