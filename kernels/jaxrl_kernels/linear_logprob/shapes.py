"""Tiles of the TPU kernels over tokens, vocabulary and depth, and the vector memory they take."""

from __future__ import annotations

from typing import NamedTuple

from jaxrl_kernels.chips import CHIPS, LANES, MIB

STRIP = 128
"""Rows of a tile of logits that the arithmetic after the product computes together."""


class Tiles(NamedTuple):
    """Of the product [tokens, depth] x [vocab, depth]^T."""

    tokens: int
    vocab: int
    depth: int


SMALL, MEDIUM, LARGE = Tiles(512, 512, 512), Tiles(1024, 1024, 512), Tiles(2048, 1024, 512)
PREFERRED = {"v4": SMALL, "v5e": MEDIUM, "v5p": MEDIUM, "v6e": LARGE, "tpu7x": MEDIUM}
"""FLOPs a byte of bfloat16, tokens * vocab / (tokens + vocab), should exceed the chip's ratio of the two."""


def tiles(chip: str, tokens: int, vocab: int, dim: int, itemsize: int) -> Tiles:
    """Return the tiles for a chip of this generation, smaller if the array is smaller.

    Args:
        dim: a multiple of LANES.

    Raises:
        ValueError: the tiles do not fit.
    """
    preferred = PREFERRED[chip]
    depth = max(d for d in range(LANES, preferred.depth + 1, LANES) if dim % d == 0)
    up = lambda x, to: -(-x // to) * to
    chosen = Tiles(min(preferred.tokens, up(tokens, STRIP)), min(preferred.vocab, up(vocab, LANES)), depth)
    check_vmem(chip, chosen, itemsize)
    return chosen


def vmem_bytes(t: Tiles, itemsize: int) -> int:
    """Return the bytes of vector memory, the limit that the kernels are compiled with: two buffers of each
    input tile, the float32 product, temporaries of a strip of it, ten columns of one number per token (as
    wide as LANES), two buffers of an output tile, and 1 MiB for the compiler."""
    read = 2 * (t.tokens + t.vocab) * t.depth * itemsize
    product = t.tokens * t.vocab * 4
    strip = 6 * min(STRIP, t.tokens) * t.vocab * 4
    columns = 10 * t.tokens * LANES * 4
    return read + product + strip + columns + 2 * t.tokens * t.vocab * itemsize + MIB


def check_vmem(chip: str, t: Tiles, itemsize: int) -> None:
    """Refuse tiles that do not fit the vector memory.

    Raises:
        ValueError: the message names tiles that fit.
    """
    limit = CHIPS[chip].scratchpad
    if vmem_bytes(t, itemsize) <= limit:
        return
    smaller = t
    while vmem_bytes(smaller, itemsize) > limit:
        smaller = Tiles(max(smaller.tokens // 2, LANES), max(smaller.vocab // 2, LANES), smaller.depth)
    raise ValueError(
        f"linear_logprob: {t} needs {vmem_bytes(t, itemsize) / MIB:.1f} MiB of vector memory, {chip} has "
        f"{limit / MIB:.0f}; {smaller} fits ({vmem_bytes(smaller, itemsize) / MIB:.1f} MiB)"
    )
