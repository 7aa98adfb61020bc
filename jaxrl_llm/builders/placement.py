"""Devices and mesh of each model of a run, made from its config before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import TrainConfig
from jaxrl_llm.recipe.rules_devices import device_grids, with_placements
from jaxrl_llm.sharding.config import ALL_DEVICES, MeshConfig
from jaxrl_llm.sharding.placement import to_mesh


def make_meshes(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> dict[str, Mesh]:
    """Return the mesh of each role.

    Args:
        devices: those of all processes; None = `jax.devices()`.

    Raises:
        UserError: a range or mesh that does not fit the devices.
    """
    grids = device_grids(config, jax.devices() if devices is None else devices)
    return {role: to_mesh(grid) for role, grid in grids.items()}


def on_one_device(config: TrainConfig) -> TrainConfig:
    """Return the recipe with all models on one mesh, so that a single device has each array once.

    Its rollout is synchronous: one ahead of training needs devices of its own.
    """
    config = with_placements(config, lambda role, own: replace(own, mesh=None, devices=""))
    rollout = replace(config.rollout, max_staleness=0)
    return replace(config, mesh=MeshConfig(), devices=ALL_DEVICES, rollout=rollout)
