"""What the TPU kernels take: head dims, block sizes for each chip, and whether a block fits its VMEM."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_kernels import target

HEAD_DIMS = (64, 96, 128, 256)
"""Of the TPU kernels, as they lie in memory. One in between is filled up with zeros."""
DTYPES = ("bfloat16", "float32")
LANES = 128
MIB = 2**20


class Blocks(NamedTuple):
    """Tokens of a block, multiples of 128."""

    q: int
    kv: int


VMEM = {"v4": 16 * MIB, "v5e": 32 * MIB, "v5p": 32 * MIB, "v6e": 32 * MIB, "tpu7x": 32 * MIB}
"""Generation -> bytes that we let one kernel use."""
SIZES = (Blocks(512, 1024), Blocks(512, 512), Blocks(256, 512), Blocks(256, 256), Blocks(128, 128))
"""Blocks from the most wanted: a kernel takes the first that fits. Compiled for all, timed on none."""


def unsupported(head_dim: int, dtype: DTypeLike) -> str | None:
    """Why the TPU kernels do not take q, k and v of such a head dim and type, or None."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"dtype {name}: the TPU kernels of attention take {' and '.join(DTYPES)}"
    if head_dim > HEAD_DIMS[-1]:
        return (
            f"head_dim {head_dim}: the TPU kernels of attention hold up to {HEAD_DIMS[-1]} (as {HEAD_DIMS})"
        )
    return None


def padded_head_dim(head_dim: int) -> int:
    """The one of HEAD_DIMS that holds it."""
    return next(held for held in HEAD_DIMS if head_dim <= held)


def vmem_bytes(kernel: str, blocks: Blocks, head_dim: int, dtype: DTypeLike) -> int:
    """Bytes a kernel needs at most: what is copied in or out twice, what it keeps, scores at work."""
    size, lanes = jnp.dtype(dtype).itemsize, -(-head_dim // LANES) * LANES
    q, kv, column = blocks.q * lanes, blocks.kv * lanes, 4 * LANES
    rows = 3 * 8 * 4 * (blocks.q + blocks.kv)  # numbers a token lie in one row of a tile of eight
    copied, kept, at_work = {
        "forward": (2 * q + 2 * kv, 4 * q + 3 * column * blocks.q, 2),
        "dq": (3 * q + 2 * kv, 4 * q + 3 * column * blocks.q, 3),
        "dkv": (2 * q + 4 * kv, 8 * kv + column * blocks.kv, 3),
    }[kernel]
    return 2 * (copied * size + rows) + kept + at_work * 4 * blocks.q * blocks.kv


def blocks_for(kernel: str, queries: int, keys: int, head_dim: int, dtype: DTypeLike) -> Blocks:
    """The blocks of a kernel ("forward", "dq", "dkv") for these lengths on the chip that is traced for.

    Raises: ValueError for what the kernels cannot take, naming what they can and what to use instead.
    """
    if problem := unsupported(head_dim, dtype):
        raise ValueError(f'{problem}; use implementation="blockwise"')
    chip, dim = target.generation(), padded_head_dim(head_dim)
    fits = (b for b in SIZES if vmem_bytes(kernel, b, dim, dtype) <= VMEM[chip])
    largest = next(fits, SIZES[-1])
    check(kernel, largest, dim, dtype, chip)
    return Blocks(_even(queries, largest.q), _even(keys, largest.kv))


def _even(length: int, most: int) -> int:
    """Tokens of a block if a length is cut into as few and as equal ones as `most` and LANES allow."""
    count = -(-length // most)
    return -(-length // (count * LANES)) * LANES


def check(kernel: str, blocks: Blocks, head_dim: int, dtype: DTypeLike, chip: str) -> None:
    """Raises: ValueError for blocks that do not fit, naming those that do."""
    need, limit = vmem_bytes(kernel, blocks, head_dim, dtype), VMEM[chip]
    if need > limit:
        raise ValueError(
            f"{kernel}: blocks of {blocks.q} queries and {blocks.kv} keys of head_dim {head_dim} in "
            f"{jnp.dtype(dtype).name} need {need / MIB:.1f} MiB of VMEM; a kernel on {chip} has "
            f"{limit // MIB} MiB. Up to these fit (queries, keys): {fitting(kernel, head_dim, dtype, chip)}"
        )


def fitting(kernel: str, head_dim: int, dtype: DTypeLike, chip: str) -> list[tuple[int, int]]:
    """The largest blocks (queries, keys) of powers of two that fit a chip."""
    sizes = [LANES * 2**n for n in range(5)]
    limit = VMEM[chip]
    fits = lambda q, kv: vmem_bytes(kernel, Blocks(q, kv), head_dim, dtype) <= limit
    fit = [max((q, kv) for kv in sizes if fits(q, kv)) for q in sizes if fits(q, LANES)]
    return [(q, kv) for q, kv in fit if not any(more > q and keys == kv for more, keys in fit)]
