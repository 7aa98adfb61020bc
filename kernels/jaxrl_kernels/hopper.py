"""Building blocks of the Hopper kernels on Pallas Mosaic GPU: warpgroups, wgmma, TMA rings, the interpreter.

The interpreter runs copies, barriers and warpgroups. It does not support layouts, nor a wgmma whose operand
is in registers or transposed: there an accumulator is an `InterpretedAccumulator` and a product is jnp's.
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

from jaxrl_kernels.chips import HOPPER_SHARED_MEMORY, HOPPER_SMS

ROWS = 64
"""Rows of a wgmma, which one warpgroup issues."""
CONSUMERS = 2
"""Consumer warpgroups, which compute, beside the producer, which copies (decoding has one)."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Registers per lane of each warpgroup: 40 + 2 * 232 = 504 of 512."""
RESERVED = 4096
"""Bytes of shared memory reserved for the compiler: reductions and barriers."""
BLOCK_LENGTHS = (32, 64, 128)
"""Rows of a block in a ring: TMA writes at multiples of 128 bytes, which 32 of an int32 are."""
TILE_ROWS = 8
"""Rows of a tile of `matrix_memory`. TMA copies whole tiles: arrays must consist of whole tiles, and copies
must begin at multiples of these rows and of the stripe's columns. Pallas rounds any other start down; its
interpreter does not. TMA reads zeros past the end of an array and writes nothing there; the interpreter does
not support this."""
MATRIX = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


class InterpretedAccumulator:
    """An accumulator in the interpreter."""

    def __init__(self, value: jax.Array):
        self.value = value

    def __getitem__(self, _) -> jax.Array:
        return self.value

    def __setitem__(self, _, value: jax.Array) -> None:
        self.value = value


def add_product(acc: Any, a: Any, b: Any, transpose: bool = False, transpose_a: bool = False) -> None:
    """Start acc += a @ b, a @ b^T or a^T @ b. a is a reference or registers, b a reference."""
    if not isinstance(acc, InterpretedAccumulator):
        a = a.transpose((1, 0)) if transpose_a else a
        plgpu.wgmma(acc, a, b.transpose((1, 0)) if transpose else b)
        return
    contracted = (((0 if transpose_a else 1,), (1 if transpose else 0,)), ((), ()))
    acc.value += lax.dot_general(a[...], b[...], contracted, preferred_element_type=jnp.float32)
    plgpu.commit_smem()  # reads end before TMA writes there again; wgmma needs none


def read_accumulator(acc: Any, in_flight: int = 0) -> jax.Array:
    """Return the accumulator once all products but the newest `in_flight` are done."""
    if isinstance(acc, InterpretedAccumulator):
        return acc.value
    return plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)


def ring_product(
    multiply: Callable[[Any, jax.Array, jax.Array], None],
    shape: tuple[int, int],
    ready: Any,
    free: Any,
    first: jax.Array,
    steps: int | jax.Array,
    interpret: bool,
) -> jax.Array:
    """Return float32 registers, the sum of the products of `steps` blocks of a ring; zero without steps.

    A block is released when its product is done, one step later.

    Args:
        multiply: (accumulator, stage, step of these) starts `add_product` of the block in a stage.
        ready, free: barriers of the stages.
        first: step of the ring, counted over the whole kernel, at which these steps begin.
    """
    # The interpreter runs one product at a time; the device overlaps it with the next step.
    slot = lambda step: lax.rem(first + step, jnp.int32(len(free)))

    def interpreted(k, value):
        acc, stage = InterpretedAccumulator(value), slot(k)
        plgpu.barrier_wait(ready.at[stage])
        multiply(acc, stage, k)
        plgpu.barrier_arrive(free.at[stage])
        return acc.value

    if interpret:
        return lax.fori_loop(0, steps, interpreted, jnp.zeros(shape, jnp.float32))

    def accumulated(acc):
        @pl.loop(0, steps)
        def _(k):
            stage = slot(k)
            plgpu.barrier_wait(ready.at[stage])
            multiply(acc, stage, k)
            plgpu.wgmma_wait(1)  # the step before this one is done
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[slot(k - 1)]))

        done = acc[...]
        pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[slot(steps - 1)]))
        return done

    return pl.run_scoped(accumulated, plgpu.ACC(shape, jnp.float32))


def share_tiles(
    row_tiles: jax.Array, column_tiles: int, together: int
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
    """Return (number of tiles of this multiprocessor, n -> its n-th tile's row and column).

    Tiles are numbered down the columns of `together` rows, which share columns while the L2 cache has them.
    """
    sm, sms = lax.axis_index("sm"), lax.axis_size("sm")

    def tile_at(n):
        n, size = sm + n * sms, jnp.int32(together * column_tiles)
        first = lax.div(n, size) * together
        rows, rest = jnp.minimum(row_tiles - first, together), lax.rem(n, size)
        return first + lax.rem(rest, rows), lax.div(rest, rows)

    return jnp.maximum(pl.cdiv(row_tiles * column_tiles - sm, sms), 0), tile_at


def num_multiprocessors() -> int:
    """Return the number of streaming multiprocessors of the target GPU."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu":
        return device.num_cores
    return getattr(jax.devices()[0], "core_count", HOPPER_SMS)


def next_multiple(x: int, to: int) -> int:
    """Return the smallest multiple of `to` that is at least x."""
    return -(-x // to) * to


@dataclasses.dataclass(frozen=True)
class WarpgroupOps:
    """Registers and accumulators of a warpgroup, on the device or in the interpreter."""

    interpret: bool

    def layout(self, x: jax.Array, layout: Any) -> jax.Array:
        """Return x in a register layout."""
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float, layout: Any = MATRIX) -> jax.Array:
        """Return float32 registers of one value."""
        return self.layout(jnp.full(shape, value, jnp.float32), layout)

    def iota(self, shape: tuple[int, int], dim: int) -> jax.Array:
        """Return int32 row (0) or column (1) indices."""
        return self.layout(lax.broadcasted_iota(jnp.int32, shape, dim), MATRIX)

    def scratch(self, body: Callable, *shapes: tuple[int, int]) -> Any:
        """Return body(*accumulators), which are zero at first."""
        if self.interpret:
            return body(*(InterpretedAccumulator(jnp.zeros(shape, jnp.float32)) for shape in shapes))
        return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def accumulate(self, body: Callable, accs: Sequence[jax.Array], others: Sequence[jax.Array] = ()) -> list:
        """Run body(*refs), the first refs accumulators initialised to `accs`; return all final values."""
        if self.interpret:
            refs = [InterpretedAccumulator(x) for x in (*accs, *others)]
            body(*refs)
            return [ref.value for ref in refs]
        initial = (*(plgpu.ACC.init(x) for x in accs), *others)
        return list(pl.run_state(lambda refs: body(*refs))(initial))


def unsupported_dtype(dtype: Any) -> str | None:
    """Return why wgmma does not multiply this type exactly, or None."""
    if jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16):
        return None
    return f"wgmma multiplies bfloat16 and float16, not {jnp.dtype(dtype).name}"


def matrix_memory(shape: tuple[int, ...], dtype: Any, stripe: int) -> Any:
    """Return shared memory [..., rows, columns], tiled and swizzled as TMA writes it and wgmma reads it.

    Args:
        stripe: the swizzled stripes of a row divide this number of columns.
    """
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(stripe * bits)
    transforms = (plgpu.TilingTransform((TILE_ROWS, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def store_rows(ref: Any, value: jax.Array) -> None:
    """Store registers in shared memory that is not tiled, whose rows can be copied one by one.

    Memory banks conflict: tiled memory is faster.
    """
    if hasattr(plgpu, "store"):  # jax 0.12 and later, which otherwise refuse conflicts
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def stages_that_fit(kernel: str, length: int, fixed: int, per_row: int, max_stages: int = 4) -> int:
    """Return the number of blocks of `length` rows in a kernel's ring, as many as shared memory holds.

    Args:
        kernel: name, for the message.
        fixed: bytes beside the ring.
        per_row: bytes of a row of a block.

    Raises:
        ValueError: fewer than two fit; the message names lengths that do.
    """
    free = HOPPER_SHARED_MEMORY - RESERVED - fixed
    if length not in BLOCK_LENGTHS or 2 * length * per_row > free:
        fitting = [n for n in BLOCK_LENGTHS if 2 * n * per_row <= free]
        raise ValueError(
            f"{kernel}: two blocks of {length} rows need {2 * length * per_row} bytes of shared memory, "
            f"{max(free, 0)} are left of {HOPPER_SHARED_MEMORY}; lengths that fit: {fitting or 'none'}"
        )
    return min(max_stages, free // (length * per_row))


def has_register_reallocation() -> bool:
    """Return whether ptxas honours `set_max_registers` (setmaxnreg).

    jax 0.12 has nvJitLink compile Mosaic kernels, for linking. There ptxas ignores it (C7504): each of three
    warpgroups has 168 registers a lane, and one that needs more spills and runs its products in turn (C7512).
    """
    return jax.__version_info__ < (0, 12)


def launch(
    body: Callable, out: Any, scratch: dict, grid: dict[str, int], consumers: int, interpret: bool
) -> Callable:
    """Return the kernel `body(*refs, **scratch)` of consumer warpgroups and a last, the producer."""
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=consumers + 1,
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
