"""One table from logical axes to mesh axes; nothing else in the project names a mesh axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

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
        raise ValueError(f"sharding: no rule for logical axis {unknown[0]!r}; known: {sorted(rules)}")
    entries = [None if a is None else rules[a] for a in axes]
    used = [m for e in entries if e for m in ((e,) if isinstance(e, str) else e)]
    if len(used) != len(set(used)):
        raise ValueError(f"sharding: {axes} maps a mesh axis to two dims: {entries}")
    return PartitionSpec(*entries)


def fitted(
    mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules
) -> PartitionSpec:
    """`spec` of one array; a dim that its mesh axes do not divide stays whole (2 kv heads on tensor=4)."""
    entries = zip(shape, spec(axes, rules), strict=True)
    return PartitionSpec(*[entry if size % ways(mesh, entry) == 0 else None for size, entry in entries])


def fit(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules) -> NamedSharding:
    """Sharding of one array, as `fitted`."""
    return NamedSharding(mesh, fitted(mesh, axes, shape, rules))


def constrain(x: jax.Array, *axes: str | None, rules: Rules = TRAIN) -> jax.Array:
    """Pin an activation's layout under the current mesh (`jax.set_mesh`); without one, a no-op."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, fitted(mesh, axes, x.shape, rules))


def ways(mesh: Mesh | AbstractMesh, entry: str | tuple[str, ...] | None) -> int:
    """Among how many devices an entry of a PartitionSpec divides its dim."""
    names = () if entry is None else ((entry,) if isinstance(entry, str) else entry)
    return math.prod(mesh.shape[name] for name in names)


def put_rows(mesh: Mesh, batch: Any) -> Any:
    """Host arrays [B, T] to the devices, rows divided among them; every process holds the whole batch."""

    def place(x: np.ndarray) -> jax.Array:
        sharding = fit(mesh, ("batch", "sequence"), x.shape, TRAIN)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, batch)
