"""Ahead-of-time compilation of one program: its memory, and the work that its text (HLO) shows."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm.plan.collectives import (
    CollectiveStats,
    SynchronousCollective,
    count_collectives,
    synchronous_collectives,
)
from jaxrl_llm.plan.hlo import NO_HINTS, Hints, parse
from jaxrl_llm.plan.work import NO_WORK, ProgramWork, count_work
from jaxrl_llm.sharding.rules import HOST, bytes_per_device
from jaxrl_llm.structs import Program

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
OUT_OF_MEMORY = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"),
    re.compile(r"\(?([\d.]+)([KMGT]?)\)? exceeds available HBM"),
    re.compile(r"allocate ([\d.]+)([KMGT]?)i?B"),
)


class CompiledStats(NamedTuple):
    """The compiler's report on one call of a program; bytes are those of each device."""

    arguments: float  # with the padding of the device's memory layouts
    outputs: float  # that do not alias a donated argument
    temporary: float  # activations and everything else between arguments and outputs
    collectives: dict[str, CollectiveStats]
    seconds: float  # of compilation
    host: float = 0.0  # temporary bytes in the memory of the host: offloaded activations
    error: str = ""  # the compiler's message, where the program alone is too large for the device
    work: ProgramWork = NO_WORK
    synchronous: Sequence[SynchronousCollective] = ()  # in loops, most bytes first


def compile_program(program: Program, mesh: Mesh, platform: str, hints: Hints = NO_HINTS) -> CompiledStats:
    """Compile a program ahead of time for the devices of `mesh`.

    Args:
        platform: "tpu", "cuda" or "cpu".
        hints: of the work, which the text of the program does not show in full.
    """
    start = time.perf_counter()
    arguments = float(bytes_per_device(program.args))
    try:
        with jax.set_mesh(mesh):
            traced = program.fn.trace(*program.args, **program.static)
            compiled = traced.lower(lowering_platforms=(platform,)).compile()
    except jax.errors.JaxRuntimeError as error:
        if (needed := bytes_needed(str(error))) is None:
            raise
        if "temporaries" in str(error):
            needed += arguments
        message = str(error).splitlines()[0]
        seconds = time.perf_counter() - start
        return CompiledStats(arguments, 0.0, needed - arguments, {}, seconds, error=message)
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    if not memory.host_argument_size_in_bytes:  # a CPU counts them as the device's
        arguments -= bytes_per_device(program.args, HOST)
    module = parse(compiled.as_text())
    counts = count_collectives(module, mesh.size, hints)
    return CompiledStats(
        arguments,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        counts,
        time.perf_counter() - start,
        memory.host_temp_size_in_bytes,
        work=count_work(module, hints)._replace(links=sum(stats.bytes for stats in counts.values())),
        synchronous=synchronous_collectives(module, mesh.size, hints),
    )


def bytes_needed(message: str) -> float | None:
    """Parse the bytes that a program needs from an out-of-memory error; None if it is another error."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    for pattern in OUT_OF_MEMORY:
        if match := pattern.search(message):
            return float(match[1]) * UNITS[match[2]]
    return None
