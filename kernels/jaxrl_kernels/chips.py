"""Accelerator generations: limits, memory and bandwidths that the vendors publish, once for all packages."""

from __future__ import annotations

import re
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
    between: float  # bytes/s out of it to other TPU slices or to other hosts of GPUs; 0 = not known
    scratchpad: int  # bytes: vector memory (VMEM) of a TPU core, shared memory of a GPU's thread block
    devices: int  # that one chip shows
    cores: int  # that a chip counts for in the names of slices
    torus_dims: int  # dims of a slice; 0 = GPUs connected by a switch
    source: str


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
_GUIDE = "CUDA programming guide, compute capabilities"
HOPPER_SHARED_MEMORY = 232_448
"""Bytes of opt-in shared memory of a thread block (compute capability 9.0: 228 KiB less 1 KiB reserved)."""
CHIPS = {
    "v4": Chip(
        "TPU v4", 30.75 * GIB, 275e12, 1200e9, 300e9, 0.0, 16 * MIB, 1, 2, 3,
        f"{_DOCS}v4; arXiv 2304.01433, table 4",
    ),
    "v5e": Chip("TPU v5e", 15.75 * GIB, 197e12, 819e9, 200e9, 3.125e9, 128 * MIB, 1, 1, 2, f"{_DOCS}v5e"),
    "v5p": Chip("TPU v5p", 95.73 * GIB, 459e12, 2765e9, 600e9, 6.25e9, 64 * MIB, 1, 2, 3, f"{_DOCS}v5p"),
    "v6e": Chip("TPU v6e", 31.24 * GIB, 918e12, 1638e9, 400e9, 12.5e9, 128 * MIB, 1, 1, 2, f"{_DOCS}v6e"),
    "tpu7x": Chip("TPU7x", 94.74 * GIB, 1153.5e12, 3690e9, 300e9, 0.0, 64 * MIB, 2, 2, 3, f"{_DOCS}tpu7x"),
    "h100": Chip(
        "NVIDIA H100 80GB HBM3", 84_942_979_072, 989.4e12, 3352.32e9, 450e9, 50e9, HOPPER_SHARED_MEMORY,
        1, 1, 0, "NVIDIA H100 data sheet, Hopper tuning guide",
    ),
    "h200": Chip(
        "NVIDIA H200", 150_109_880_320, 989.4e12, 4800e9, 450e9, 50e9, HOPPER_SHARED_MEMORY, 1, 1, 0,
        "NVIDIA H200 data sheet, Hopper tuning guide",
    ),
    "b200": Chip(
        "NVIDIA B200", 191_514_411_008, 2250e12, 7672.32e9, 900e9, 50e9, 232_448, 1, 1, 0,
        f"NVIDIA HGX B200 data sheet; {_GUIDE}",
    ),
    "a100": Chip(
        "NVIDIA A100-SXM4-80GB", 85_100_068_864, 312e12, 2039.04e9, 300e9, 25e9, 166_912, 1, 1, 0,
        f"NVIDIA A100 data sheet; {_GUIDE}",
    ),
    "a100-40": Chip(
        "NVIDIA A100-SXM4-40GB", 42_331_013_120, 312e12, 1555.2e9, 300e9, 25e9, 166_912, 1, 1, 0,
        f"NVIDIA A100 data sheet; {_GUIDE}",
    ),
    "l4": Chip(
        "NVIDIA L4", 22.03 * GIB, 121e12, 300e9, 32e9, 0.0, 101_376, 1, 1, 0,
        f"NVIDIA L4 data sheet; {_GUIDE}",
    ),
    "rtx4090": Chip(
        "NVIDIA GeForce RTX 4090", 23.64 * GIB, 165.2e12, 1008e9, 32e9, 0.0, 101_376, 1, 1, 0,
        f"NVIDIA Ada architecture white paper; {_GUIDE}",
    ),
    "t4": Chip(
        "Tesla T4", 14.56 * GIB, 65e12, 320e9, 16e9, 0.0, 65_536, 1, 1, 0,
        f"NVIDIA T4 data sheet; {_GUIDE}",
    ),
}  # fmt: skip
"""TPU memory is the part of the published 32, 16, 95, 32 and 192 GiB a chip that the compiler grants, as its
error for a larger program reports. Interconnect is half of the published bidirectional figure, of PCIe for
GPUs without NVLink. Between slices a TPU has its share of the data center network's bandwidth; between hosts
a GPU has the network adapter of NVIDIA's DGX: 400 Gbit/s, of an A100 200. GPU memory is the driver's figure,
before XLA takes its share. T4 has no bfloat16 units: its FLOP/s are of float16."""
TPUS = tuple(kind for kind, chip in CHIPS.items() if chip.torus_dims)
GPUS = tuple(kind for kind in CHIPS if kind not in TPUS)


GPUS_PER_HOST = 8


class Multiprocessors(NamedTuple):
    """The streaming multiprocessors of a GPU, as its compiler needs them."""

    capability: tuple[int, int]  # CUDA's compute capability
    count: int
    shared_memory: int  # bytes of each
    threads: int  # of each
    fpus: int  # float32 units of each
    l2_cache: int  # bytes, of all
    clock: float  # GHz, boost


HOPPER_SMS = 132
"""Streaming multiprocessors of an H100 or H200 SXM."""
_HOPPER = Multiprocessors((9, 0), HOPPER_SMS, 228 * 1024, 2048, 128, 50 * MIB, 1.98)
_A100 = Multiprocessors((8, 0), 108, 164 * 1024, 2048, 64, 40 * MIB, 1.41)
MULTIPROCESSORS = {
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": Multiprocessors((10, 0), 148, 228 * 1024, 2048, 128, 132_644_864, 1.965),
    "a100": _A100,
    "a100-40": _A100,
    "l4": Multiprocessors((8, 9), 58, 100 * 1024, 1536, 128, 48 * MIB, 2.04),
    "rtx4090": Multiprocessors((8, 9), 128, 100 * 1024, 1536, 128, 72 * MIB, 2.52),
    "t4": Multiprocessors((7, 5), 40, 64 * 1024, 1024, 64, 4 * MIB, 1.59),
}
"""CUDA programming guide, table of compute capabilities; XLA's descriptions of h100, h200, b200 and a100
(xla/backends/gpu/target_config/specs)."""

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
GPU_GENERATIONS = {
    "Turing": r"T4|RTX 20\d\d|Quadro RTX|TITAN RTX|GTX 16\d\d",
    "Ampere": r"A100|A800|A30|A40|A16|A10G?|A2|RTX A\d+|RTX 30\d\d",
    "Ada": r"L4|L40S?|L20|RTX 40\d\d|RTX \d+ (SFF )?Ada",
    "Hopper": r"H100|H200|H800|H20|GH200",
    "Blackwell": r"B100|B200|B300|GB200|GB300",
}
"""Generation -> words of the `device_kind` of its GPUs, a regular expression; of Blackwell, servers' GPUs."""


def gpu_generation(device_kind: str) -> str | None:
    """Return the key of GPU_GENERATIONS of a `device_kind`, None = unknown."""
    for generation, names in GPU_GENERATIONS.items():
        if re.search(rf"(?<!\w)({names})(?!\w)", device_kind):
            return generation
    return None


def is_hopper(device_kind: str) -> bool:
    """Return whether a GPU of this kind is of the Hopper generation."""
    return gpu_generation(device_kind) == "Hopper"


def has_cudnn_attention(device_kind: str) -> bool:
    """Return whether attention by cuDNN is the choice for a GPU: it has the units, and no kernels of ours."""
    return gpu_generation(device_kind) in ("Ampere", "Ada", "Blackwell")


def lacks_bfloat16(device_kind: str) -> bool:
    """Return whether a GPU multiplies float16 in its matrix units, but not bfloat16."""
    return gpu_generation(device_kind) == "Turing"


def peak_flops(device_kind: str) -> float | None:
    """Return the bfloat16 FLOP/s (float16 on a T4) of a JAX device; None = not known, as of a CPU."""
    chip = CHIPS.get(TPU_KINDS.get(device_kind, ""))
    chip = chip or next((chip for chip in CHIPS.values() if chip.name == device_kind), None)
    return chip.flops if chip else None
