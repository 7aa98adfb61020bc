"""Devices and mesh of each model of a run, made from its config before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import TrainConfig
from jaxrl_llm.sharding.placement import place

POLICY, ROLLOUT_ENGINE = "", "rollout."
"""Roles of models: keys of `TrainConfig.placements`."""


def make_meshes(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> dict[str, Mesh]:
    """Return the mesh of each role.

    Args:
        devices: those of all processes; None = `jax.devices()`.

    Raises:
        UserError: a range or mesh that does not fit the devices.
    """
    devices, placements = jax.devices() if devices is None else devices, config.placements
    return {role: place(role, own, placements[POLICY], devices) for role, own in placements.items()}
