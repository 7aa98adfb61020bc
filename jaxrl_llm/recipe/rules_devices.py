"""Rules that recipe and devices answer: meshes fit, and models that compute at once share no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe.rule import Rule
from jaxrl_llm.sharding.config import AXES, POLICY, ROLLOUT_ENGINE, PlacementConfig, reward_role
from jaxrl_llm.sharding.placement import Device, device_grid

PLACED = ("rollout", "reference", "critic", "teacher")
"""Fields of a recipe with a separate mesh and devices, besides `reward.models`."""


def with_placements(
    config: TrainConfig, change: Callable[[str, PlacementConfig], PlacementConfig]
) -> TrainConfig:
    """Return the recipe with change(role, placement) of each model but the policy."""
    models = tuple(change(reward_role(i), model) for i, model in enumerate(config.reward.models))
    roles = {name: change(f"{name}.", getattr(config, name)) for name in PLACED}
    return replace(config, reward=replace(config.reward, models=models), **roles)


def with_sizes(config: TrainConfig, devices: Sequence[Device]) -> TrainConfig:
    """Return the recipe with the size of every mesh axis in place of -1."""
    grids = device_grids(config, devices)
    mesh = lambda role: replace(config.mesh_of(role), **dict(zip(AXES, grids[role].shape, strict=True)))
    sized = lambda role, own: replace(own, mesh=mesh(role)) if own.is_own else own
    return replace(with_placements(config, sized), mesh=mesh(POLICY))


def device_grids(config: TrainConfig, devices: Sequence[Device]) -> dict[str, np.ndarray]:
    """Return the devices of each role, an axis for each axis of its mesh.

    Raises:
        UserError: a range or mesh that does not fit the devices.
    """
    places = config.placements
    return {role: device_grid(role, own, places[POLICY], devices) for role, own in places.items()}


def _meshes_fit(config: TrainConfig, devices: Sequence[Device]) -> Iterator[str]:
    try:
        device_grids(config, devices)
    except UserError as error:
        yield str(error)


def _rollout_is_apart(config: TrainConfig, devices: Sequence[Device]) -> Iterator[str]:
    # Native rollout ahead of training runs beside it. CPUs of several processes would wait for each other:
    # their runtime runs programs of more than one local device one at a time, in the order of their start,
    # which differs between processes.
    if config.rollout.engine != "native" or not config.rollout.max_staleness:
        return
    flag = f"--rollout.max_staleness is {config.rollout.max_staleness}"
    used = {role: set(grid.flat) for role, grid in device_grids(config, devices).items()}
    own = used.pop(ROLLOUT_ENGINE)
    for role, others in used.items():
        if shared := own & others:
            yield (
                f"{flag}: the rollout generates while other models compute, and --rollout.devices "
                f"{config.rollout.devices} and --{role}devices have {len(shared)} device(s) in common. Set "
                f"--{role}devices to others, such as --devices 0:4 with --rollout.devices 4:8."
            )
            return
    first = devices[0]
    if first.platform != "cpu" or len({device.process_index for device in devices}) == 1:
        return
    local = lambda chosen: Counter(device.process_index for device in chosen)[first.process_index]
    if local(own) > 1 and max(map(local, used.values())) > 1:
        yield (
            f"{flag}: on CPUs with several processes the rollout must have one device of each process. Set "
            "--rollout.devices to one, such as 1:2."
        )


def _memory_is_shared(config: TrainConfig, devices: Sequence[Device]) -> Iterator[str]:
    if config.rollout.engine == "native" or config.servers.transport != "ipc":
        return
    processes = len({device.process_index for device in devices})
    if processes > 1 or devices[0].platform not in ("gpu", "cuda"):
        run = f"this run is {processes} process(es) on {devices[0].platform}"
        yield (
            f"--servers.transport ipc: trainer and servers share GPUs of one machine, in one process; {run}. "
            "Use --servers.transport disk, http or group."
        )


DEVICES = (
    Rule("devices", "devices mesh rollout.devices rollout.mesh", _meshes_fit, ends=True),
    Rule("devices", "rollout.max_staleness rollout.devices devices", _rollout_is_apart),
    Rule("devices", "servers.transport", _memory_is_shared),
)
