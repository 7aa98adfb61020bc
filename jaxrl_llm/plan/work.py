"""Work of a compiled program on one device: FLOPs of its matrix products, bytes in and out of its memory.

Both are read from the text of the program, which does not show the inside of kernels: their FLOPs are hints,
their bytes are the operands' and results'.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from jaxrl_llm.plan.hlo import (
    FUSIONS,
    Array,
    Computation,
    Hints,
    Instruction,
    Module,
    called_computations,
    executions,
    operand_arrays,
)

FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "opt-barrier", "partition-id", "replica-id", "add-dependency", "async-start", "async-update",
    "call-start", "call-update",
)  # fmt: skip
"""Instructions that move nothing by themselves."""
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Instructions that update their first operand in place -> operand that they update it with."""
GEMM = "__cublas$"
"""Part of the target of a custom call that is a matrix product."""
KERNEL = re.compile(
    r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*|__gpu\$xla\.gpu\.triton|__cudnn\$fmha\w*)"'
)

ATTENTION = "attention"
"""Scope of attention in the model, a part of its kernels' `source`."""


class ProgramWork(NamedTuple):
    """Work of one call of a phase on one device."""

    flops: float = 0.0  # of matrix products
    memory: float = 0.0  # bytes in and out of the device's memory
    links: float = 0.0  # bytes sent to other devices

    def plus(self, memory: float) -> ProgramWork:
        """Return the work with more bytes of memory traffic."""
        return self._replace(memory=self.memory + memory)


NO_WORK = ProgramWork()


def count_work(module: Module, hints: Hints) -> ProgramWork:
    """Return FLOPs and memory traffic of a program.

    FLOPs count matrix products, without padding of tiles. Memory traffic counts operands and results of every
    instruction that is not fused into another: for an array that is sliced or updated in place only the
    slice, and nothing for arrays in the vector memory of a TPU or in host memory.
    """
    flops = memory = cache = 0.0
    kernels = set()
    for execution in executions(module, hints):
        line, computation = execution.line, module.computations[execution.computation]
        flops += execution.times * _product(line, computation)
        is_kernel = KERNEL.search(line.rest) is not None
        scopes = [name for name in hints.kernels if is_kernel and name in line.source]
        kernels.update(sorted(scopes, key=line.source.rfind)[-1:])  # the innermost
        if execution.is_fused:  # also kernels, if CUDA's compiler has fused the slices that they read
            continue
        moved = _moved(line, module, computation)
        if is_kernel and hints.reads_cache and ATTENTION in line.source:
            cache = max(cache, moved)
        else:
            memory += execution.times * moved
    return ProgramWork(flops + sum(hints.kernels[name] for name in kernels), memory + cache)


def computes(line: Instruction, module: Module) -> bool:
    """Return whether an instruction runs a matrix product or a kernel."""
    if line.op in ("dot", "convolution") or KERNEL.search(line.rest) or GEMM in line.rest:
        return True
    inside = (module.computations[name].values() for name in called_computations(line, module))
    return any(computes(other, module) for body in inside for other in body)


def _product(line: Instruction, computation: Computation) -> float:
    """Return the FLOPs of a matrix product; 0 for other instructions."""
    if line.op == "custom-call" and GEMM in line.rest:
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.rest)
    elif line.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
    else:
        return _convolution(line, computation) if line.op == "convolution" else 0.0
    left = operand_arrays(line, computation)[0][0]
    dims = [int(dim) for dim in re.findall(r"\d+", contracted[1])] if contracted else []
    return 2.0 * line.arrays[0].size * math.prod(left.dims[dim] for dim in dims)


def _convolution(line: Instruction, computation: Computation) -> float:
    """Return the FLOPs of a convolution, the form of a matrix product on TPU.

    Batch dims and heads become spatial dims. Most positions of their window are padding, which does not
    count.
    """
    inputs, kernel = (arrays[0] for arrays in operand_arrays(line, computation))
    of_input, of_kernel, of_output = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest).groups()
    flops = 2.0 * kernel.dims[of_kernel.index("i")]
    flops *= line.arrays[0].dims[of_output.index("b")] * line.arrays[0].dims[of_output.index("f")]
    match = re.search(r"window=\{([^}]*)\}", line.rest)
    window = dict(re.findall(r"(\w+)=([\d_x\-]+)", match[1])) if match else {}
    fields = {"size": 1, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
    for i, dim in enumerate(sorted(set(of_output) - {"b", "f"})):
        size, stride, low, dilation, step = (
            int(window[field].split("x")[i].split("_")[0]) if field in window else default
            for field, default in fields.items()
        )
        output, last = line.arrays[0].dims[of_output.index(dim)], inputs.dims[of_input.index(dim)] - 1
        at = np.arange(output)[:, None] * stride - low + np.arange(size) * step
        flops *= int(np.sum((at >= 0) & (at <= last * dilation) & (at % dilation == 0)))
    return flops


def _moved(line: Instruction, module: Module, computation: Computation) -> float:
    """Return the bytes that one execution of an instruction moves."""
    if line.op in FREE or line.op.endswith("-done"):
        return 0.0
    operands = operand_arrays(line, computation)
    size = lambda arrays: sum(array.memory_bytes for array in arrays)
    if line.op == "custom-call":
        return _moved_by_call(line, operands)
    if line.op in FUSIONS:
        return _moved_by_fusion(line, operands, module)
    if line.op.endswith("slice-start"):  # its result: the operand, the slice, a semaphore
        return line.arrays[1].bytes + size(line.arrays[1:2])
    if line.op.endswith("-start"):  # its result holds the operands, too
        return size(line.arrays)
    if line.op in SLICES:
        return 2 * size(line.arrays)
    if line.op in UPDATES:
        return 2 * size(operands[UPDATES[line.op]])
    return sum(map(size, operands)) + size(line.arrays)


def _moved_by_fusion(line: Instruction, operands: list[list[Array]], module: Module) -> float:
    """Return the bytes that a fusion reads and writes."""
    fused = module.computations[called_computations(line, module)[0]]
    parameters = {i.operand_text: name for name, i in fused.items() if i.op == "parameter"}
    sizes = [sum(array.memory_bytes for array in arrays) for arrays in operands]
    read = [min(size, _read(parameters[str(i)], fused, module)) for i, size in enumerate(sizes) if size]
    results = line.arrays
    if line.op == "fusion-start":  # it returns operands, results and a semaphore
        first = sum(map(len, operands))
        results = results[first : first + len(_root(fused).arrays)]
    return sum(read) + _written(fused, module, results)


def _moved_by_call(line: Instruction, operands: list[list[Array]]) -> float:
    """Return the bytes of operands and results of a kernel, without arrays that it updates in place."""
    results = line.arrays
    if GEMM in line.rest:
        results = results[:1]  # the second is a workspace
    elif not KERNEL.search(line.rest):
        return 0.0
    aliased = re.findall(r"\{(\d*)\}: \((\d+), ", line.rest)
    updated = {int(result or 0) for result, _ in aliased}, {int(operand) for _, operand in aliased}
    kept = [array for i, array in enumerate(results) if i not in updated[0]]
    kept += [array for i, arrays in enumerate(operands) if i not in updated[1] for array in arrays]
    return sum(array.memory_bytes for array in kept)


def _read(name: str, fused: Computation, module: Module) -> float:
    """Return the bytes that a fusion reads of a value: only slices, if it uses nothing else."""
    total = 0.0
    for line in fused.values():
        for i in [i for i, operand in enumerate(line.operands) if operand == name]:
            if _is_alias(line):
                total += _read(line.name, fused, module)
            elif line.op in SLICES and i == 0:
                total += line.arrays[0].bytes
            elif line.op == "fusion":
                inner = module.computations[called_computations(line, module)[0]]
                parameters = {x.operand_text: x for x in inner.values() if x.op == "parameter"}
                total += _read(parameters[str(i)].name, inner, module)
                if _origin(_root(inner), inner) is parameters[str(i)]:
                    total += _read(line.name, fused, module)
            elif not (line.op == "tuple" or (line.op in UPDATES and i == 0)):
                return math.inf
    return total


def _written(fused: Computation, module: Module, arrays: list[Array]) -> float:
    """Return the bytes that a fusion writes: of an array that it updates in place the update alone."""
    root = _root(fused)
    results = [fused[name] for name in root.operands] if root.op == "tuple" else [root]
    if len(results) != len(arrays):
        return sum(array.memory_bytes for array in arrays)
    total = 0.0
    for line, array in zip(results, arrays, strict=True):
        line, size = _origin(line, fused), array.memory_bytes
        if line.op in UPDATES:
            size = min(size, fused[line.operands[UPDATES[line.op]]].arrays[0].bytes)
        elif line.op == "fusion":
            inner = module.computations[called_computations(line, module)[0]]
            size = min(size, _written(inner, module, line.arrays))
        total += 0.0 if line.op == "parameter" else size
    return total


def _root(computation: Computation) -> Instruction:
    return next(line for line in computation.values() if line.is_root)


def _origin(line: Instruction, computation: Computation) -> Instruction:
    """Return the instruction whose value this one is, perhaps in another shape or tiling."""
    while _is_alias(line):
        line = computation[line.operands[0]]
    return line


def _is_alias(line: Instruction) -> bool:
    """Return whether an instruction within a fusion is another view of its operand, which is not copied."""
    tiled_anew = line.op == "fusion" and "output_to_operand_aliasing={{}: (0, {})}" in line.rest
    return tiled_anew or line.op == "bitcast"
