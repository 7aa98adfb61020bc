"""Accelerator generations: limits, memory and bandwidths that the vendors publish, once for all packages."""

from __future__ import annotations

from typing import NamedTuple

MIB, GIB = 2**20, 2**30
LANES = 128
"""Lanes of a TPU's vector registers: the last dim of arrays in VMEM is padded to a multiple."""


class Chip(NamedTuple):
    """One JAX device: a chip, or one of the two that a chip of tpu7x shows."""

    name: str
    memory: float  # bytes that programs may use
    flops: float  # bfloat16 FLOP/s, dense
    bandwidth: float  # bytes/s of its memory
    interconnect: float  # bytes/s out of it to its neighbours, one direction, all links busy
    scratchpad: int  # bytes: vector memory (VMEM) of a TPU core, shared memory of a GPU's thread block
    devices: int  # that one chip shows
    cores: int  # that a chip counts for in the names of slices
    torus_dims: int  # dims of a slice; 0 = GPUs behind a switch
    source: str


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
HOPPER_SHARED_MEMORY = 232_448
"""Bytes of opt-in shared memory of a thread block (compute capability 9.0: 228 KiB less 1 KiB reserved)."""
CHIPS = {
    "v4": Chip(
        "TPU v4", 30.75 * GIB, 275e12, 1200e9, 300e9, 16 * MIB, 1, 2, 3,
        f"{_DOCS}v4; arXiv 2304.01433, table 4",
    ),
    "v5e": Chip("TPU v5e", 15.75 * GIB, 197e12, 819e9, 200e9, 128 * MIB, 1, 1, 2, f"{_DOCS}v5e"),
    "v5p": Chip("TPU v5p", 95.73 * GIB, 459e12, 2765e9, 600e9, 64 * MIB, 1, 2, 3, f"{_DOCS}v5p"),
    "v6e": Chip("TPU v6e", 31.24 * GIB, 918e12, 1638e9, 400e9, 128 * MIB, 1, 1, 2, f"{_DOCS}v6e"),
    "tpu7x": Chip("TPU7x", 94.74 * GIB, 1153.5e12, 3690e9, 300e9, 64 * MIB, 2, 2, 3, f"{_DOCS}tpu7x"),
    "h100": Chip(
        "NVIDIA H100 80GB HBM3", 84_942_979_072, 989.4e12, 3352.32e9, 450e9, HOPPER_SHARED_MEMORY, 1, 1, 0,
        "NVIDIA H100 data sheet, Hopper tuning guide",
    ),
    "h200": Chip(
        "NVIDIA H200", 150_109_880_320, 989.4e12, 4800e9, 450e9, HOPPER_SHARED_MEMORY, 1, 1, 0,
        "NVIDIA H200 data sheet, Hopper tuning guide",
    ),
}  # fmt: skip
"""TPU memory is what the compiler grants of the published 32, 16, 95, 32 and 192 GiB a chip, as its error for
a larger program reports; interconnect is half of the published bidirectional figure. GPU memory is what the
driver reports, before XLA takes its share of it."""
TPUS = tuple(kind for kind, chip in CHIPS.items() if chip.torus_dims)
GPUS = tuple(kind for kind in CHIPS if kind not in TPUS)

TPU_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
"""`device_kind` of a TPU in JAX -> generation."""
HOPPER_KINDS = ("H100", "H200", "H800", "H20", "GH200")
"""Substrings of the `device_kind` of Hopper GPUs (compute capability 9.0)."""
HOPPER_SMS = 132
"""Streaming multiprocessors of an H100 or H200 SXM."""


def is_hopper(device_kind: str) -> bool:
    """Return whether a GPU of this kind is of the Hopper generation."""
    return any(name in device_kind for name in HOPPER_KINDS)
