"""Devices and mesh of each model of a run, made from its config before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding.config import ALL_DEVICES, POLICY, ROLLOUT_ENGINE, MeshConfig
from jaxrl_llm.sharding.placement import place

PLACED = ("rollout", "reference", "critic", "teacher")
"""Fields of a recipe with a mesh and devices of their own, beside `reward.models`."""


def make_meshes(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> dict[str, Mesh]:
    """Return the mesh of each role.

    Args:
        devices: those of all processes; None = `jax.devices()`.

    Raises:
        UserError: a range or mesh that does not fit the devices, or devices that asynchronous rollout cannot
            have.
    """
    devices, placements = jax.devices() if devices is None else devices, config.placements
    meshes = {
        role: place(role, placement, placements[POLICY], devices) for role, placement in placements.items()
    }
    _check_asynchronous(config, meshes)
    return meshes


def on_one_device(config: TrainConfig) -> TrainConfig:
    """Return the recipe with all models on one mesh, so that a single device has each array once.

    Its rollout is synchronous: one ahead of training needs devices of its own.
    """
    shared = {"mesh": None, "devices": ""}
    roles = {name: replace(getattr(config, name), **shared) for name in PLACED}
    roles["rollout"] = replace(roles["rollout"], max_staleness=0)
    reward = replace(config.reward, models=tuple(replace(m, **shared) for m in config.reward.models))
    return replace(config, mesh=MeshConfig(), devices=ALL_DEVICES, reward=reward, **roles)


def _check_asynchronous(config: TrainConfig, meshes: Mapping[str, Mesh]) -> None:
    """Refuse native rollout ahead of training where it could not run beside it.

    Raises:
        UserError: the rollout shares devices with another model. Or CPUs of several processes would wait for
            each other: their runtime runs programs of more than one local device one at a time, in the order
            of their start, which differs between processes.
    """
    if config.rollout.engine != "native" or not config.rollout.max_staleness:
        return
    flag = f"--rollout.max_staleness is {config.rollout.max_staleness}"
    own = set(meshes[ROLLOUT_ENGINE].devices.flat)
    for role, mesh in meshes.items():
        if role != ROLLOUT_ENGINE and (shared := own & set(mesh.devices.flat)):
            raise UserError(
                f"{flag}: the rollout generates while other models compute, and --rollout.devices "
                f"{config.rollout.devices} and --{role}devices have {len(shared)} device(s) in common. Set "
                f"--{role}devices to others, such as --devices 0:4 with --rollout.devices 4:8."
            )
    if jax.process_count() == 1 or meshes[POLICY].devices.flat[0].platform != "cpu":
        return
    local = {role: len(mesh.local_devices) for role, mesh in meshes.items()}
    if local.pop(ROLLOUT_ENGINE) > 1 and max(local.values()) > 1:
        raise UserError(
            f"{flag}: on CPUs with several processes the rollout must have one device of each process. Set "
            "--rollout.devices to one, such as 1:2."
        )
