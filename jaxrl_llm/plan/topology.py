"""Names of topologies. Imports no jax, since the flags of `plan` are checked before it."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from jaxrl_kernels.chips import CHIPS, GPUS, GPUS_PER_HOST, TPUS
from jaxrl_llm.errors import ConfigError

SLICES = {
    2: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    3: "1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16",
}
"""Dims of the torus -> shapes of slices, in chips."""
KNOWN_TOPOLOGIES = (
    "v4-N, v5e-N, v5p-N, v6e-N, tpu7x-N, a shape such as v5e:4x4, several slices such as 2xv5e-256, "
    f"{', '.join(GPUS)}, N of them such as h100x8 or, on hosts of 8, h200x64, or cpu"
)


class Topology(NamedTuple):
    """Parsed name of a topology."""

    name: str
    platform: str  # "tpu", "cuda" or "cpu"
    kind: str  # key of CHIPS; "cpu"
    shape: tuple[int, ...]  # chips, of one slice
    slices: int = 1


def parse_topology(name: str) -> Topology:
    """Parse a topology's name.

    As in Google's names of slices, N is the number of chips of v5e and v6e, of TensorCores (two per chip)
    of v4, v5p and tpu7x. 2xv5e-256 is two slices.

    Raises:
        ConfigError: an unknown name.
    """
    if name == "cpu":
        return Topology(name, "cpu", "cpu", ())
    # GPUs: one host of up to 8, or several hosts of 8.
    if match := re.fullmatch(rf"({'|'.join(GPUS)})(?:x(\d+))?", name):
        count = int(match[2] or 1)
        if not count or (count > GPUS_PER_HOST and count % GPUS_PER_HOST):
            raise ConfigError(
                f"--topology {name}: 1 to 8 GPUs of one host, such as {match[1]}x8, or hosts of 8, such as "
                f"{match[1]}x64."
            )
        return Topology(name, "cuda", match[1], (count,))
    match = re.fullmatch(rf"(?:([1-9]\d*)x)?({'|'.join(TPUS)}|v5litepod)(?:-(\d+)|:(\d+(?:x\d+)+))", name)
    if not match:
        problem = f"{name}: unknown" if name else "is missing"
        raise ConfigError(f"--topology {problem}. Known: {KNOWN_TOPOLOGIES}.")
    # TPUs: slices by number or by shape.
    slices, kind = int(match[1] or 1), match[2].replace("v5litepod", "v5e")
    dims = CHIPS[kind].torus_dims
    shapes = {math.prod(shape): shape for shape in map(_sizes, SLICES[dims].split())}
    if match[4]:
        shape = _sizes(match[4])
        if len(shape) != dims:
            raise ConfigError(f"--topology {name}: a shape of {kind} has {dims} numbers.")
        return Topology(name, "tpu", kind, shape, slices)
    counts = {chips * CHIPS[kind].cores: shape for chips, shape in shapes.items()}
    if int(match[3]) not in counts:
        sizes = ", ".join(f"{kind}-{n}" for n in sorted(counts))
        raise ConfigError(
            f"--topology {name}: no such slice; {sizes}. Another shape: {kind}:AxB[xC], in chips."
        )
    return Topology(name, "tpu", kind, counts[int(match[3])], slices)


def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))
