"""Ahead-of-time compilation for accelerators that this machine does not have: TPU slices and NVIDIA GPUs.

Trace under `jax.sharding.use_abstract_mesh(mesh.abstract_mesh)` (or `jax.set_mesh(mesh)`) of a mesh of these
devices and compile with `.lower(lowering_platforms=("tpu",)).compile()`, "cuda" for GPUs.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from jaxrl_kernels.chips import CHIPS, GPUS, GPUS_PER_HOST, MULTIPROCESSORS

CUDA_PLUGIN, CUDA_COMPILER = "jax_plugins.xla_cuda13", "nvidia.cu13"
"""The packages of the wheels jax-cuda13-plugin, and nvidia-cuda-nvcc, which has ptxas."""
GPU_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {sm.shared_memory}
  shared_memory_per_block_optin: {chip.scratchpad}
  threads_per_core_limit: {sm.threads}
  core_count: {sm.count}
  fpus_per_core: {sm.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.bandwidth:.0f}
  l2_cache_size: {sm.l2_cache}
  clock_rate_ghz: {sm.clock}
  device_memory_size: {chip.memory:.0f}
  cuda_compute_capability {{ {capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{chip.name}"
"""
"""XLA's GpuTargetConfig (xla/backends/gpu/target_config). On a card it can be read with
`jax.lib.xla_client.get_topology_for_devices(jax.devices()).target_config`."""


def missing_compiler(platform: str) -> str | None:
    """Return which wheel is missing to compile for "tpu" or "cuda" and how to install it, or None."""
    wheels = {
        "tpu": (("libtpu",), "libtpu"),
        "cuda": ((CUDA_PLUGIN, CUDA_COMPILER), "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc"),
    }
    packages, install = wheels[platform]
    for package in packages:
        if not _is_installed(package):
            return f"{package} is not installed: pip install {install}"
    return None


def tpu_devices(kind: str, shape: tuple[int, ...], slices: int = 1) -> list[Any]:
    """Return the devices of TPU slices.

    Args:
        kind: generation, a key of CHIPS.
        shape: chips along each dim of a slice.
        slices: number of slices; several have slow links between them.
    """
    cores = math.prod(shape) * CHIPS[kind].cores
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": f"{kind.replace('v5e', 'v5litepod')}-{cores}",  # else it warns
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once
    }
    # v4 and v5p show the two cores of a chip as one device, as TPU VMs do; a single chip counts as one host.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if kind in ("v4", "v5p") else {}
    if set(shape) == {1}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if slices > 1:
        options["num_slices"] = slices
    name = f"{kind}:{'x'.join(map(str, shape))}"
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


def gpu_devices(kind: str, count: int = 1) -> list[Any]:
    """Return `count` GPUs: of one host, or of hosts of 8.

    The process must not have used the CUDA plugin before: XLA reads XLA_FLAGS once.

    Raises:
        ValueError: no such kind.
        RuntimeError: the compiler's wheels are not installed.
    """
    if kind not in GPUS:
        raise ValueError(f"no GPU kind {kind!r}: one of {', '.join(GPUS)}")
    if problem := missing_compiler("cuda"):
        raise RuntimeError(problem)
    root = Path(next(iter(importlib.util.find_spec(CUDA_COMPILER).submodule_search_locations)))
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_gpu_cuda_data_dir" not in flags:
        # Autotuning times candidates on a card.
        added = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={root}"
        os.environ["XLA_FLAGS"] = f"{flags} {added}".strip()
    hosts = max(count // GPUS_PER_HOST, 1)
    target = topologies.get_topology_desc(
        platform="cuda", target_config=gpu_target_config(kind), topology=f"1x{hosts}x{count // hosts}"
    )
    return list(target.devices)


def gpu_target_config(kind: str) -> str:
    """Return the limits of a GPU as XLA's GpuTargetConfig text proto."""
    sm = MULTIPROCESSORS[kind]
    capability = "major: {} minor: {}".format(*sm.capability)
    if sm.capability >= (9, 0):  # wgmma and other instructions of one generation alone
        capability += " feature_extension: ACCELERATED_FEATURES"
    return GPU_TARGET_CONFIG.format(chip=CHIPS[kind], sm=sm, capability=capability)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False
