"""The devices of the platforms that JAX_PLATFORMS names, and the memory of this host."""

from __future__ import annotations

import platform
import zlib
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.errors import UserError

EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}
"""Platform -> extra of jaxrl-llm with jax's plugin for it."""


def open_devices(platform: str | None = None) -> list[jax.Device]:
    """Return the devices of all processes, opened if they are not yet.

    Args:
        platform: None = JAX's default.

    Raises:
        UserError: jax cannot open a platform that JAX_PLATFORMS names.
    """
    try:
        return jax.devices(platform)
    except (RuntimeError, AssertionError) as error:  # the second: cuda without an NVIDIA GPU
        if not jax.config.jax_platforms:
            raise
        raise UserError(no_devices(jax.config.jax_platforms, str(error))) from error


def no_devices(platforms: str, reason: str) -> str:
    """Return the message that jax cannot open the platforms of JAX_PLATFORMS, with the fix.

    Args:
        reason: jax's message; "" or its AssertionError means that no NVIDIA GPU is visible.
    """
    reason = reason.removeprefix("RuntimeError: ").partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    if reason in ("", "AssertionError"):
        reason = "no NVIDIA GPU is visible"
    extra = next((EXTRAS[name] for name in platforms.split(",") if name in EXTRAS), "")
    install = f"pip install 'jaxrl-llm[{extra}]', or " if extra else ""
    return f"JAX_PLATFORMS={platforms}: jax finds no such device ({reason}): {install}unset JAX_PLATFORMS"


MEMINFO = Path("/proc/meminfo")
CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Files of the limit and the use of a container below CGROUP_ROOT, version 2 and 1."""
CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Return the bytes that a process may still take: of the machine, or of its container if that is less.

    None if the system does not report it.
    """
    free = [_container_bytes(CGROUP_ROOT / limit, CGROUP_ROOT / used) for limit, used in CGROUPS]
    if MEMINFO.is_file():
        lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines() if ":" in line)
        free.append(1024 * int(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else None)
    return min((x for x in free if x is not None), default=None)


def check_host_memory(needed: int, setting: str, fix: str) -> None:
    """Refuse arrays that do not fit the memory of a host. A collective.

    Args:
        needed: bytes of this process; the bytes of other processes on the host are added.
        setting: the setting that needs them, such as "--optim.offload True".

    Raises:
        UserError: on every process, if the arrays do not fit on some host; the message has the bytes.
    """
    free = available_bytes()
    host_id = zlib.crc32(platform.node().encode()) >> 1
    own = np.array([host_id, needed >> 20, -1 if free is None else free >> 20], np.int32)  # MiB
    rows = np.atleast_2d(multihost_utils.process_allgather(own) if jax.process_count() > 1 else own)
    for host in np.unique(rows[:, 0]):
        processes = rows[rows[:, 0] == host]
        total, known = int(processes[:, 1].sum()), processes[processes[:, 2] >= 0, 2]
        if len(known) and total > known.min():
            raise UserError(
                f"{setting} needs {total / 1024:,.1f} GiB of host memory for {len(processes)} process"
                f"{'es' * (len(processes) > 1)} of a host, where {known.min() / 1024:,.1f} GiB are free. "
                f"{fix}"
            )


def _container_bytes(limit: Path, used: Path) -> int | None:
    """Return the bytes that a container may still take, None without a limit."""
    if not (limit.is_file() and used.is_file()) or not limit.read_text().strip().isdigit():
        return None
    stat = limit.with_name("memory.stat")
    words = stat.read_text().split() if stat.is_file() else []
    cached = int(words[words.index("inactive_file") + 1]) if "inactive_file" in words else 0  # is given back
    return max(int(limit.read_text()) - int(used.read_text()) + cached, 0)
