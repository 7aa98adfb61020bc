"""What a program is made for while it is traced: the device of its mesh, which need not be here."""

from __future__ import annotations

import jax


def platform() -> str:
    """ "cpu", "tpu" or "gpu": the platform of the mesh of `jax.set_mesh`, without one that of the process.

    Code that differs between platforms asks here, not `jax.default_backend()`: programs are also compiled
    for devices that the process does not have.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    found = jax.default_backend() if device is None else device.platform
    return "gpu" if found in ("cuda", "rocm") else found
