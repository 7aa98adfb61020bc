"""What a program is made for while it is traced: the devices of its mesh, which need not be here."""

from __future__ import annotations

import os

import jax

HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""In the kinds of the GPUs that our GPU kernels are for."""

GENERATIONS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
"""Kind of a TPU, as JAX calls it -> generation."""


def device() -> tuple[str, str]:
    """(platform, kind) of the devices of `jax.set_mesh`, without a mesh those of the process: ("tpu", "TPU v5
    lite"), ("gpu", "NVIDIA H100 80GB HBM3"), ("cpu", "cpu").

    Code that differs between devices asks here, not `jax.default_backend()` or `jax.devices()`: programs are
    also compiled for devices that the process does not have (`python -m jaxrl_llm plan`).
    """
    found = _device()
    return "gpu" if found.platform in ("cuda", "rocm") else found.platform, found.device_kind


def kernels() -> tuple[str | None, str]:
    """(which of our kernels there are for the devices that are traced for, why); None = plain JAX.

    JAXRL_KERNELS=jax in the environment means plain JAX everywhere: to tell a fault of a kernel from another.

    Raises:
        ValueError: JAXRL_KERNELS is neither "auto" nor "jax".
    """
    asked = os.environ.get("JAXRL_KERNELS", "auto")
    if asked not in ("auto", "jax"):
        raise ValueError(f'JAXRL_KERNELS={asked}: must be "auto" or "jax" (plain JAX everywhere)')
    platform, kind = device()
    if asked == "jax":
        return None, f"{kind}: plain JAX, as JAXRL_KERNELS says"
    if platform == "tpu":
        return "pallas_tpu", f"{kind}: Pallas kernels for TPU"
    if is_hopper(kind):
        return "pallas_gpu", f"{kind}: Pallas kernels for Hopper"
    return None, f"{kind}: plain JAX, there are no kernels for it"


def generation() -> str:
    """Of the TPU that is traced for; the one with the least memory where it is none we know."""
    return GENERATIONS.get(device()[1], "v4")


def cores() -> int:
    """Of one device: two on TPU v4 and v5p."""
    return getattr(_device(), "num_cores", None) or 1


def is_hopper(kind: str) -> bool:
    """Whether our GPU kernels are for devices of this kind."""
    return any(name in kind for name in HOPPER)


def _device():
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
