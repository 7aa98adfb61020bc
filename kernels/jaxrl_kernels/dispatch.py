"""Dispatch: the implementations of an operation, and the choice among them for the target devices.

Every operation is a folder of this package. Its `reference.py` defines it; the other modules compute the same
result and are imported on first use, since their dependencies may be missing on other chips. A module may
have `unsupported(*shape) -> str | None`, which returns why it cannot take such operands. Operations that have
no kernel (`linear_divergence`, `batch_invariant`) are called directly.

A program may be compiled for devices that the process does not have (`python -m jaxrl_llm plan`), so code
that differs between devices calls `device()`, not `jax.default_backend()` or `jax.devices()`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax

from jaxrl_kernels.chips import TPU_KINDS, has_cudnn_attention, is_hopper


class Operation(NamedTuple):
    """The implementations of an operation."""

    implementations: tuple[str, ...]
    """Modules of the operation's folder."""
    portable: str
    """The implementation for devices without a kernel: plain JAX, any shape."""
    compiled_on: Mapping[str, str] = {}
    """Platform -> the implementation that XLA compiles to its kernel there."""
    untried: tuple[str, ...] = ()
    """Kernels that "auto" leaves out until a device has run them: interpreters have missed mistakes."""


OPERATIONS = {
    "flash_attention": Operation(
        ("reference", "blockwise", "pallas_tpu", "pallas_gpu", "cudnn"), portable="blockwise"
    ),
    "linear_logprob": Operation(("reference", "chunked", "pallas_tpu", "pallas_gpu"), portable="chunked"),
    "decode_attention": Operation(("reference", "pallas_tpu", "pallas_gpu"), portable="reference"),
    "grouped_matmul": Operation(
        ("reference", "tiled", "ragged_dot", "pallas_gpu"),
        portable="tiled",
        compiled_on={"tpu": "ragged_dot"},
    ),
    "gated_delta": Operation(
        ("reference", "pallas_tpu", "pallas_gpu"), portable="reference", untried=("pallas_gpu",)
    ),
}

NO_KERNELS = "{}: plain JAX, there are no kernels for it"


def choose(operation: str, *shape: Any, implementation: str = "auto") -> tuple[str, str]:
    """Return (implementation, reason) of an operation.

    Args:
        operation: key of OPERATIONS.
        shape: arguments of the operation's `unsupported` functions; for attention (head_dim, dtype, softcap).
        implementation: "auto" = the kernel for the devices of the current mesh, or the portable
            implementation if no kernel supports the devices and the shape.

    Raises:
        ValueError: the named implementation does not exist or does not take the shape; or see
            `kernels_setting`.
    """
    names, portable, compiled_on, untried = OPERATIONS[operation]
    if implementation == "auto":
        kernel, reason = kernel_family()
        if kernel not in names:
            platform, kind = device()
            if platform in compiled_on:
                return compiled_on[platform], f"{kind}: XLA's kernel"
            return portable, reason if kernel is None else NO_KERNELS.format(kind)
        problem = _unsupported(operation, kernel, shape)
        if not problem and kernel in untried and kernels_setting() != "all":
            problem = f"{device()[1]}: plain JAX, its kernel has run on no device; JAXRL_KERNELS=all takes it"
        return (portable, problem) if problem else (kernel, reason)
    if implementation not in names:
        known = ", ".join(("auto", *names))
        raise ValueError(f"{operation}: no implementation {implementation!r}; known: {known}")
    if problem := _unsupported(operation, implementation, shape):
        raise ValueError(f"{operation}: {implementation}: {problem}; use implementation={portable!r}")
    return implementation, "requested"


def load_implementation(operation: str, name: str) -> ModuleType:
    """Import the module of an implementation."""
    return importlib.import_module(f"jaxrl_kernels.{operation}.{name}")


def device() -> tuple[str, str]:
    """Return (platform, kind) of the devices of `jax.set_mesh`, or of the process without a mesh: ("tpu",
    "TPU v5 lite"), ("gpu", "NVIDIA H100 80GB HBM3"), ("cpu", "cpu")."""
    current = _device()
    return "gpu" if current.platform in ("cuda", "rocm") else current.platform, current.device_kind


def kernel_family() -> tuple[str | None, str]:
    """Return (name of the kernels for the devices that are compiled for, reason); None = plain JAX.

    JAXRL_KERNELS=jax in the environment selects plain JAX everywhere, to rule out faults of kernels.

    Raises:
        ValueError: see `kernels_setting`.
    """
    platform, kind = device()
    if kernels_setting() == "jax":
        return None, f"{kind}: plain JAX, as JAXRL_KERNELS says"
    if platform == "tpu":
        return "pallas_tpu", f"{kind}: Pallas kernels for TPU"
    if is_hopper(kind):
        return "pallas_gpu", f"{kind}: Pallas kernels for Hopper"
    if has_cudnn_attention(kind):
        return "cudnn", f"{kind}: cuDNN"
    return None, NO_KERNELS.format(kind)


def kernels_setting() -> str:
    """Return JAXRL_KERNELS of the environment: "auto", "jax" or "all".

    Raises:
        ValueError: it is another word.
    """
    setting = os.environ.get("JAXRL_KERNELS", "auto")
    if setting not in ("auto", "jax", "all"):
        raise ValueError(
            f'JAXRL_KERNELS={setting}: must be "auto", "jax" (plain JAX everywhere) or "all" (also kernels '
            "that have run on no device)"
        )
    return setting


def tpu_generation() -> str:
    """Return the target TPU's key of CHIPS; "v4", which has the least memory, if unknown."""
    return TPU_KINDS.get(device()[1], "v4")


def num_cores() -> int:
    """Return the cores of one device: two on TPU v4 and v5p."""
    return getattr(_device(), "num_cores", None) or 1


def _device():
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def _unsupported(operation: str, name: str, shape: tuple) -> str | None:
    check = getattr(load_implementation(operation, name), "unsupported", None)
    return check(*shape) if check else None
