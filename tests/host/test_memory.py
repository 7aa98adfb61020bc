"""Host memory: read from files of the system, and refused early where it is short."""

import jax
import numpy as np
import pytest

from jaxrl_llm.builders.run import check_offload
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.host import devices
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.sharding.rules import on_host


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine with 3 GiB free, and a container that may be given a limit."""
    meminfo, limit, used = (tmp_path / name for name in ("meminfo", "memory.max", "memory.current"))
    meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable:    3145728 kB\nHugePages_Total:       0\n")
    monkeypatch.setattr(devices, "MEMINFO", meminfo)
    monkeypatch.setattr(devices, "CGROUP_ROOT", tmp_path)
    return limit, used


def test_the_container_counts_where_it_has_less(system):
    limit, used = system
    assert devices.available_bytes() == 3 * 2**30
    used.write_text(f"{2**30}\n")
    limit.write_text("max\n")
    assert devices.available_bytes() == 3 * 2**30
    limit.write_text(f"{2**30 + 5 * 2**20}\n")
    assert devices.available_bytes() == 5 * 2**20
    limit.with_name("memory.stat").write_text(f"anon 7\ninactive_file {2**20}\nactive_file 9\n")
    assert devices.available_bytes() == 6 * 2**20  # the cache of files is given back


def test_processes_of_one_host_share_its_memory(system, monkeypatch):
    """2 GiB each: one fits 3 GiB, two do not, two on two hosts do."""
    devices.check_host_memory(2 * 2**30, "--x True", "Set --x False.")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gather = lambda apart: lambda row: [row, row + np.int32([apart, 0, 0])]
    monkeypatch.setattr(devices.multihost_utils, "process_allgather", gather(1))
    devices.check_host_memory(2 * 2**30, "--x True", "Set --x False.")
    monkeypatch.setattr(devices.multihost_utils, "process_allgather", gather(0))
    message = r"--x True needs 4.0 GiB of host memory for 2 processes of a host, where 3.0 GiB are free. Set"
    with pytest.raises(UserError, match=message):
        devices.check_host_memory(2 * 2**30, "--x True", "Set --x False.")


def test_a_system_that_does_not_say_is_believed(system, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "MEMINFO", tmp_path / "none")
    assert devices.available_bytes() is None
    devices.check_host_memory(2**40, "--x True", "")


def test_offload_is_refused_where_the_host_is_short(system):
    """1 GiB of moments for each of 8 devices."""
    mesh = jax.make_mesh((8,), ("fsdp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))

    class Offloaded:
        needs_reference = False

        def abstract_state(self):
            return jax.ShapeDtypeStruct((8, 2**28), "float32", sharding=on_host(sharding))

    config = TrainConfig(optim=OptimConfig(offload=True))
    message = "--optim.offload needs 8.0 GiB .* 3.0 GiB are free. Set --optim.moments int8, a larger"
    with pytest.raises(UserError, match=message):
        check_offload(config, Offloaded(), {})
