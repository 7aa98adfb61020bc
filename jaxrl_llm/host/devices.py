"""The devices of the platforms that JAX_PLATFORMS names."""

from __future__ import annotations

import jax

from jaxrl_llm.errors import UserError

EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}
"""Platform -> extra of jaxrl-llm with jax's plugin for it."""


def open_devices(platform: str | None = None) -> list[jax.Device]:
    """Return the devices of all processes, opened if they are not yet.

    Args:
        platform: None = the first one that there is.

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
    """Return that jax cannot open the platforms of JAX_PLATFORMS, and the fix.

    Args:
        reason: jax's message; "" or its AssertionError: there is no NVIDIA GPU.
    """
    reason = reason.removeprefix("RuntimeError: ").partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    if reason in ("", "AssertionError"):
        reason = "no NVIDIA GPU is visible"
    extra = next((EXTRAS[name] for name in platforms.split(",") if name in EXTRAS), "")
    install = f"pip install 'jaxrl-llm[{extra}]', or " if extra else ""
    return f"JAX_PLATFORMS={platforms}: jax finds no such device ({reason}): {install}unset JAX_PLATFORMS"
