"""The named mesh: one place that knows devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_llm.errors import UserError

AXES = ("data", "fsdp", "tensor", "sequence")


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. Their product is the number of devices; one axis may be -1 (the rest)."""

    data: int = 1
    """Replicas of the model; rows are divided among them."""
    fsdp: int = -1
    """Parameters, gradients and optimizer are divided among these; rows too."""
    tensor: int = 1
    """Heads, feed-forward and vocabulary are divided among these."""
    sequence: int = 1
    """Tokens of a row are divided among these; parameters, gradients and optimizer too."""
    sequence_parallel: Literal["ring", "ulysses"] = "ring"
    """How attention sees a divided row: keys travel around a ring, or each device takes some heads whole."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, in the order of the mesh."""
        return {name: getattr(self, name) for name in AXES}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Mesh (data, fsdp, tensor, sequence) over all devices of all processes.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = list(config.sizes.values())
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise UserError(f"mesh: sizes must be positive, at most one -1; got {_spell(sizes)}")
    fixed = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and len(devices) % fixed == 0:
        sizes[sizes.index(-1)] = len(devices) // fixed
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh: {_spell(sizes)} needs {fixed} devices or a multiple, but {len(devices)} "
            f"{devices[0].platform} devices are visible. Set one of --mesh.data / fsdp / tensor / sequence "
            f"to -1 to use what is there, or make the product {len(devices)}."
        )
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _spell(sizes: list[int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True))
