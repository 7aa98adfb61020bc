"""Huge pages for arrays in main memory: with them, steps on a CPU are up to 1.3 times as fast.

If the system gives huge pages only on request, the C library's allocator requests them if GLIBC_TUNABLES says
so when the process starts. Imports only the standard library, since commands check before they import jax.
"""

from __future__ import annotations

import glob
import os
import sys
from pathlib import Path

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SETTING = "glibc.malloc.hugetlb=1"
TPU_DEVICES = ("/dev/accel*", "/dev/vfio/[0-9]*")
GPU_DEVICES = ("/dev/nvidia[0-9]*",)


def are_missing() -> bool:
    """Return whether the system gives huge pages on request, and the allocator does not ask.

    A setting of the user, such as `glibc.malloc.hugetlb=0` for no huge pages, is kept.
    """
    asks = "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", "")
    return not asks and ENABLED.exists() and "[madvise]" in ENABLED.read_text()


def restart_with_them() -> None:
    """Start this command again, as the same process, if it computes on the CPU and lacks huge pages."""
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or not has_devices(TPU_DEVICES + GPU_DEVICES)
    if not on_cpu or not sys.executable or not are_missing():
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    environment = {**os.environ, "GLIBC_TUNABLES": ":".join(filter(None, (tunables, SETTING)))}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def has_devices(patterns: tuple[str, ...]) -> bool:
    """Return whether the system has a device file of one of these patterns."""
    return any(map(glob.glob, patterns))
