"""Placement: the devices and mesh of each model of a run, and moving arrays between meshes.

A range counts the devices of each process (`0:4` = the first four of every process), so that every process
has devices in every mesh: it can give rows to each model, and read its outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.errors import UserError
from jaxrl_llm.host.devices import open_devices
from jaxrl_llm.sharding.config import AXES, MeshConfig, PlacementConfig, device_bounds, device_problems


@runtime_checkable
class Device(Protocol):
    """A device of jax: of this machine, of a topology to compile for, or one that `doctor` has seen."""

    platform: str
    process_index: int


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh (data, stage, fsdp, expert, tensor, sequence) over devices of all processes.

    Args:
        devices: default `jax.devices()`.

    Raises:
        UserError: the sizes do not multiply to the number of devices; the message names a flag and its value.
    """
    return to_mesh(device_array(config, open_devices() if devices is None else devices, "--mesh"))


def to_mesh(devices: np.ndarray) -> Mesh:
    """Return the mesh of devices with an axis for each of AXES."""
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def device_array(config: MeshConfig, devices: Sequence[Device], flag: str) -> np.ndarray:
    """Return the devices with an axis for each of AXES; see `make_mesh`."""
    for name, problem in config.problems():
        raise UserError(f"{flag}.{name} {problem}")
    sizes = config.resolved_sizes(len(devices))
    if math.prod(sizes.values()) != len(devices):
        spelled = " x ".join(f"{name}={size}" for name, size in config.sizes.items())
        raise UserError(
            f"{flag}: {spelled} does not fit the {len(devices)} {devices[0].platform} device(s) that are "
            f"visible. {_fix(config, len(devices), flag)}"
        )
    # `data` and `stage` are the first axes, so neighbouring replicas and stages are in one slice.
    if config.slices > 1:
        found, parts = number_of_slices(devices), sizes["data"] * sizes["stage"]
        if parts % config.slices:
            raise UserError(
                f"{flag}.slices {config.slices} divides replicas and stages, and {flag}.data times "
                f"{flag}.stage is {parts}. Set one of them to a multiple of {config.slices}."
            )
        if found not in (1, config.slices):
            problem = f"is {config.slices}, and the devices are in {found} slices"
            raise UserError(f"{flag}.slices {problem}. Set {flag}.slices {found}.")
        devices = sorted(devices, key=_slice_of)
    return np.asarray(devices).reshape(tuple(sizes.values()))


def with_whole_rows(mesh: Mesh) -> Mesh:
    """Return the mesh in which the devices that share a row have rows of their own.

    The axis `sequence` is called `rows`: weights are sharded as before, so programs of both meshes take them.
    """
    names = ["rows" if name == "sequence" else name for name in mesh.axis_names]
    return Mesh(mesh.devices, names, axis_types=mesh.axis_types)


def number_of_slices(devices: Iterable[Device]) -> int:
    """Return the number of slices that the devices report: TPU slices, or hosts of GPUs."""
    return len(set(map(_slice_of, devices)))


def _slice_of(device: Device) -> int:
    return getattr(device, "slice_index", None) or 0


def slice_numbers(mesh: Mesh, slices: int) -> dict[jax.Device, int]:
    """Return device -> number of its slice: its own number, or else by the first axes."""
    devices = list(mesh.devices.flat)
    if number_of_slices(devices) > 1:
        return {device: _slice_of(device) for device in devices}
    return {device: i * slices // mesh.size for i, device in enumerate(devices)}


def _fix(config: MeshConfig, num_devices: int, flag: str) -> str:
    """Return the fix: one flag and its value, if changing one flag is enough."""
    for name in ("fsdp", "data", "tensor", "sequence", "stage"):
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


def place(
    role: str, placement: PlacementConfig, policy: PlacementConfig, devices: Sequence[jax.Device]
) -> Mesh:
    """Return the mesh of a model.

    Args:
        role: prefix of the model's keys, such as "rollout."; "" = the policy.
        policy: placement of the policy, the default of the others.
        devices: all devices of all processes.

    Raises:
        UserError: a process lacks devices of the range, or the sizes do not multiply to the number of
            devices; the message names the key and the fix.
    """
    return to_mesh(device_grid(role, placement, policy, devices))


def device_grid(
    role: str, placement: PlacementConfig, policy: PlacementConfig, devices: Sequence[Device]
) -> np.ndarray:
    """Return the devices of a model, with an axis for each axis of its mesh; see `place`."""
    own, text = bool(placement.devices), placement.devices or policy.devices
    chosen = select_devices(text, devices, f"--{role if own else ''}devices")
    return device_array(placement.mesh or policy.mesh, chosen, f"--{role}mesh")


def select_devices(text: str, devices: Sequence[Device], flag: str) -> list[Device]:
    """Return the devices of "all" or of a range, in order: the same range of each process's devices.

    Raises:
        UserError: the text is not a range, or a process lacks devices of it.
    """
    for _, problem in device_problems(text):
        raise UserError(f"{flag} {problem}")
    bounds = device_bounds(text)
    if bounds is None:
        return list(devices)
    by_process = _by_process(devices)
    fewest = min(map(len, by_process.values()))
    if bounds[1] > fewest:
        each = "each process" if len(by_process) > 1 else "the run"
        raise UserError(
            f"{flag} is {text}: {each} has {fewest} device(s), 0 to {fewest - 1}. Set {flag} to a range that "
            f"ends at {fewest} or before, such as 0:{fewest}."
        )
    chosen = {device for own in by_process.values() for device in own[slice(*bounds)]}
    return [device for device in devices if device in chosen]


def device_ranges(chosen: Iterable[Device], devices: Sequence[Device]) -> str:
    """Return chosen devices as ranges of each process's devices: "0:2" or "0:2,6:8"."""
    chosen = set(chosen)
    first = next(iter(_by_process(devices).values()))
    inside = [False, *(device in chosen for device in first), False]
    ends = [i for i, (a, b) in enumerate(itertools.pairwise(inside)) if a != b]
    return ",".join(f"{start}:{stop}" for start, stop in zip(ends[::2], ends[1::2], strict=True))


def placement_of(mesh: Mesh, devices: Sequence[Device]) -> dict[str, Any]:
    """Return the devices (as ranges of each process's devices) and axis sizes of a mesh."""
    return {"devices": device_ranges(mesh.devices.flat, devices), **mesh.shape}


def format_placement(placement: Mapping[str, Any]) -> str:
    """Format `placement_of`: "devices 0:2 of each process, tensor 4"."""
    sizes = [f"{name} {size}" for name, size in placement.items() if name != "devices" and size > 1]
    return f"devices {placement['devices']} of each process, {' x '.join(sizes) or '1 device'}"


def devices_of(tree: Any) -> frozenset[jax.Device]:
    """Return the devices of the arrays' shardings; host arrays have none."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "sharding")]
    return frozenset(device for array in arrays for device in array.sharding.device_set)


def reshard(tree: Any, shardings: Any) -> Any:
    """Move arrays to these shardings, on the same or other devices. A collective.

    An array that has its sharding already is returned unchanged, and others may share memory with their
    source: donate neither while the other is used.

    Args:
        shardings: a tree of the same structure, on a mesh in which every process has devices.
    """
    return jax.tree.map(_reshard_array, tree, shardings)


def _reshard_array(x: jax.Array, target: NamedSharding) -> jax.Array:
    if x.sharding == target:
        return x
    if target.is_fully_addressable and x.is_fully_addressable:
        return jax.device_put(x, target)
    if x.sharding.device_set == target.device_set:
        with jax.set_mesh(target.mesh):
            return jax.device_put(x, target)
    return _reshard_by_process(x, target)


def _reshard_by_process(x: jax.Array, target: NamedSharding) -> jax.Array:
    """Move an array of several processes to other devices of the same processes, which `jax.device_put`
    cannot.

    First each process gathers the whole array, sharded over its devices of the old mesh; then it copies the
    shards of the new mesh between its devices. Waits, so that only one array at a time is gathered.
    """
    sources = _by_process(x.sharding.mesh.devices.flat)
    grid = Mesh(np.array([sources[index] for index in sorted(sources)]), ("process", "local"))
    local_mesh = Mesh(np.array(sources[jax.process_index()]), ("local",))
    divided = [axis for axis, size in enumerate(x.shape) if size % local_mesh.size == 0]
    spec = PartitionSpec(*[None] * divided[0], "local") if divided else PartitionSpec()
    with jax.set_mesh(grid):
        gathered = jax.device_put(x, NamedSharding(grid, spec))
    parts = [shard.data for shard in gathered.addressable_shards]
    local = jax.make_array_from_single_device_arrays(x.shape, NamedSharding(local_mesh, spec), parts)
    with jax.set_mesh(local_mesh):
        shards = list(_shards(local, target))
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(x.shape, target, shards))


def _shards(x: jax.Array, target: NamedSharding) -> Iterator[jax.Array]:
    """Yield the shard of each of this process's devices in `target`."""
    pieces: dict[tuple, jax.Array] = {}  # devices with the same shard share one slice
    for device, index in target.addressable_devices_indices_map(x.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, x.shape, strict=True))
        if bounds not in pieces:
            pieces[bounds] = x[index]
        yield jax.device_put(pieces[bounds], device)


def _by_process(devices: Iterable[Device]) -> dict[int, list[Device]]:
    """Return the devices of each process, in order."""
    result: dict[int, list[Device]] = {}
    for device in devices:
        result.setdefault(device.process_index, []).append(device)
    return result
