"""Names of topologies -> devices to compile for, which need not be here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jaxrl_kernels import gpu_target
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.plan.chips import CHIPS, Chip

FLAT = ("v5e", "v6e")
SHAPES = {
    True: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    False: "1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16",
}
"""Shapes of slices in chips: those of chips in a plane, and of those in a cube."""
KNOWN = "v4-N, v5e-N, v5p-N, v6e-N, tpu7x-N, a shape such as v5e:4x4, h100, h100xN, h200xN, or cpu"
GPU_SHARE = 0.75
"""Of its memory that XLA takes on a GPU, if XLA_PYTHON_CLIENT_MEM_FRACTION does not say otherwise."""


class Topology(NamedTuple):
    """What a name means."""

    name: str
    platform: str  # "tpu", "cuda" or "cpu"
    kind: str  # key of CHIPS; "cpu"
    shape: tuple[int, ...]  # chips

    @property
    def chips(self) -> int:
        return math.prod(self.shape)


class Target(NamedTuple):
    """Devices to compile for."""

    topology: Topology
    devices: list[Any]
    memory: float  # bytes of each that a run may use
    chip: Chip | None  # None = unknown
    compiler: str  # name and version


def parse(name: str) -> Topology:
    """What a topology's name means. N counts what the names of slices count: chips of v5e and v6e,
    TensorCores (two a chip) of v4, v5p and tpu7x.

    Raises:
        ConfigError: no such name.
    """
    if name == "cpu":
        return Topology(name, "cpu", "cpu", ())
    if found := re.fullmatch(r"(h[12]00)(?:x(\d+))?", name):
        count = int(found[2] or 1)
        if not 1 <= count <= 8:
            raise ConfigError(f"--topology {name}: 1 to 8 GPUs of one host, such as {found[1]}x8.")
        return Topology(name, "cuda", found[1], (count,))
    found = re.fullmatch(r"(v4|v5e|v5litepod|v5p|v6e|tpu7x)(?:-(\d+)|:(\d+(?:x\d+)+))", name)
    if not found:
        what = f"{name}: unknown" if name else "is missing"
        raise ConfigError(f"--topology {what}. Known: {KNOWN}.")
    kind = found[1].replace("v5litepod", "v5e")
    shapes = {math.prod(s): s for s in map(_sizes, SHAPES[kind in FLAT].split())}
    if found[3]:
        shape = _sizes(found[3])
        if len(shape) != 3 - (kind in FLAT):
            raise ConfigError(f"--topology {name}: a shape of {kind} has {3 - (kind in FLAT)} numbers.")
        return Topology(name, "tpu", kind, shape)
    counts = {chips * CHIPS[kind].cores: shape for chips, shape in shapes.items()}
    if int(found[2]) not in counts:
        sizes = ", ".join(f"{kind}-{n}" for n in sorted(counts))
        raise ConfigError(
            f"--topology {name}: no such slice; {sizes}. Another shape: {kind}:AxB[xC], in chips."
        )
    return Topology(name, "tpu", kind, counts[int(found[2])])


def open_target(topology: Topology) -> Target:
    """Its devices. Must come before anything else asks jax for devices.

    Raises:
        ConfigError: its compiler is not installed, with what to install.
    """
    if topology.platform == "cpu":
        devices = jax.devices("cpu")
        return Target(topology, devices, _host_memory() / len(devices), None, _version("jaxlib"))
    chip = CHIPS[topology.kind]
    os.environ["JAX_PLATFORMS"] = "cpu"  # an accelerator that is here stays free
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # what is for other machines is never read back
    if topology.platform == "cuda":
        if why := gpu_target.unavailable():
            raise ConfigError(f"--topology {topology.name}: {why}; or pip install 'jaxrl-llm[plan]'.")
        devices = gpu_target.gpu_topology(topology.kind, topology.chips).devices
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_SHARE))
        return Target(topology, devices, chip.memory * share, chip, _version("jax-cuda13-plugin"))
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology {topology.name}: the TPU compiler (libtpu) is not installed. It needs no TPU: "
            "pip install 'jaxrl-llm[plan]'."
        )
    named = topology.kind.replace("v5e", "v5litepod")
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": f"{named}-{topology.chips * chip.cores}",  # else it warns that it knows none
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # plans side by side
    }
    shape = "x".join(map(str, topology.shape))
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{topology.kind}:{shape}", **_layout(topology)
    ).devices
    return Target(topology, devices, chip.memory, chip, _version("libtpu"))


def _layout(topology: Topology) -> dict[str, Any]:
    """v4 and v5p show the two cores of a chip as one device, as TPU VMs do; one chip is a host of its own."""
    megacore = {"chip_config_name": "megacore"} if topology.kind in ("v4", "v5p") else {}
    return megacore | ({"chips_per_host_bounds": (1, 1, 1)} if topology.chips == 1 else {})


def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"
