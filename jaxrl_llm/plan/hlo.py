"""Text of a compiled program (HLO): its instructions, their operands, and how many times each runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "token": 0}
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?[\]})]) ([\w\-]+)\((.*)$")
CALLED = re.compile(
    r"\b(?:calls|body|to_apply|branch_computations|true_computation|false_computation|called_computations)"
    r"=\{?(%?[\w.\-]+(?:, *%?[\w.\-]+)*)"
)
RUN_IN_PLACE = ("while", "conditional", "call", "async-start", "call-start")
"""Instructions whose computations' results are arrays in memory, as the entry computation's are."""
FUSIONS = ("fusion", "fusion-start")
"""A fusion, and one that runs beside others until its `fusion-done` (CUDA, from jax 0.12 on)."""
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")


class Array(NamedTuple):
    """An array of an HLO shape."""

    dtype: str
    dims: tuple[int, ...]
    in_device_memory: bool  # False for vector memory, scalar memory and the host's

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Bytes without padding."""
        width = re.search(r"\d+", self.dtype)
        each = BYTES[self.dtype] if self.dtype in BYTES else int(width[0]) / 8 if width else 0
        return self.size * each

    @property
    def memory_bytes(self) -> float:
        """Bytes in the memory of the device."""
        return self.bytes * self.in_device_memory


class Instruction(NamedTuple):
    """A line of HLO."""

    name: str
    shape: str
    op: str
    rest: str  # operands and attributes
    is_root: bool

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the result; a tuple's arrays in order."""
        return arrays_of(self.shape)

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        inside = self.operand_text
        if "%" in inside:
            return re.findall(r"%([\w.\-]+)", inside)
        return [name.split()[-1] for name in inside.split(",") if name.strip()]

    @property
    def operand_text(self) -> str:
        """The text between its parentheses."""
        depth = 1
        for end, letter in enumerate(self.rest):
            depth += (letter in "({[") - (letter in ")}]")
            if not depth:
                return self.rest[:end]
        return self.rest

    @property
    def source(self) -> str:
        """JAX's name of the operation that it comes from, "" = none."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""


Computation = dict[str, Instruction]
"""Name -> instruction, in order."""


class Module(NamedTuple):
    """A compiled program."""

    computations: dict[str, Computation]
    entry: str


class Hints(NamedTuple):
    """Facts about a program that its text does not show."""

    trips: Mapping[str, float] = {}  # pattern of a loop's `source` -> its iterations, which depend on data
    steps: int = 1  # calls of a phase that one run of the program makes: tokens of a chunk of decoding
    kernels: Mapping[str, float] = {}  # part of a kernel's `source` -> FLOPs of all its runs in a call
    reads_cache: bool = False  # each kernel of attention gets the cache of all layers, and reads its own


NO_HINTS = Hints()


class Execution(NamedTuple):
    """An instruction as a part of one call of the program."""

    line: Instruction
    computation: str
    times: float  # in one call of the phase
    in_loop: bool
    caller: Instruction | None  # that the computation belongs to; None = the entry computation

    @property
    def is_fused(self) -> bool:
        """True if its result is not a separate array in memory."""
        return self.caller is not None and self.caller.op not in RUN_IN_PLACE


def parse(hlo: str) -> Module:
    """Parse the text of a compiled program."""
    computations: dict[str, Computation] = {}
    entry = current = ""
    for text in hlo.splitlines():
        if match := COMPUTATION.match(text):
            current = match[2]
            entry = current if match[1] else entry
            computations[current] = {}
        elif current and (match := INSTRUCTION.match(text)):
            root, name, shape, op, rest = match.groups()
            computations[current][name] = Instruction(name, shape, op, rest, is_root=bool(root))
    return Module(computations, entry)


def executions(module: Module, hints: Hints) -> Iterator[Execution]:
    """Yield every instruction with the number of times that it runs: an unknown trip count is 1."""
    queue: list[tuple[str, float, bool, Instruction | None]] = [(module.entry, 1 / hints.steps, False, None)]
    while queue:
        name, times, in_loop, caller = queue.pop()
        for line in module.computations[name].values():
            yield Execution(line, name, times, in_loop, caller=caller)
            is_loop = line.op == "while"
            count = times * (_trip_count(line, module, hints) if is_loop else 1.0)
            for called in called_computations(line, module):
                queue.append((called, count, in_loop or is_loop, line))


def called_computations(line: Instruction, module: Module) -> list[str]:
    """Return the computations that an instruction runs, without the condition of a loop."""
    names = [name.strip(" %") for names in CALLED.findall(line.rest) for name in names.split(",")]
    return [name for name in names if name in module.computations]


def arrays_of(shape: str) -> list[Array]:
    """Return the arrays of an HLO shape such as "(f32[2,3]{1,0}, bf16[4]{0:S(1)})"."""
    return [
        Array(dtype, tuple(int(d.strip("<=")) for d in dims.split(",") if d), "S(" not in layout)
        for dtype, dims, layout in ARRAY.findall(shape)
    ]


def operand_arrays(line: Instruction, computation: Computation) -> list[list[Array]]:
    """Return the arrays of each operand."""
    text = line.operand_text
    if re.search(r"\b[a-z]\w*\[", text):  # operands are printed with their shapes
        return [[array] for array in arrays_of(text)]
    return [computation[name].arrays if name in computation else [] for name in line.operands]


def _trip_count(line: Instruction, module: Module, hints: Hints) -> float:
    """Return the trip count of a loop, from the compiler's note or its condition `i < constant`."""
    if match := re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', line.rest):
        return float(match[1])
    match = re.search(r"condition=%?([\w.\-]+)", line.rest)
    condition = module.computations.get(match[1], {}) if match else {}
    for root in condition.values():
        if root.is_root and root.op == "compare" and "direction=LT" in root.rest:
            counter, limit = (condition.get(name) for name in root.operands)
            if limit and limit.op == "constant":
                return math.ceil(float(limit.operand_text) / _step(line, module, counter))
    return next((count for part, count in hints.trips.items() if re.search(part, line.source)), 1.0)


def _step(line: Instruction, module: Module, counter: Instruction | None) -> float:
    """Return the step of a loop's counter: 2 if the compiler has unrolled the loop once."""
    index = re.search(r"index=(\d+)", counter.rest) if counter else None
    body = module.computations[called_computations(line, module)[0]]
    root = next((i for i in body.values() if i.is_root and i.op == "tuple"), None)
    new = body.get(root.operands[int(index[1])]) if root and index else None
    added = [body[name] for name in new.operands if name in body] if new and new.op == "add" else []
    return next((float(i.operand_text) for i in added if i.op == "constant"), 1.0)
