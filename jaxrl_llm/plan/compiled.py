"""Compilation for devices that this machine need not have: memory, and the work that the HLO text shows."""

from __future__ import annotations

import itertools
import math
import operator
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_kernels.chips import CHIPS, Chip
from jaxrl_kernels.topology import gpu_devices, missing_compiler, tpu_devices
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.extensions import package_version
from jaxrl_llm.host.devices import open_devices
from jaxrl_llm.plan.hlo import (
    NO_HINTS,
    Computation,
    Execution,
    Hints,
    Instruction,
    Module,
    executions,
    operand_arrays,
    parse,
)
from jaxrl_llm.plan.topology import Topology
from jaxrl_llm.plan.work import NO_WORK, ProgramWork, computes, count_work
from jaxrl_llm.rollout.servers.launch import gpu_mem_fraction
from jaxrl_llm.sharding.compile import Program
from jaxrl_llm.sharding.rules import HOST, bytes_per_device

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
BY_HOSTS = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
"""Attribute of a transfer between TPU slices, with its kind, such as ALL_REDUCE."""


class CollectiveStats(NamedTuple):
    """The collectives of one kind, of one call of a program."""

    count: float
    bytes: float  # sent by each device
    across: float = 0.0  # of them between slices


class SynchronousCollective(NamedTuple):
    """Collectives of one kind and operation in the loops of a program that no computation overlaps."""

    kind: str
    source: str  # JAX's name of the operation
    count: float
    bytes: float  # sent by each device


class _Collective(NamedTuple):
    """A collective with all instructions that are parts of it."""

    kind: str
    source: str
    stats: CollectiveStats
    in_loop: bool
    is_asynchronous: bool = False


def count_collectives(
    module: Module, devices: int, hints: Hints = NO_HINTS, *, slices: Sequence[int] = ()
) -> dict[str, CollectiveStats]:
    """Count collectives by kind, times the trip counts of their loops.

    Bytes are the minimum that a device sends in a ring: (n - 1) shards of an all-gather's input, (n - 1) / n
    of the input of a reduce-scatter or all-to-all, 2 (n - 1) / n of an all-reduce's input, the input of a
    permute. Between slices they are the minimum of a collective in two stages, first within each slice.

    Args:
        devices: number of devices, for replica groups that the text omits.
        slices: number of the slice of each device; () = all are in one.
    """
    return _totals(_collectives(module, devices, hints, slices=slices), lambda one: one.kind)


def synchronous_collectives(
    module: Module, devices: int, hints: Hints = NO_HINTS
) -> list[SynchronousCollective]:
    """Return the collectives within loops that the devices wait for, most bytes first.

    An asynchronous one is a pair of start and done with matrix products or kernels between them, or on a TPU
    fused with the computations that it overlaps with.
    """
    every = _collectives(module, devices, hints)
    awaited = [one for one in every if one.in_loop and not one.is_asynchronous and one.stats.bytes]
    totals = _totals(awaited, lambda one: (one.kind, one.source))
    by_bytes = sorted(totals.items(), key=lambda item: -item[1].bytes)
    return [SynchronousCollective(*key, stats.count, stats.bytes) for key, stats in by_bytes]


def _totals(collectives: list[_Collective], key: Callable[[_Collective], Any]) -> dict[Any, CollectiveStats]:
    """Return key -> the sums of the collectives that have it."""
    totals: dict[Any, CollectiveStats] = {}
    for one in collectives:
        old = totals.get(key(one), CollectiveStats(0, 0))
        totals[key(one)] = CollectiveStats(*map(operator.add, old, one.stats))
    return totals


def _collectives(
    module: Module, devices: int, hints: Hints, *, slices: Sequence[int] = ()
) -> list[_Collective]:
    """Return every collective once: one of a TPU is repeated in each fusion that it overlaps with."""
    found: dict[tuple[str, str], _Collective] = {}
    for execution in executions(module, hints):
        line, times = execution.line, execution.times
        kind, groups = _exchange(line, devices, slices)
        if kind not in KINDS:
            continue
        if kind == "all-reduce" and "all-reduce-scatter" in execution.computation:
            kind = "reduce-scatter"
        # Bytes of the operands, by the groups that exchange them.
        key = kind, _place(kind, execution)
        computation = module.computations[execution.computation]
        operands = sum(array.bytes for arrays in operand_arrays(line, computation) for array in arrays)
        sent = times * _bytes_sent(kind, operands, len(groups[0]))
        across = times * _bytes_across(kind, operands, groups, slices) if slices else 0.0
        # Of repetitions, the most frequent one counts.
        same = found.get(key)
        if same is None or times > same.stats.count:
            stats = CollectiveStats(times, sent, across)
            found[key] = _Collective(kind, line.source, stats, execution.in_loop)
        overlapped = _is_asynchronous(execution, module) or (same is not None and same.is_asynchronous)
        found[key] = found[key]._replace(is_asynchronous=overlapped)
    return list(found.values())


def _exchange(line: Instruction, devices: int, slices: Sequence[int]) -> tuple[str, list[list[int]]]:
    """Return the kind of an instruction, and the groups of devices that exchange data if it is a collective.

    Between TPU slices the hosts send: the part of each device to its peers in the other slices.
    """
    if line.op == "send" and slices and (match := BY_HOSTS.search(line.rest)):
        kind = match[1].lower().replace("_", "-")
        peers = [slices.index(number) for number in sorted(set(slices))]
        return kind if kind in KINDS else "collective-permute", [peers]
    return line.op.removesuffix("-start"), replica_groups(line.rest, devices)


def _place(kind: str, execution: Execution) -> str:
    """Return a key that distinguishes collectives of a kind: repetitions in fusions share a channel.

    A reduce-scatter is not repeated; reduce-scatters of `shard_map` share a channel too.
    """
    line, caller = execution.line, execution.caller
    channel = re.search(r"channel_id=(\d+)", line.rest)
    if not channel or kind == "reduce-scatter" or caller is None or caller.op != "fusion":
        return f"{execution.computation}/{line.name}"
    return f"{channel[1]} {[(array.dtype, array.dims) for array in line.arrays]}"


def _is_asynchronous(execution: Execution, module: Module) -> bool:
    line, caller = execution.line, execution.caller
    if line.op.endswith("-start"):
        return _is_overlapped(line, module.computations[execution.computation], module)
    if caller is None:
        return False
    if caller.op in ("async-start", "call-start"):
        home = next(body for body in module.computations.values() if caller.name in body)
        return _is_overlapped(caller, home, module)
    others = module.computations[execution.computation].values()
    return caller.op == "fusion" and any("AsyncCollective" in other.rest for other in others)


def _is_overlapped(start: Instruction, computation: Computation, module: Module) -> bool:
    """Return whether products or kernels are scheduled between the start of a collective and its end."""
    if '"is_sync":true' in start.rest:
        return False
    lines = list(computation.values())
    parts, overlapped = {start.name}, False
    for line in lines[lines.index(start) + 1 :]:
        if parts & set(line.operands):
            if line.op.endswith("-done"):
                return overlapped
            parts.add(line.name)
            if line.op == "call-update":  # a SparseCore gets its operands here
                overlapped = False
        overlapped = overlapped or computes(line, module)
    return True  # its end is in the next iteration of a loop


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Parse the groups of devices that exchange data; a permute's pairs are groups of two.

    Args:
        devices: number of devices, which are one group if the text has none.
    """
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", attributes):
        return [list(map(int, group.split(","))) for group in re.findall(r"\{([\d, ]+)\}", match[1])]
    numbers = lambda text: [int(number) for number in text.split(",")]
    # [groups, size]<=[dims]T(order): numbers 0, 1, ... in these dims, transposed.
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        grid = np.arange(devices).reshape(numbers(match[2]))
        return grid.transpose(numbers(match[3]) if match[3] else None).reshape(numbers(match[1])).tolist()
    # mesh['x'=2,'y'=4] {'y':(1)2}: whole axes, or parts of them: (size of the parts before it)its size.
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        parts = [
            (name, int(before or 1), int(size or sizes[name]))
            for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[2])
        ]
        return _groups_of_axes(sizes, parts)
    return [list(range(devices))]


def _groups_of_axes(sizes: Mapping[str, int], parts: Sequence[tuple[str, int, int]]) -> list[list[int]]:
    """Return the groups along parts (axis, size of the parts before it, its size) of mesh axes."""
    dims, within = [], []
    for name, size in sizes.items():
        own = [(before, before * length) for axis, before, length in parts if axis == name]
        cuts = sorted({1, size, *(cut for bounds in own for cut in bounds)})
        for start, end in itertools.pairwise(cuts):
            within += [len(dims)] * any(first <= start and end <= last for first, last in own)
            dims.append(end // start)
    others = [dim for dim in range(len(dims)) if dim not in within]
    count = math.prod(dims[dim] for dim in within)
    return np.arange(math.prod(dims)).reshape(dims).transpose(*others, *within).reshape(-1, count).tolist()


def _bytes_sent(kind: str, operands: float, group: int) -> float:
    if kind in ("collective-permute", "collective-broadcast"):
        return operands
    if kind == "all-gather":
        return operands * (group - 1)
    return operands * (group - 1) / group * (2 if kind == "all-reduce" else 1)


def _bytes_across(kind: str, operands: float, groups: list[list[int]], slices: Sequence[int]) -> float:
    """Return the bytes that a device sends to other slices, after a stage within its slice."""
    group = max(groups, key=lambda group: len({slices[device] for device in group}))
    count = len({slices[device] for device in group})
    if count == 1:
        return 0.0
    if kind in ("all-reduce", "reduce-scatter"):  # of the part that the first stage leaves it
        operands /= len(group) / count
    return _bytes_sent(kind, operands, count)


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
OUT_OF_MEMORY = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"),
    re.compile(r"\(?([\d.]+)([KMGT]?)\)? exceeds available HBM"),
    re.compile(r"allocate ([\d.]+)([KMGT]?)i?B"),
)


class CompiledStats(NamedTuple):
    """The compiler's report on one call of a program, with bytes per device."""

    arguments: float  # with the padding of the device's memory layouts
    outputs: float  # that do not alias a donated argument
    temporary: float  # activations and everything else between arguments and outputs
    collectives: dict[str, CollectiveStats]
    seconds: float  # of compilation
    host: float = 0.0  # temporary bytes in the memory of the host: offloaded activations
    error: str = ""  # the compiler's message, where the program alone is too large for the device
    work: ProgramWork = NO_WORK
    synchronous: Sequence[SynchronousCollective] = ()  # in loops, most bytes first


def compile_program(
    program: Program, mesh: Mesh, platform: str, hints: Hints = NO_HINTS, *, slices: Sequence[int] = ()
) -> CompiledStats:
    """Compile a program ahead of time for the devices of `mesh`.

    Args:
        platform: "tpu", "cuda" or "cpu".
        hints: of the work, which the text of the program does not show in full.
        slices: of `count_collectives`.
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
        return CompiledStats(arguments, 0.0, needed - arguments, {}, seconds=seconds, error=message)
    # Memory by the compiler's analysis; work by the text of the program.
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    if not memory.host_argument_size_in_bytes:  # a CPU counts them as the device's
        arguments -= bytes_per_device(program.args, HOST)
    module = parse(compiled.as_text())
    counts = count_collectives(module, mesh.size, hints, slices=slices)
    return CompiledStats(
        arguments,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        counts,
        seconds=time.perf_counter() - start,
        host=memory.host_temp_size_in_bytes,
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


class CompileTarget(NamedTuple):
    """Target devices of a compilation."""

    topology: Topology
    devices: list[Any]
    memory: float  # bytes of each device that a run may use
    chip: Chip | None  # None = unknown
    compiler: str  # name and version


def open_target(topology: Topology) -> CompileTarget:
    """Return the devices of a topology. Must run before any other call initialises jax's devices.

    Raises:
        ConfigError: its compiler is not installed; names the package to install.
    """
    if topology.platform == "cpu":
        devices = open_devices("cpu")
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(devices)
        return CompileTarget(topology, devices, memory, None, compiler=_version("jaxlib"))
    if problem := missing_compiler(topology.platform):
        raise ConfigError(
            f"--topology {topology.name}: {problem}; or pip install 'jaxrl-llm[plan]'. The compiler needs no "
            "accelerator."
        )
    chip = CHIPS[topology.kind]
    os.environ["JAX_PLATFORMS"] = "cpu"  # this machine's accelerator is not needed
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # of no use for other machines' programs
    if topology.platform == "cuda":
        devices = gpu_devices(topology.kind, math.prod(topology.shape))
        memory = chip.memory * gpu_mem_fraction(os.environ)
        return CompileTarget(topology, devices, memory, chip, compiler=_version("jax-cuda13-plugin"))
    devices = tpu_devices(topology.kind, topology.shape, slices=topology.slices)
    return CompileTarget(topology, devices, chip.memory, chip, compiler=_version("libtpu"))


def _version(package: str) -> str:
    return f"{package} {package_version(package)}"
