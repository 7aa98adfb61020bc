"""Collectives of a compiled program: bytes that a device sends, and those that nothing overlaps."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import NamedTuple

from jaxrl_llm.plan.hlo import (
    NO_HINTS,
    Computation,
    Execution,
    Hints,
    Instruction,
    Module,
    executions,
    operand_arrays,
)
from jaxrl_llm.plan.work import computes

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip


class CollectiveStats(NamedTuple):
    """The collectives of one kind, of one call of a program."""

    count: float
    bytes: float  # sent by each device


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
    times: float
    sent: float
    in_loop: bool
    is_asynchronous: bool


def count_collectives(module: Module, devices: int, hints: Hints = NO_HINTS) -> dict[str, CollectiveStats]:
    """Count collectives by kind, times the trip counts of their loops.

    Bytes are the least that a device sends in a ring: (n - 1) shards of an all-gather's input, (n - 1) / n of
    the input of a reduce-scatter or all-to-all, twice that of an all-reduce, the input of a permute.

    Args:
        devices: number of devices, for replica groups that the text omits.
    """
    totals: dict[str, CollectiveStats] = {}
    for one in _collectives(module, devices, hints):
        old = totals.get(one.kind, CollectiveStats(0, 0))
        totals[one.kind] = CollectiveStats(old.count + one.times, old.bytes + one.sent)
    return totals


def synchronous_collectives(
    module: Module, devices: int, hints: Hints = NO_HINTS
) -> list[SynchronousCollective]:
    """Return the collectives within loops that the devices wait for, most bytes first.

    An asynchronous one is a pair of start and done with matrix products or kernels between them, or on a TPU
    fused with the computations that it overlaps with.
    """
    totals: dict[tuple[str, str], CollectiveStats] = defaultdict(lambda: CollectiveStats(0, 0))
    for one in _collectives(module, devices, hints):
        if one.in_loop and not one.is_asynchronous and one.sent:
            old = totals[one.kind, one.source]
            totals[one.kind, one.source] = CollectiveStats(old.count + one.times, old.bytes + one.sent)
    by_bytes = sorted(totals.items(), key=lambda item: -item[1].bytes)
    return [SynchronousCollective(*key, *stats) for key, stats in by_bytes]


def _collectives(module: Module, devices: int, hints: Hints) -> list[_Collective]:
    """Return every collective once: one of a TPU is repeated in each fusion that it overlaps with."""
    found: dict[tuple[str, str], _Collective] = {}
    for execution in executions(module, hints):
        line, times = execution.line, execution.times
        kind = line.op.removesuffix("-start")
        if kind not in KINDS:
            continue
        if kind == "all-reduce" and "all-reduce-scatter" in execution.computation:
            kind = "reduce-scatter"
        key = kind, _place(kind, execution)
        computation = module.computations[execution.computation]
        operands = sum(array.bytes for arrays in operand_arrays(line, computation) for array in arrays)
        sent = times * _bytes_sent(kind, operands, _group_size(line.rest, devices))
        same = found.get(key)
        if same is None or times > same.times:
            found[key] = _Collective(kind, line.source, times, sent, execution.in_loop, False)
        overlapped = _is_asynchronous(execution, module) or (same is not None and same.is_asynchronous)
        found[key] = found[key]._replace(is_asynchronous=overlapped)
    return list(found.values())


def _place(kind: str, execution: Execution) -> str:
    """Return what tells a collective from others of its kind: repetitions in fusions share a channel.

    A reduce-scatter is not repeated; those of `shard_map` share a channel, too.
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
            if line.op == "call-update":  # where a SparseCore gets its operands
                overlapped = False
        overlapped = overlapped or computes(line, module)
    return True  # its end is in the next iteration of a loop


def _group_size(attributes: str, devices: int) -> int:
    """Return the number of devices in a replica group."""
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[name]) for name, part in parts)
    return devices


def _bytes_sent(kind: str, operands: float, group: int) -> float:
    if kind in ("collective-permute", "collective-broadcast"):
        return operands
    if kind == "all-gather":
        return operands * (group - 1)
    return operands * (group - 1) / group * (2 if kind == "all-reduce" else 1)
