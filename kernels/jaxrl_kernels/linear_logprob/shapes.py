"""Tiles of the TPU kernels: how much of tokens, vocabulary and depth is on the chip at once."""

from __future__ import annotations

from typing import NamedTuple

LANES = 128
STRIP = 128
"""Rows of a tile of logits that the arithmetic after the product looks at together."""


class Tiles(NamedTuple):
    """Of the product [tokens, depth] x [vocab, depth]^T."""

    tokens: int
    vocab: int
    depth: int


MIB = 2**20
VMEM = {"v4": 16 * MIB, "v5e": 128 * MIB, "v5p": 64 * MIB, "v6e": 128 * MIB, "tpu7x": 64 * MIB}
"""Generation -> bytes of vector memory of a core."""
SMALL, MEDIUM, LARGE = Tiles(512, 512, 512), Tiles(1024, 1024, 512), Tiles(2048, 1024, 512)
WANTED = {"v4": SMALL, "v5e": MEDIUM, "v5p": MEDIUM, "v6e": LARGE, "tpu7x": MEDIUM}
"""FLOPs a byte of bfloat16, tokens * vocab / (tokens + vocab), should exceed the chip's ratio of the two."""


def tiles(chip: str, tokens: int, vocab: int, dim: int, itemsize: int) -> Tiles:
    """Those wanted on a chip of this generation, or smaller ones where the array is.

    `dim` is a multiple of LANES.
    """
    most = WANTED[chip]
    depth = max(d for d in range(LANES, most.depth + 1, LANES) if dim % d == 0)
    up = lambda x, to: -(-x // to) * to
    found = Tiles(min(most.tokens, up(tokens, STRIP)), min(most.vocab, up(vocab, LANES)), depth)
    check(chip, found, itemsize)
    return found


def needed(t: Tiles, itemsize: int) -> int:
    """Bytes of vector memory: two buffers of each input tile, the float32 product and what is made of a
    strip of it, ten columns of one number a token (as wide as LANES), two buffers of an output tile, and
    the compiler's own. The kernels are compiled with this as their limit."""
    read = 2 * (t.tokens + t.vocab) * t.depth * itemsize
    product = t.tokens * t.vocab * 4
    strip = 6 * min(STRIP, t.tokens) * t.vocab * 4
    columns = 10 * t.tokens * LANES * 4
    return read + product + strip + columns + 2 * t.tokens * t.vocab * itemsize + MIB


def check(chip: str, t: Tiles, itemsize: int) -> None:
    """ValueError that names tiles that fit, where these do not fit the device's vector memory."""
    limit = VMEM[chip]
    if needed(t, itemsize) <= limit:
        return
    smaller = t
    while needed(smaller, itemsize) > limit:
        smaller = Tiles(max(smaller.tokens // 2, LANES), max(smaller.vocab // 2, LANES), smaller.depth)
    raise ValueError(
        f"linear_logprob: {t} needs {needed(t, itemsize) / MIB:.1f} MiB of vector memory, {chip} has "
        f"{limit / MIB:.0f}; {smaller} fits ({needed(smaller, itemsize) / MIB:.1f} MiB)"
    )
