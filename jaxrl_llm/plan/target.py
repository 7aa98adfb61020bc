"""Target devices of a compilation, which this machine need not have."""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxrl_kernels.chips import CHIPS, Chip
from jaxrl_kernels.topology import gpu_devices, missing_compiler, tpu_devices
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.host.devices import open_devices
from jaxrl_llm.plan.topology import Topology

GPU_MEM_FRACTION = 0.75
"""Share of a GPU's memory that XLA preallocates by default."""
MEM_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables that set another share; the second is the old name."""


class CompileTarget(NamedTuple):
    """Target devices of a compilation."""

    topology: Topology
    devices: list[Any]
    memory: float  # bytes of each device that a run may use
    chip: Chip | None  # None = unknown
    compiler: str  # name and version


def open_target(topology: Topology) -> CompileTarget:
    """Return the devices of a topology. Must run before any other call initialises jax's devices.

    Raises:
        ConfigError: its compiler is not installed; names the package to install.
    """
    if topology.platform == "cpu":
        devices = open_devices("cpu")
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
        devices = gpu_devices(topology.kind, topology.chips)
        memory = chip.memory * gpu_mem_fraction(os.environ)
        return CompileTarget(topology, devices, memory, chip, _version("jax-cuda13-plugin"))
    devices = tpu_devices(topology.kind, topology.shape)
    return CompileTarget(topology, devices, chip.memory, chip, _version("libtpu"))


def gpu_mem_fraction(environment: Mapping[str, str]) -> float:
    """Return the share of a GPU's memory that XLA preallocates.

    Raises:
        ConfigError: a variable is not a number above 0 and at most 1.
    """
    for name in MEM_FRACTION_VARIABLES:
        if text := environment.get(name):
            try:
                fraction = float(text)
            except ValueError:
                fraction = math.nan
            if not 0 < fraction <= 1:
                raise ConfigError(f"{name} is {text!r}: it must be a number above 0 and at most 1.")
            return fraction
    return GPU_MEM_FRACTION


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"
