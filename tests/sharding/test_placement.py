"""Ranges of devices, meshes of roles, and arrays moved between meshes."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding.config import MeshConfig, PlacementConfig
from jaxrl_llm.sharding.placement import devices_of, make_mesh, place, reshard, select_devices

POLICY = PlacementConfig(mesh=MeshConfig(), devices="all")
NUMBERS = np.arange(64.0).reshape(8, 8)


class FakeDevice(NamedTuple):
    process_index: int
    id: int
    platform: str = "cpu"


def ids(mesh):
    return [device.id for device in mesh.devices.flat]


def test_a_role_has_the_policys_devices_and_sizes_unless_it_has_its_own():
    devices, policy = jax.devices(), PlacementConfig(mesh=MeshConfig(tensor=2), devices="0:4")
    assert ids(place("rollout.", PlacementConfig(), policy, devices)) == [0, 1, 2, 3]
    same = place("rollout.", PlacementConfig(mesh=MeshConfig(tensor=4)), policy, devices)
    assert ids(same) == [0, 1, 2, 3] and same.shape["tensor"] == 4
    other = place("rollout.", PlacementConfig(devices="4:8"), policy, devices)
    assert ids(other) == [4, 5, 6, 7] and (other.shape["fsdp"], other.shape["tensor"]) == (2, 2)
    assert place("rollout.", PlacementConfig(devices="all"), policy, devices).size == 8


def test_a_range_counts_the_devices_of_each_process():
    devices = [FakeDevice(p, 10 * p + i) for p in range(2) for i in range(4)]
    assert [d.id for d in select_devices("1:3", devices, "--devices")] == [1, 2, 11, 12]
    with pytest.raises(UserError, match=r"^--devices is 2:5: each process has 4 device\(s\), 0 to 3. Set"):
        select_devices("2:5", devices, "--devices")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (PlacementConfig(devices="4:12"), r"^--rollout.devices is 4:12: the run has 8 device\(s\), 0 to 7."),
        (PlacementConfig(devices="4:4"), "^--rollout.devices is 4:4: it has no devices"),
        (PlacementConfig(devices="two"), "^--rollout.devices is 'two': it must be all, or a range such as"),
        (
            PlacementConfig(devices="0:6", mesh=MeshConfig(fsdp=4)),
            r"^--rollout.mesh: .* does not fit the 6 cpu device\(s\) .* Set --rollout.mesh.fsdp 6.$",
        ),
        (PlacementConfig(mesh=MeshConfig(data=-1)), "^--rollout.mesh.fsdp is -1"),
    ],
)
def test_impossible_placements_name_the_key_and_the_fix(own, message):
    with pytest.raises(UserError, match=message):
        place("rollout.", own, POLICY, jax.devices())


@pytest.mark.parametrize(
    ("source", "target"), [((0, 8), (0, 8)), ((0, 4), (4, 8)), ((0, 8), (2, 4)), ((6, 8), (0, 8))]
)
def test_reshard_keeps_the_numbers_on_any_devices(source, target):
    devices = jax.devices()
    old = make_mesh(MeshConfig(fsdp=2, data=-1), devices[slice(*source)])
    new = make_mesh(MeshConfig(tensor=2), devices[slice(*target)])
    x = jax.device_put(NUMBERS, NamedSharding(old, P("fsdp", "data")))
    with jax.set_mesh(old):  # as in a run, whose mesh is the policy's
        moved = reshard({"x": x}, {"x": NamedSharding(new, P("tensor", "fsdp"))})["x"]
    assert devices_of(moved) == set(devices[slice(*target)])
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(shard.data, NUMBERS[shard.index])
    assert reshard(moved, moved.sharding) is moved
