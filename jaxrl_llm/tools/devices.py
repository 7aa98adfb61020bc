"""Devices, drivers and package versions of this machine, as `doctor` checks them."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from jaxrl_llm.extensions import package_version
from jaxrl_llm.host import huge_pages
from jaxrl_llm.host.huge_pages import TPU_DEVICES, has_devices

GIB = 2**30
TIMEOUT = 120.0  # seconds for a subprocess: importing jax and opening a TPU takes long
DRIVERS = {"jax-cuda13-plugin": 580, "jax-cuda12-plugin": 525}
"""Plugin -> major version of the oldest NVIDIA driver with its CUDA (docs.nvidia.com, CUDA compatibility)."""
DEVICES = """
import json, jax
limit = lambda device: (device.memory_stats() or {}).get("bytes_limit", 0)
found = [{"platform": d.platform, "kind": d.device_kind, "memory": limit(d)} for d in jax.local_devices()]
print(json.dumps(found))
"""

Status = Literal["ok", "note", "fix"]


@dataclass(frozen=True)
class SeenDevice:
    """A `sharding.placement.Device` that another process has opened."""

    id: int
    process_index: int
    platform: str


class Finding(NamedTuple):
    """Result of a check."""

    name: str
    status: Status  # "note": works, but slower or with less; "fix": a run would fail, or lack a logger
    text: str


def check_versions() -> Iterator[Finding]:
    """Check the installed packages against the requirements of this package and of jax."""
    wrong = unmet_requirements("jaxrl-llm", extras=())
    wrong += unmet_requirements("jax", ("tpu", "cuda12", "cuda13"))
    flax, jax = package_version("flax"), package_version("jax")
    if Version(flax) <= Version("0.12.8") and Version(jax) >= Version("0.11.1"):
        wrong.append(f"flax {flax} does not work with jax {jax}: 0.12.12 does")
    if wrong:
        yield Finding("versions", "fix", f"{'; '.join(wrong)}. Fix: pip install --upgrade jaxrl-llm")
    else:
        names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers")
        text = ", ".join(f"{name} {package_version(name)}" for name in names)
        yield Finding("versions", "ok", text)


def unmet_requirements(package: str, extras: Sequence[str]) -> list[str]:
    """Return the installed packages whose versions do not meet the requirements of `package`.

    Args:
        extras: check installed packages of these extras.
    """
    unmet = []
    for text in importlib.metadata.requires(package) or ():
        requirement = Requirement(text)
        environments = [{"extra": extra} for extra in extras or ("",)]
        if requirement.marker and not any(map(requirement.marker.evaluate, environments)):
            continue
        installed = package_version(requirement.name)
        if not installed:
            unmet += [] if extras else [f"{requirement.name} is not installed"]
        elif not requirement.specifier.contains(installed, prereleases=True):
            unmet.append(f"{requirement.name} {installed}, but {package} needs {requirement.specifier}")
    return sorted(set(unmet))


def check_devices() -> Iterator[Finding]:
    """Check the accelerators in a separate process: the driver, the plugin, and the devices that jax sees.

    If another process holds a TPU, jax waits or aborts, which this process survives.
    """
    gpus = nvidia_gpus()
    plugin = next((name for name in DRIVERS if package_version(name)), "")
    if gpus and not plugin:
        yield Finding("devices", "fix", f"{gpus[0][0]}, but jax has no GPU plugin: {_plugin_fix(gpus)}")
        return
    if gpus and int(gpus[0][1].partition(".")[0]) < DRIVERS[plugin]:
        fix = f"driver {gpus[0][1]} is too old for {plugin}: {DRIVERS[plugin]} or newer"
        yield Finding("driver", "fix", fix + ("; or install jax[cuda12]" if "13" in plugin else ""))
    elif gpus:
        yield Finding("driver", "ok", f"NVIDIA {gpus[0][1]}")
    found = open_in_process()
    if isinstance(found, str):
        yield Finding("devices", "fix", _unopened(found, bool(gpus) or has_tpu()))
        return
    yield from describe_devices(found, gpus)
    if found[0]["platform"] == "cpu":
        yield from check_huge_pages()


@functools.cache
def open_in_process() -> list[dict[str, Any]] | str:
    """Return platform, kind and memory of the devices that jax sees, or why it cannot open them."""
    done = run_command_line([sys.executable, "-c", DEVICES])
    if isinstance(done, str) or done.returncode:
        return done if isinstance(done, str) else (done.stderr.strip().splitlines() or ["no message"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def seen_devices(processes: int) -> list[SeenDevice]:
    """Return the devices of a run of so many processes that each have this machine's devices."""
    found = open_in_process()
    local = [] if isinstance(found, str) else [device["platform"] for device in found]
    return [
        SeenDevice(process * len(local) + i, process, platform)
        for process in range(processes)
        for i, platform in enumerate(local)
    ]


def _unopened(reason: str, present: bool) -> str:
    """Return why jax has no devices, and the fix.

    Args:
        present: whether this machine has an accelerator.
    """
    if (platforms := os.environ.get("JAX_PLATFORMS")) and not present:
        from jaxrl_llm.host.devices import no_devices  # imports jax

        return no_devices(platforms, reason)
    fix = "another process may hold the devices (fuser -v /dev/accel* /dev/vfio/* /dev/nvidia*)"
    return f"jax cannot open them ({reason}): {fix}"


def describe_devices(devices: list[dict], gpus: list[tuple[str, str, int]]) -> Iterator[Finding]:
    """Yield what jax sees: devices, memory that other programs hold, and versions that are slow on them."""
    first = devices[0]
    memory = f", {first['memory'] / GIB:.0f} GiB each for jax" if first["memory"] else ""
    text = f"{len(devices)} x {first['kind']}{memory}"
    if first["platform"] == "cpu" and (gpus or has_tpu()):
        yield Finding("devices", "fix", f"jax does not see the accelerator: {_plugin_fix(gpus)}")
    elif first["platform"] == "cpu":
        yield Finding("devices", "note", f"{text}: no accelerator; for small models and tests")
    else:
        yield Finding("devices", "ok", text)
    held = max((used for _, _, used in gpus), default=0)
    if held > 1024:
        yield Finding("devices", "note", f"other programs hold {held} MiB of a GPU's memory: nvidia-smi")
    hopper = any(name in first["kind"] for name in ("H100", "H200", "GH200"))
    if hopper and Version(package_version("jax")) >= Version("0.12"):
        slow = "jax 0.12 compiles the Hopper kernels without register reallocation"
        yield Finding("kernels", "note", f"{slow}: pip install 'jax[cuda13]<0.12' (docs/kernels.md)")


def check_huge_pages() -> Iterator[Finding]:
    """Note that arrays on a CPU have small pages: up to a quarter of the processor time of a step."""
    if huge_pages.are_missing():
        fix = f"train, generate, score and chat ask; for others, export GLIBC_TUNABLES={huge_pages.SETTING}"
        yield Finding("huge pages", "note", f"the system gives them on request, for faster steps: {fix}")


def _plugin_fix(gpus: list) -> str:
    return f"pip install 'jaxrl-llm[{'cuda' if gpus else 'tpu'}]', and unset JAX_PLATFORMS"


def has_tpu() -> bool:
    """Return whether this machine has a TPU: VFIO devices from v5e on, /dev/accel before."""
    return has_devices(TPU_DEVICES)


def nvidia_gpus() -> list[tuple[str, str, int]]:
    """Return (name, driver version, MiB in use) of each NVIDIA GPU."""
    program = shutil.which("nvidia-smi")
    query = ["--query-gpu=name,driver_version,memory.used", "--format=csv,noheader,nounits"]
    done = run_command_line([program, *query]) if program else ""
    if isinstance(done, str) or done.returncode:
        return []
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    return [(name, driver, int(used)) for name, driver, used in rows if used.isdigit()]


def run_command_line(command: list[str]) -> subprocess.CompletedProcess | str:
    """Return the finished process, or the reason for its failure."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT:g} s"
    except OSError as error:
        return str(error)
