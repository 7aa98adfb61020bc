"""Shapes that the TPU kernels of attention take: head dims, and block sizes that fit the VMEM of a chip."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import CHIPS, LANES, MIB

HEAD_DIMS = (64, 96, 128, 256)
"""Head dims that the TPU kernels store. Others are padded with zeros to the next one."""
DTYPES = ("bfloat16", "float32")


class Blocks(NamedTuple):
    """Tokens of a block, multiples of 128."""

    q: int
    kv: int


SIZES = (Blocks(512, 1024), Blocks(512, 512), Blocks(256, 512), Blocks(256, 256), Blocks(128, 128))
"""Blocks in order of preference: a kernel takes the first that fits. Compiled for every TPU, timed on
none."""


def vmem_limit(chip: str) -> int:
    """Return the bytes of vector memory that one kernel may use on a generation."""
    return min(CHIPS[chip].scratchpad, 32 * MIB)


def padded_head_dim(head_dim: int) -> int:
    """Return the smallest of HEAD_DIMS that is at least `head_dim`."""
    return next(held for held in HEAD_DIMS if head_dim <= held)


def vmem_bytes(kernel: str, blocks: Blocks, head_dim: int, dtype: DTypeLike) -> int:
    """Return the most bytes a kernel needs: double-buffered inputs and outputs, scratch, scores in use."""
    size, lanes = jnp.dtype(dtype).itemsize, -(-head_dim // LANES) * LANES
    q, kv, column = blocks.q * lanes, blocks.kv * lanes, 4 * LANES
    rows = 3 * 8 * 4 * (blocks.q + blocks.kv)  # a number a token takes one row of a tile of eight
    copied, kept, in_use = {
        "forward": (2 * q + 2 * kv, 4 * q + 3 * column * blocks.q, 2),
        "dq": (3 * q + 2 * kv, 4 * q + 3 * column * blocks.q, 3),
        "dkv": (2 * q + 4 * kv, 8 * kv + column * blocks.kv, 3),
    }[kernel]
    return 2 * (copied * size + rows) + kept + in_use * 4 * blocks.q * blocks.kv


def blocks_for(kernel: str, queries: int, keys: int, head_dim: int, dtype: DTypeLike) -> Blocks:
    """Return the blocks of a kernel ("forward", "dq", "dkv") for these lengths and the current chip.

    Raises:
        ValueError: no blocks of SIZES fit; the message names blocks that do.
    """
    chip, dim = dispatch.tpu_generation(), padded_head_dim(head_dim)
    fits = (b for b in SIZES if vmem_bytes(kernel, b, dim, dtype) <= vmem_limit(chip))
    largest = next(fits, SIZES[-1])
    check_vmem(kernel, largest, dim, dtype, chip)
    return Blocks(_even(queries, largest.q), _even(keys, largest.kv))


def _even(length: int, max_block: int) -> int:
    """Return the block length that cuts a length into as few and as equal blocks as possible."""
    count = -(-length // max_block)
    return -(-length // (count * LANES)) * LANES


def check_vmem(kernel: str, blocks: Blocks, head_dim: int, dtype: DTypeLike, chip: str) -> None:
    """Refuse blocks that do not fit.

    Raises:
        ValueError: the message names blocks that fit.
    """
    need, limit = vmem_bytes(kernel, blocks, head_dim, dtype), vmem_limit(chip)
    if need > limit:
        raise ValueError(
            f"{kernel}: blocks of {blocks.q} queries and {blocks.kv} keys of head_dim {head_dim} in "
            f"{jnp.dtype(dtype).name} need {need / MIB:.1f} MiB of VMEM; a kernel on {chip} has "
            f"{limit // MIB} MiB. Up to these fit (queries, keys): "
            f"{largest_blocks(kernel, head_dim, dtype, chip)}"
        )


def largest_blocks(kernel: str, head_dim: int, dtype: DTypeLike, chip: str) -> list[tuple[int, int]]:
    """Return the largest blocks (queries, keys) of powers of two that fit a chip."""
    sizes = [LANES * 2**n for n in range(5)]
    limit = vmem_limit(chip)
    fits = lambda q, kv: vmem_bytes(kernel, Blocks(q, kv), head_dim, dtype) <= limit
    fit = [max((q, kv) for kv in sizes if fits(q, kv)) for q in sizes if fits(q, LANES)]
    return [(q, kv) for q, kv in fit if not any(more > q and keys == kv for more, keys in fit)]
