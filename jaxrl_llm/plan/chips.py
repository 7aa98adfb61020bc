"""What a device has and can do at most: the figures that vendors publish."""

from __future__ import annotations

from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """One jax device: a chip, or one of the two that a chip of tpu7x shows."""

    name: str
    memory: float  # bytes that programs may use
    flops: float  # bfloat16 FLOP/s, dense
    bandwidth: float  # bytes/s of its memory
    interconnect: float  # bytes/s out of it to its neighbours, one direction, all links busy
    devices: int  # that one chip shows
    cores: int  # that a chip counts for in the names of slices
    source: str


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
CHIPS = {
    "v4": Chip("TPU v4", 30.75 * GIB, 275e12, 1200e9, 300e9, 1, 2, f"{_DOCS}v4; arXiv 2304.01433, table 4"),
    "v5e": Chip("TPU v5e", 15.75 * GIB, 197e12, 819e9, 200e9, 1, 1, f"{_DOCS}v5e"),
    "v5p": Chip("TPU v5p", 95.73 * GIB, 459e12, 2765e9, 600e9, 1, 2, f"{_DOCS}v5p"),
    "v6e": Chip("TPU v6e", 31.24 * GIB, 918e12, 1638e9, 400e9, 1, 1, f"{_DOCS}v6e"),
    "tpu7x": Chip("TPU7x", 94.74 * GIB, 1153.5e12, 3690e9, 300e9, 2, 2, f"{_DOCS}tpu7x"),
    "h100": Chip("H100 SXM", 84_942_979_072, 989.4e12, 3350e9, 450e9, 1, 1, "NVIDIA H100 data sheet"),
    "h200": Chip("H200 SXM", 150_109_880_320, 989.4e12, 4800e9, 450e9, 1, 1, "NVIDIA H200 data sheet"),
}
"""TPU memory is what the compiler grants of the published 32, 16, 95, 32 and 192 GiB a chip (it says so when
a program needs more); interconnect is half of the published bidirectional figure. GPU memory is what the
driver reports; `target.py` says how much of it XLA may take."""
