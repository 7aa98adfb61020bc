"""The device mesh and its axes; every other package names logical axes (`rules.TRAIN`) instead."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_llm.errors import UserError
from jaxrl_llm.host.devices import open_devices
from jaxrl_llm.sharding.config import AXES, MeshConfig


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None, flag: str = "--mesh") -> Mesh:
    """Return the mesh (data, fsdp, expert, tensor, sequence) over devices of all processes.

    Args:
        devices: default `jax.devices()`.
        flag: prefix of the config's keys, for the message.

    Raises:
        UserError: the sizes do not multiply to the number of devices; the message names a flag and its value.
    """
    devices = open_devices() if devices is None else devices
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
    """Return the fix: one flag and its value, if changing one flag is enough."""
    for name in ("fsdp", "data", "tensor", "sequence"):
        size, others = config.sizes[name], [s for n, s in config.sizes.items() if n != name]
        room, left = divmod(num_devices, math.prod(map(abs, others)))
        if left == 0 and size != -1:
            if -1 in others:  # the axis -1 takes the devices that this one leaves
                room = max(n for n in range(1, min(size, room) + 1) if room % n == 0)
            return f"Set {flag}.{name} {room}."
    divisors = ", ".join(str(n) for n in range(1, num_devices + 1) if num_devices % n == 0)
    return (
        f"Set the sizes to divisors of {num_devices} ({divisors}) and one axis, such as {flag}.fsdp, to -1 "
        "for all remaining devices."
    )
