"""Topologies by name: target devices of a compilation, which this machine need not have."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from typing import Any, NamedTuple

import jax

from jaxrl_kernels.chips import CHIPS, GPUS, GPUS_PER_HOST, TPUS, Chip
from jaxrl_kernels.topology import gpu_devices, missing_compiler, tpu_devices
from jaxrl_llm.errors import ConfigError

SLICES = {
    2: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    3: "1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16",
}
"""Dims of the torus -> shapes of slices, in chips."""
KNOWN_TOPOLOGIES = (
    "v4-N, v5e-N, v5p-N, v6e-N, tpu7x-N, a shape such as v5e:4x4, "
    f"{', '.join(GPUS)}, N of them such as h100x8 or, on hosts of 8, h200x64, or cpu"
)
GPU_MEM_FRACTION = 0.75
"""Share of a GPU's memory that XLA preallocates, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set."""


class Topology(NamedTuple):
    """Parsed name of a topology."""

    name: str
    platform: str  # "tpu", "cuda" or "cpu"
    kind: str  # key of CHIPS; "cpu"
    shape: tuple[int, ...]  # chips

    @property
    def chips(self) -> int:
        return math.prod(self.shape)


class CompileTarget(NamedTuple):
    """Target devices of a compilation."""

    topology: Topology
    devices: list[Any]
    memory: float  # bytes of each device that a run may use
    chip: Chip | None  # None = unknown
    compiler: str  # name and version


def parse_topology(name: str) -> Topology:
    """Parse a topology's name.

    As in Google's names of slices, N is the number of chips of v5e and v6e, of TensorCores (two per chip)
    of v4, v5p and tpu7x.

    Raises:
        ConfigError: an unknown name.
    """
    if name == "cpu":
        return Topology(name, "cpu", "cpu", ())
    if match := re.fullmatch(rf"({'|'.join(GPUS)})(?:x(\d+))?", name):
        count = int(match[2] or 1)
        if not count or (count > GPUS_PER_HOST and count % GPUS_PER_HOST):
            raise ConfigError(
                f"--topology {name}: 1 to 8 GPUs of one host, such as {match[1]}x8, or hosts of 8, such as "
                f"{match[1]}x64."
            )
        return Topology(name, "cuda", match[1], (count,))
    match = re.fullmatch(rf"({'|'.join(TPUS)}|v5litepod)(?:-(\d+)|:(\d+(?:x\d+)+))", name)
    if not match:
        problem = f"{name}: unknown" if name else "is missing"
        raise ConfigError(f"--topology {problem}. Known: {KNOWN_TOPOLOGIES}.")
    kind = match[1].replace("v5litepod", "v5e")
    dims = CHIPS[kind].torus_dims
    shapes = {math.prod(shape): shape for shape in map(_sizes, SLICES[dims].split())}
    if match[3]:
        shape = _sizes(match[3])
        if len(shape) != dims:
            raise ConfigError(f"--topology {name}: a shape of {kind} has {dims} numbers.")
        return Topology(name, "tpu", kind, shape)
    counts = {chips * CHIPS[kind].cores: shape for chips, shape in shapes.items()}
    if int(match[2]) not in counts:
        sizes = ", ".join(f"{kind}-{n}" for n in sorted(counts))
        raise ConfigError(
            f"--topology {name}: no such slice; {sizes}. Another shape: {kind}:AxB[xC], in chips."
        )
    return Topology(name, "tpu", kind, counts[int(match[2])])


def open_target(topology: Topology) -> CompileTarget:
    """Return the devices of a topology. Must run before any other call initialises jax's devices.

    Raises:
        ConfigError: its compiler is not installed; names the package to install.
    """
    if topology.platform == "cpu":
        devices = jax.devices("cpu")
        return CompileTarget(topology, devices, _host_memory() / len(devices), None, _version("jaxlib"))
    if problem := missing_compiler(topology.platform):
        raise ConfigError(
            f"--topology {topology.name}: {problem}; or pip install 'jaxrl-llm[plan]'. The compiler needs no "
            "accelerator."
        )
    chip = CHIPS[topology.kind]
    os.environ["JAX_PLATFORMS"] = "cpu"  # this machine's accelerator is not needed
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # of no use for other machines' programs
    if topology.platform == "cuda":
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEM_FRACTION))
        devices = gpu_devices(topology.kind, topology.chips)
        return CompileTarget(topology, devices, chip.memory * fraction, chip, _version("jax-cuda13-plugin"))
    devices = tpu_devices(topology.kind, topology.shape)
    return CompileTarget(topology, devices, chip.memory, chip, _version("libtpu"))


def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"
