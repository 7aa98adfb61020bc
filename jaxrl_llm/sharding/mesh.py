"""The device mesh and its axes; every other package names logical axes (`rules.TRAIN`) instead."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_llm.errors import UserError
from jaxrl_llm.ranges import Range

AXES = ("data", "fsdp", "tensor", "sequence")
AxisSize = Annotated[int, Range(-1, 2**20)]


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices; one may be -1 (all that remain)."""

    data: AxisSize = 1
    """Data parallelism: replicas of the model, each with rows of its own."""
    fsdp: AxisSize = -1
    """Fully sharded data parallelism: parameters, gradients and optimizer are sharded; rows too."""
    tensor: AxisSize = 1
    """Tensor parallelism: heads, feed-forward and vocabulary are sharded; tokens between blocks too."""
    sequence: AxisSize = 1
    """Context parallelism: tokens of a row are sharded; parameters, gradients and optimizer too."""
    sequence_parallel: Literal["ring", "ulysses"] = "ring"
    """Attention under context parallelism: ring, or Ulysses (all-to-all between tokens and heads)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, what is wrong) for sizes that make no mesh."""
        for name, size in self.sizes.items():
            if size == 0:
                yield name, "is 0: it must be at least 1, or -1 for all remaining devices."
        remaining = [name for name, size in self.sizes.items() if size == -1]
        if len(remaining) > 1:
            others = ", ".join(f"mesh.{name}" for name in remaining[:-1])
            problem = f"is -1, and so is {others}: one axis at most may take all remaining devices."
            yield remaining[-1], f"{problem} Set this one to 1."

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, in the order of the mesh; -1 = all remaining devices."""
        return {name: getattr(self, name) for name in AXES}

    def resolved_sizes(self, num_devices: int) -> dict[str, int]:
        """Return axis -> size on `num_devices`, -1 replaced by what the other axes leave (at least 1)."""
        fixed = math.prod(size for size in self.sizes.values() if size != -1)
        return {
            name: max(num_devices // max(fixed, 1), 1) if size == -1 else size
            for name, size in self.sizes.items()
        }


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None, flag: str = "--mesh") -> Mesh:
    """Return the mesh (data, fsdp, tensor, sequence) over all devices of all processes.

    Args:
        devices: others than `jax.devices()`.
        flag: prefix of the config's keys, for the message.

    Raises:
        UserError: the sizes do not multiply to the number of devices; it names the flag to change and how.
    """
    devices = jax.devices() if devices is None else devices
    for name, problem in config.problems():
        raise UserError(f"{flag}.{name} {problem}")
    sizes = config.resolved_sizes(len(devices))
    if math.prod(sizes.values()) != len(devices):
        spelled = " x ".join(f"{name}={size}" for name, size in config.sizes.items())
        raise UserError(
            f"{flag}: {spelled} does not fit the {len(devices)} {devices[0].platform} device(s) that are "
            f"visible. {_fix(config, len(devices), flag)}"
        )
    shape = tuple(sizes.values())
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _fix(config: MeshConfig, num_devices: int, flag: str) -> str:
    """Name one flag that makes the product right, if changing one is enough."""
    for name in ("fsdp", "data", "tensor", "sequence"):
        size, others = config.sizes[name], [s for n, s in config.sizes.items() if n != name]
        room, left = divmod(num_devices, math.prod(map(abs, others)))
        if left == 0 and size != -1:
            if -1 in others:  # which takes what this one leaves
                room = max(n for n in range(1, min(size, room) + 1) if room % n == 0)
            return f"Set {flag}.{name} {room}."
    divisors = ", ".join(str(n) for n in range(1, num_devices + 1) if num_devices % n == 0)
    return (
        f"Set the sizes to divisors of {num_devices} ({divisors}) and one axis, such as {flag}.fsdp, to -1 "
        "for all remaining devices."
    )
