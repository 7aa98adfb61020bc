"""One program through the compiler: the memory it takes, what its devices say to each other."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm.plan.collectives import Traffic, collectives
from jaxrl_llm.sharding.rules import bytes_per_device
from jaxrl_llm.structs import Program

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
REFUSED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"),
    re.compile(r"\(?([\d.]+)([KMGT]?)\)? exceeds available HBM"),
    re.compile(r"allocate ([\d.]+)([KMGT]?)i?B"),
)


class Compiled(NamedTuple):
    """What the compiler says of one call; bytes are those of each device."""

    arguments: float  # with the padding of the device's layouts
    outputs: float  # that are not written over an argument
    temporary: float  # activations and everything else between arguments and outputs
    traffic: dict[str, Traffic]
    seconds: float  # of compilation
    refused: str = ""  # the compiler's words, where the program is too large for the device by itself


def compile_call(call: Program, mesh: Mesh, platform: str) -> Compiled:
    """Compile for the devices of `mesh`, as a run on them would.

    Args:
        platform: "tpu", "cuda" or "cpu".
    """
    start = time.perf_counter()
    arguments = float(bytes_per_device(call.args))
    try:
        with jax.set_mesh(mesh):
            traced = call.fn.trace(*call.args, **call.static)
            compiled = traced.lower(lowering_platforms=(platform,)).compile()
    except jax.errors.JaxRuntimeError as error:
        if (needed := overflow(str(error))) is None:
            raise
        if "temporaries" in str(error):
            needed += arguments
        words = str(error).splitlines()[0]
        return Compiled(arguments, 0.0, needed - arguments, {}, time.perf_counter() - start, words)
    memory = compiled.memory_analysis()
    return Compiled(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        collectives(compiled.as_text(), mesh.size),
        time.perf_counter() - start,
    )


def overflow(message: str) -> float | None:
    """Bytes that a program which the compiler refuses would need; None if it is another error."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    for pattern in REFUSED:
        if found := pattern.search(message):
            return float(found[1]) * UNITS[found[2]]
    return None
