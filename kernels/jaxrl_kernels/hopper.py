"""What our kernels for Hopper use of Pallas Mosaic GPU, on the device and in its interpreter.

The interpreter runs copies, barriers and warpgroups. It does not know a wgmma whose operand is in registers
or transposed, nor layouts: there an accumulator is a `Cell` and a product is jnp's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_kernels.gpu_target import SHARED_MEMORY

ROWS = 64
"""Of a wgmma, which one warpgroup issues."""
COMPUTE = 2
"""Warpgroups that compute, beside the one that copies (to decode, one does)."""
FEW_REGISTERS, MANY_REGISTERS = 40, 232
"""Of the warpgroup that copies and of the two that compute: 40 + 2 * 232 = 504, of 512 a lane of each has."""
RESERVED = 4096
"""Bytes of shared memory left to the compiler: reductions and barriers."""
LENGTHS = (32, 64, 128)
"""Of the blocks in a ring: TMA writes at multiples of 128 bytes, which 32 of an int32 are."""
MATRIX = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


class Cell:
    """An accumulator of the interpreter."""

    def __init__(self, value: jax.Array):
        self.value = value

    def __getitem__(self, _) -> jax.Array:
        return self.value

    def __setitem__(self, _, value: jax.Array) -> None:
        self.value = value


def add_product(acc: Any, a: Any, b: Any, transpose: bool = False) -> None:
    """acc += a @ b, or a @ b^T: begins it. a is a reference or registers, b a reference."""
    if not isinstance(acc, Cell):
        plgpu.wgmma(acc, a, b.transpose((1, 0)) if transpose else b)
        return
    contracted = (((1,), (1 if transpose else 0,)), ((), ()))
    acc.value += lax.dot_general(a[...], b[...], contracted, preferred_element_type=jnp.float32)
    plgpu.commit_smem()  # what was read has been read, before TMA writes there again; wgmma needs none


def read(acc: Any, unfinished: int = 0) -> jax.Array:
    """The accumulator once all products but the newest `unfinished` are done."""
    return acc.value if isinstance(acc, Cell) else plgpu.wgmma_accumulator_load(acc, wait_n=unfinished)


@dataclasses.dataclass(frozen=True)
class Cores:
    """The registers and tensor cores of a warpgroup, or their interpreter."""

    interpret: bool

    def layout(self, x: jax.Array, layout: Any) -> jax.Array:
        """x, spread over the lanes so."""
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float, layout: Any = MATRIX) -> jax.Array:
        """float32 registers of one value."""
        return self.layout(jnp.full(shape, value, jnp.float32), layout)

    def iota(self, shape: tuple[int, int], dim: int) -> jax.Array:
        """int32 row (0) or column (1) indices."""
        return self.layout(lax.broadcasted_iota(jnp.int32, shape, dim), MATRIX)

    def scratch(self, body: Callable, *shapes: tuple[int, int]) -> Any:
        """body(*accumulators) of zeros; what it returns."""
        if self.interpret:
            return body(*(Cell(jnp.zeros(shape, jnp.float32)) for shape in shapes))
        return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def accumulate(self, body: Callable, accs: Sequence[jax.Array], others: Sequence[jax.Array] = ()) -> list:
        """body(*refs), the first refs accumulators that begin as `accs`; what all hold at its end."""
        if self.interpret:
            cells = [Cell(x) for x in (*accs, *others)]
            body(*cells)
            return [cell.value for cell in cells]
        begin = (*(plgpu.ACC.init(x) for x in accs), *others)
        return list(pl.run_state(lambda refs: body(*refs))(begin))


def matrix_memory(shape: tuple[int, ...], dtype: Any, stripe: int) -> Any:
    """Shared memory [..., rows, columns], tiled and swizzled as TMA writes it and wgmma reads it.

    Args:
        stripe: the swizzled stripes of a row divide this number of columns.
    """
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(stripe * bits)
    transforms = (plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def stages_that_fit(what: str, length: int, fixed: int, per_row: int, most: int = 4) -> int:
    """How many blocks of `length` rows a kernel's ring holds: `most`, fewer where shared memory is short.

    Args:
        fixed: bytes that are there all along.
        per_row: bytes of a row of a block.

    Raises:
        ValueError: fewer than two fit. It names the lengths that do.
    """
    room = SHARED_MEMORY - RESERVED - fixed
    if length not in LENGTHS or 2 * length * per_row > room:
        fitting = [n for n in LENGTHS if 2 * n * per_row <= room]
        raise ValueError(
            f"{what}: two blocks of {length} rows need {2 * length * per_row} bytes of shared memory, "
            f"{max(room, 0)} are left of {SHARED_MEMORY}; lengths that fit: {fitting or 'none'}"
        )
    return min(most, room // (length * per_row))


def registers_divided() -> bool:
    """Whether ptxas heeds `set_max_registers`.

    jax 0.12 has nvJitLink compile Mosaic kernels, for linking. There ptxas ignores it (C7504): each of three
    warpgroups has 168 registers a lane, and one that needs more spills and runs its products in turn (C7512).
    """
    return jax.__version_info__ < (0, 12)


def launch(
    body: Callable, out: Any, scratch: dict, grid: dict[str, int], compute: int, interpret: bool
) -> Callable:
    """`body(*refs, **scratch)` by `compute` warpgroups that compute and a last that copies (axis "group")."""
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=compute + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=_interpreter() if interpret else None,
    )


def _interpreter() -> Any:
    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:  # jax 0.10 and 0.11 have it, unnamed
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as params
    return params(detect_races=True)
