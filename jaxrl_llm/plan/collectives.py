"""What devices say to each other, read from a compiled program's text (HLO)."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "token": 0}
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?[\]})]) ([\w\-]+)\((.*)$")
CALLED = re.compile(
    r"\b(?:calls|body|to_apply|branch_computations|called_computations)=\{?(%?[\w.\-]+(?:, *%?[\w.\-]+)*)"
)


class Traffic(NamedTuple):
    """The collectives of one kind, of one call of a program."""

    count: float
    bytes: float  # that each device sends


class Instruction(NamedTuple):
    """A line of HLO."""

    name: str
    shape: str
    op: str
    rest: str  # operands and attributes
    is_root: bool


def collectives(hlo: str, devices: int) -> dict[str, Traffic]:
    """Collectives by kind, times the trips of their loops; a loop of unknown length counts once.

    The bytes are those that a device sends where every link carries the least that it can: (n - 1) parts of
    an all-gather's input, (n - 1) / n of what is scattered, reduced or exchanged, twice that of an
    all-reduce, all of a permute's input.

    Args:
        devices: of the program, for groups that are not spelt out.
    """
    computations, entry = _parse(hlo)
    found: dict[tuple[str, str], tuple[float, float]] = {}
    queue = [(entry, 1.0, False)]
    while queue:
        name, times, scatters = queue.pop()
        shapes = {line.name: line.shape for line in computations[name]}
        for line in computations[name]:
            kind = line.op.removesuffix("-start")
            if kind in KINDS:
                kind = "reduce-scatter" if scatters and kind == "all-reduce" else kind
                channel = re.search(r"channel_id=(\d+)", line.rest)
                # An asynchronous collective of a TPU is spelt out in each fusion that it overlaps with.
                key = kind, channel[1] if channel else f"{name}/{line.name}"
                sent = _sent(kind, _operands(line, shapes), _group(line.rest, devices))
                found[key] = max(found.get(key, (0.0, 0.0)), (times, times * sent))
            for called, trips in _calls(line, computations):
                queue.append((called, times * trips, "all-reduce-scatter" in called))
    total: dict[str, Traffic] = {}
    for (kind, _), (count, size) in found.items():
        old = total.get(kind, Traffic(0, 0))
        total[kind] = Traffic(old.count + count, old.bytes + size)
    return total


def _parse(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for text in hlo.splitlines():
        if found := COMPUTATION.match(text):
            current = found[2]
            entry = current if found[1] else entry
            computations[current] = []
        elif current and (found := INSTRUCTION.match(text)):
            root, name, shape, op, rest = found.groups()
            computations[current].append(Instruction(name, shape, op, rest, bool(root)))
    return computations, entry


def _calls(line: Instruction, computations: dict[str, list[Instruction]]) -> list[tuple[str, float]]:
    """(computation, times) that this line runs."""
    names = [name.strip(" %") for found in CALLED.findall(line.rest) for name in found.split(",")]
    trips = _trips(line, computations) if line.op == "while" else 1.0
    return [(name, trips) for name in names if name in computations]


def _trips(line: Instruction, computations: dict[str, list[Instruction]]) -> float:
    """How often a loop runs: as the compiler noted it, or as its condition `i < constant` says; else 1."""
    if found := re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', line.rest):
        return float(found[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line.rest)
    lines = computations.get(condition[1], []) if condition else []
    constants = {i.name: i.rest.split(")")[0] for i in lines if i.op == "constant"}
    for i in lines:
        if i.is_root and i.op == "compare" and "direction=LT" in i.rest:
            limit = i.rest.split(")")[0].split(",")[1].strip().split()[-1].lstrip("%")
            return float(constants.get(limit, 1))
    return 1.0


def _operands(line: Instruction, shapes: dict[str, str]) -> float:
    """Bytes of the line's operands."""
    inside, depth = line.rest, 1
    for end, letter in enumerate(inside):
        depth += (letter in "({[") - (letter in ")}]")
        if not depth:
            inside = inside[:end]
            break
    if re.search(r"\b[a-z]\w*\[", inside):  # their shapes are written out
        return size(inside)
    return sum(size(shapes.get(name.strip(" %"), "")) for name in inside.split(","))


def size(shape: str) -> float:
    """Bytes of an HLO shape such as "(f32[2,3]{1,0}, bf16[4])", padding not counted."""
    total = 0.0
    for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", re.sub(r"\{[^{}]*\}", "", shape)):
        width = re.search(r"\d+", kind)
        each = BYTES.get(kind) if kind in BYTES else (int(width[0]) / 8 if width else 0)
        total += each * math.prod(int(d.strip("<=")) for d in dims.split(",") if d)
    return total


def _group(attributes: str, devices: int) -> int:
    """Devices that take part together."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in parts)
    return devices


def _sent(kind: str, operands: float, group: int) -> float:
    if kind in ("collective-permute", "collective-broadcast"):
        return operands
    if kind == "all-gather":
        return operands * (group - 1)
    return operands * (group - 1) / group * (2 if kind == "all-reduce" else 1)
