"""Ahead-of-time compilation of one program: its memory, and its collectives parsed from HLO."""

from __future__ import annotations

import math
import re
import time
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm.sharding.rules import HOST, bytes_per_device
from jaxrl_llm.structs import Program

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
OUT_OF_MEMORY = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"),
    re.compile(r"\(?([\d.]+)([KMGT]?)\)? exceeds available HBM"),
    re.compile(r"allocate ([\d.]+)([KMGT]?)i?B"),
)
COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "token": 0}
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?[\]})]) ([\w\-]+)\((.*)$")
CALLED = re.compile(
    r"\b(?:calls|body|to_apply|branch_computations|called_computations)=\{?(%?[\w.\-]+(?:, *%?[\w.\-]+)*)"
)


class CollectiveStats(NamedTuple):
    """The collectives of one kind, of one call of a program."""

    count: float
    bytes: float  # sent by each device


class CompiledStats(NamedTuple):
    """The compiler's report on one call of a program; bytes are those of each device."""

    arguments: float  # with the padding of the device's memory layouts
    outputs: float  # that do not alias a donated argument
    temporary: float  # activations and everything else between arguments and outputs
    collectives: dict[str, CollectiveStats]
    seconds: float  # of compilation
    host: float = 0.0  # temporary bytes in the memory of the host: offloaded activations
    error: str = ""  # the compiler's message, where the program alone is too large for the device


class Instruction(NamedTuple):
    """A line of HLO."""

    name: str
    shape: str
    op: str
    rest: str  # operands and attributes
    is_root: bool


def compile_program(program: Program, mesh: Mesh, platform: str) -> CompiledStats:
    """Compile a program ahead of time for the devices of `mesh`.

    Args:
        platform: "tpu", "cuda" or "cpu".
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
    return CompiledStats(
        arguments,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        count_collectives(compiled.as_text(), mesh.size),
        time.perf_counter() - start,
        memory.host_temp_size_in_bytes,
    )


def bytes_needed(message: str) -> float | None:
    """Parse the bytes that a program needs from an out-of-memory error; None if it is another error."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    for pattern in OUT_OF_MEMORY:
        if match := pattern.search(message):
            return float(match[1]) * UNITS[match[2]]
    return None


def count_collectives(hlo: str, devices: int) -> dict[str, CollectiveStats]:
    """Count collectives by kind, times the trip counts of their loops; an unknown trip count is 1.

    Bytes are the least that a device sends in a ring: (n - 1) shards of an all-gather's input, (n - 1) / n of
    the input of a reduce-scatter or all-to-all, twice that of an all-reduce, the input of a permute.

    Args:
        hlo: text of the compiled program.
        devices: number of devices, for replica groups that the text omits.
    """
    computations, entry = _parse(hlo)
    counts: dict[tuple[str, str], tuple[float, float]] = {}
    queue = [(entry, 1.0, False)]
    while queue:
        name, times, scatters = queue.pop()
        shapes = {line.name: line.shape for line in computations[name]}
        for line in computations[name]:
            kind = line.op.removesuffix("-start")
            if kind in COLLECTIVES:
                kind = "reduce-scatter" if scatters and kind == "all-reduce" else kind
                channel = re.search(r"channel_id=(\d+)", line.rest)
                # An asynchronous collective of a TPU is repeated in each fusion that it overlaps with.
                key = kind, channel[1] if channel else f"{name}/{line.name}"
                sent = _bytes_sent(kind, _operand_bytes(line, shapes), _group_size(line.rest, devices))
                counts[key] = max(counts.get(key, (0.0, 0.0)), (times, times * sent))
            for called, trips in _calls(line, computations):
                queue.append((called, times * trips, "all-reduce-scatter" in called))
    totals: dict[str, CollectiveStats] = {}
    for (kind, _), (count, sent) in counts.items():
        old = totals.get(kind, CollectiveStats(0, 0))
        totals[kind] = CollectiveStats(old.count + count, old.bytes + sent)
    return totals


def shape_bytes(shape: str) -> float:
    """Return the bytes of an HLO shape such as "(f32[2,3]{1,0}, bf16[4])", without padding."""
    total = 0.0
    for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", re.sub(r"\{[^{}]*\}", "", shape)):
        width = re.search(r"\d+", kind)
        each = BYTES.get(kind) if kind in BYTES else (int(width[0]) / 8 if width else 0)
        total += each * math.prod(int(d.strip("<=")) for d in dims.split(",") if d)
    return total


def _parse(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return the instructions of each computation, and the entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for text in hlo.splitlines():
        if match := COMPUTATION.match(text):
            current = match[2]
            entry = current if match[1] else entry
            computations[current] = []
        elif current and (match := INSTRUCTION.match(text)):
            root, name, shape, op, rest = match.groups()
            computations[current].append(Instruction(name, shape, op, rest, bool(root)))
    return computations, entry


def _calls(line: Instruction, computations: dict[str, list[Instruction]]) -> list[tuple[str, float]]:
    """Return (computation, times) that this instruction runs."""
    names = [name.strip(" %") for names in CALLED.findall(line.rest) for name in names.split(",")]
    trips = _trip_count(line, computations) if line.op == "while" else 1.0
    return [(name, trips) for name in names if name in computations]


def _trip_count(line: Instruction, computations: dict[str, list[Instruction]]) -> float:
    """Return the trip count of a loop, from the compiler's note or its condition `i < constant`; else 1."""
    if match := re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', line.rest):
        return float(match[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line.rest)
    lines = computations.get(condition[1], []) if condition else []
    constants = {i.name: i.rest.split(")")[0] for i in lines if i.op == "constant"}
    for i in lines:
        if i.is_root and i.op == "compare" and "direction=LT" in i.rest:
            limit = i.rest.split(")")[0].split(",")[1].strip().split()[-1].lstrip("%")
            return float(constants.get(limit, 1))
    return 1.0


def _operand_bytes(line: Instruction, shapes: dict[str, str]) -> float:
    """Return the bytes of the instruction's operands."""
    inside, depth = line.rest, 1
    for end, letter in enumerate(inside):
        depth += (letter in "({[") - (letter in ")}]")
        if not depth:
            inside = inside[:end]
            break
    if re.search(r"\b[a-z]\w*\[", inside):  # operands are printed with their shapes
        return shape_bytes(inside)
    return sum(shape_bytes(shapes.get(name.strip(" %"), "")) for name in inside.split(","))


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
