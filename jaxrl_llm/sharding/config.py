"""Settings of meshes and devices. Imports no jax, since reward workers read the settings of reward models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_llm.ranges import Range

ALL_DEVICES = "all"
DEVICE_RANGE = re.compile(r"(\d{1,6}):(\d{1,6})")
POLICY, ROLLOUT_ENGINE, REFERENCE, CRITIC, TEACHER = "", "rollout.", "reference.", "critic.", "teacher."
"""Roles of models: keys of `TrainConfig.placements`. Each reward model has a role, `reward_role`."""
AXES = ("data", "stage", "fsdp", "expert", "tensor", "sequence")
REPLICA_AXIS = "data"
"""Axis of whole copies of the trained weights, divided among slices."""
AxisSize = Annotated[int, Range(-1, 2**20)]


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices; one may be -1 (all remaining
    devices)."""

    data: AxisSize = 1
    """Data parallelism: replicas of the model, each with different rows."""
    fsdp: AxisSize = -1
    """Fully sharded data parallelism: shards parameters, gradients and optimizer state, and rows."""
    expert: AxisSize = 1
    """Expert parallelism: shards experts; everything else as fsdp."""
    tensor: AxisSize = 1
    """Tensor parallelism: shards heads, feed-forward and vocabulary, and the tokens between blocks."""
    sequence: AxisSize = 1
    """Context parallelism: shards the tokens of a row, and parameters, gradients and optimizer state."""
    stage: AxisSize = 1
    """Pipeline: shards layers, and rows, embedding and head as fsdp does."""
    sequence_parallel: Literal["ring", "ulysses"] = "ring"
    """Attention under context parallelism: ring, or Ulysses (all-to-all between tokens and heads)."""
    slices: Annotated[int, Range(1, 2**20)] = 1
    """Groups of devices with slow links between them (TPU slices, hosts), which divide `data` and `stage`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for sizes that are not a mesh."""
        for name, size in self.sizes.items():
            if size == 0:
                yield name, "is 0: it must be at least 1, or -1 for all remaining devices."
        remaining = [name for name, size in self.sizes.items() if size == -1]
        if len(remaining) > 1:
            others = ", ".join(f"mesh.{name}" for name in remaining[:-1])
            problem = f"is -1, and so is {others}: one axis at most may take all remaining devices."
            yield remaining[-1], f"{problem} Set this one to 1."
        if self.data > 0 and self.stage > 0 and self.data * self.stage % self.slices:
            times = f" times mesh.stage {self.stage}" if self.stage > 1 else ""
            yield "data", f"is {self.data}: it{times} must be a multiple of mesh.slices {self.slices}, or -1."

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, in the order of the mesh; -1 = all remaining devices."""
        return {name: getattr(self, name) for name in AXES}

    def resolved_sizes(self, num_devices: int) -> dict[str, int]:
        """Return axis -> size on `num_devices`; -1 becomes the devices that the other axes leave, at least
        1."""
        fixed = math.prod(size for size in self.sizes.values() if size != -1)
        return {
            name: max(num_devices // max(fixed, 1), 1) if size == -1 else size
            for name, size in self.sizes.items()
        }


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Devices of a model, and its mesh over them; by default the policy's."""

    mesh: MeshConfig | None = None
    """Mesh over the devices; None = the axis sizes of the policy's mesh. Once a size is set, the others have
    the defaults of a mesh: fsdp -1, all others 1."""
    devices: str = ""
    """Devices: all, or a range such as 0:4 (devices 0 to 3 of each process); "" = the policy's devices."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        if self.devices:
            yield from device_problems(self.devices)

    @property
    def is_own(self) -> bool:
        """True if mesh or devices are set, so that they may differ from the policy's."""
        return self.mesh is not None or bool(self.devices)


def reward_role(index: int) -> str:
    """Return the role of a reward model."""
    return f"reward.models.{index}."


def teacher_role(index: int) -> str:
    """Return the role of a teacher; all teachers have the placement of TEACHER."""
    return f"{TEACHER}{index}."


def device_bounds(text: str) -> tuple[int, int] | None:
    """Parse the range of devices "0:4" as (0, 4); None = "all"."""
    match = DEVICE_RANGE.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def device_problems(text: str) -> Iterator[tuple[str, str]]:
    """Yield ("devices", problem) for text that names no devices."""
    bounds = device_bounds(text)
    if bounds is None and text != ALL_DEVICES:
        yield "devices", f"is {text!r}: it must be all, or a range such as 0:4."
    elif bounds and bounds[0] >= bounds[1]:
        yield "devices", f"is {text}: it has no devices; the range ends before its second number."
