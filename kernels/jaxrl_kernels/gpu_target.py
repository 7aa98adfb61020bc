"""NVIDIA GPUs described to XLA's compiler, so that programs compile for them where there is none.

What `jax.experimental.topologies` asks for is a GpuTargetConfig: the limits of a card, which NVIDIA publishes
(Hopper tuning guide, H100 and H200 data sheets). On a card it can be read with
`jax.lib.xla_client.get_topology_for_devices(jax.devices()).target_config`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from jax.experimental import topologies

SHARED_MEMORY = 232448
"""Bytes of shared memory that one block of a Hopper GPU may have (228 KiB less 1 KiB of the system's)."""

HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: {shared}
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{name}"
"""
KINDS = {
    "h100": HOPPER.format(
        shared=SHARED_MEMORY, bandwidth=3352320000000, memory=84942979072, name="NVIDIA H100 80GB HBM3"
    ),
    "h200": HOPPER.format(
        shared=SHARED_MEMORY, bandwidth=4800000000000, memory=150109880320, name="NVIDIA H200"
    ),
}
"""Memory in bytes as the driver reports it, bandwidth in bytes a second."""
COMPILER = "nvidia.cu13"
"""The package of the wheel nvidia-cuda-nvcc, which has ptxas."""


def unavailable() -> str | None:
    """Why programs cannot be compiled for a GPU here (a wheel that is missing), or None if they can."""
    for package in ("jax_plugins.xla_cuda13", COMPILER):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return (
                f"{package} is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc"
            )
    return None


def gpu_topology(kind: str = "h100", count: int = 1) -> Any:
    """`count` GPUs of a `kind` on one host, of which there need be none; its `devices` make a mesh.

    Trace under `jax.sharding.use_abstract_mesh(mesh.abstract_mesh)` and compile with
    `.lower(lowering_platforms=("cuda",)).compile()`. Must be the first that the process asks of the CUDA
    plugin: XLA_FLAGS is read once.

    Raises:
        ValueError: no such kind.
        RuntimeError: the compiler's wheels are not installed.
    """
    if kind not in KINDS:
        raise ValueError(f"no GPU kind {kind!r}: one of {', '.join(KINDS)}")
    if why := unavailable():
        raise RuntimeError(why)
    root = Path(next(iter(importlib.util.find_spec(COMPILER).submodule_search_locations)))
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_gpu_cuda_data_dir" not in flags:
        # Autotuning times candidates on a card.
        added = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={root}"
        os.environ["XLA_FLAGS"] = f"{flags} {added}".strip()
    return topologies.get_topology_desc(platform="cuda", target_config=KINDS[kind], topology=f"1x1x{count}")
