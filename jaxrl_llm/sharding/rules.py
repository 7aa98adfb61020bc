"""One table from logical axes to mesh axes; nothing else in the project names a mesh axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.errors import UserError

Rules = Mapping[str, str | tuple[str, ...] | None]

TRAIN: Rules = {
    # activations
    "batch": ("data", "fsdp"),
    "sequence": "sequence",
    "hidden": None,
    # weights
    "layers": None,
    "embed": ("fsdp", "sequence"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "norm": None,
}
"""Training and scoring: weights divided over fsdp, sequence and tensor, rows over data and fsdp."""

ROLLOUT: Rules = {**TRAIN, "embed": None}
"""Decoding reads every weight for every token: whole on each replica, divided over tensor only."""


def spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """PartitionSpec of an array whose dims carry these logical axes.

    Raises:
        ValueError: an axis that the table lacks, or a mesh axis used for two dims.
    """
    unknown = [a for a in axes if a is not None and a not in rules]
    if unknown:
        raise UserError(f"sharding: no rule for logical axis {unknown[0]!r}; known: {sorted(rules)}")
    entries = [None if a is None else rules[a] for a in axes]
    used = [m for e in entries if e for m in ((e,) if isinstance(e, str) else e)]
    if len(used) != len(set(used)):
        raise UserError(f"sharding: {axes} maps a mesh axis to two dims: {entries}")
    return PartitionSpec(*entries)


def fit(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules) -> NamedSharding:
    """Sharding of one array; a dim that its mesh axes do not divide stays whole (2 kv heads on tensor=4)."""
    return NamedSharding(mesh, _divided(mesh, axes, shape, rules))


def _divided(mesh, axes, shape, rules: Rules) -> PartitionSpec:
    entries = []
    for size, entry in zip(shape, spec(axes, rules), strict=True):
        names = () if entry is None else ((entry,) if isinstance(entry, str) else entry)
        ways = math.prod(mesh.shape[name] for name in names)
        entries.append(entry if size % ways == 0 else None)
    return PartitionSpec(*entries)


def layout(
    axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules = TRAIN
) -> PartitionSpec | None:
    """As `fit`, under the current mesh (`jax.set_mesh`); None where there is one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else _divided(mesh, axes, shape, rules)


def constrain(x: jax.Array, *axes: str | None, rules: Rules = TRAIN) -> jax.Array:
    """Pin an activation's layout under the current mesh; on one device, a no-op."""
    found = layout(axes, x.shape, rules)
    return x if found is None else jax.lax.with_sharding_constraint(x, found)


def prediction_layout(hidden: jax.Array, head: jax.Array) -> tuple[PartitionSpec, PartitionSpec] | None:
    """`layout` of jaxrl_kernels.linear_logprob for [B, T, D] and [V, D] under the current mesh."""
    found = layout(("batch", "sequence", "hidden"), hidden.shape)
    return None if found is None else (found, layout(("vocab", "embed"), head.shape))


def put_rows(mesh: Mesh, batch: Any) -> Any:
    """Host arrays [B, T] to the devices, rows divided among them; every process holds the whole batch."""

    def place(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, row_sharding(mesh, x.shape), lambda index: x[index])

    return jax.tree.map(place, batch)


def row_sharding(mesh: Mesh, shape: tuple[int, int]) -> NamedSharding:
    """Where rows of tokens [B, T] lie."""
    return fit(mesh, ("batch", "sequence"), shape, TRAIN)


def laid_out(shapes: Any, shardings: Any) -> Any:
    """A tree of `jax.ShapeDtypeStruct` with these shardings, each of which may stand for a whole subtree."""
    put = lambda s, x: jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=s), x)
    return jax.tree.map(put, shardings, shapes)


def bytes_per_device(tree: Any) -> int:
    """Of abstract or host arrays; one without a sharding is whole everywhere. Padding is not counted."""

    def one(x) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * np.dtype(x.dtype).itemsize

    return sum(map(one, jax.tree.leaves(tree)))
