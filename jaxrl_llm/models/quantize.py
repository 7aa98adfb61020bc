"""Frozen weights in 8 or 4 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314); the numbers are qwix's.

A quantized weight is two leaves of the model: "layers.q" [L, D, H, E] holds codes, int8 or uint4, and
"layers.q_scale" [L, D / 64, H, E] a float32 scale for each tile of 64 inputs. An int8 code is a multiple of
the scale; an nf4 code (NormalFloat, appendix E of the paper) is the index of a level between -1 and 1, which
the scale multiplies. Two uint4 codes share a byte on TPU and GPU, but not on a CPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import qwix
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxrl_kernels.batch_invariant import rounded

SCALE = "_scale"  # ends the names of scales
TILE = 64
QWIX = {"int8": (jnp.int8, f"absmax,{127.5 / 127}"), "nf4": ("nf4", "absmax")}
"""`--lora.quantize` -> qwix's type and calibration. qwix's default for int8 makes the largest weight 127.5
scales, and rounding this tie depends on the last bit of a division."""


def tile_size(dim: int) -> int:
    """Return the number of inputs that share a scale: TILE, or the largest smaller divisor of the dim."""
    return next(size for size in range(min(TILE, dim), 0, -1) if dim % size == 0)


@functools.partial(jax.jit, static_argnames=("kind", "axis"))
def quantize_weight(
    weight: Float[Array, "*dims"], kind: str, axis: int
) -> tuple[Integer[Array, "*dims"], Float[Array, "*tiles"]]:
    """Return (codes, scales) of a weight. Compiled, so that all callers get the same bits.

    Args:
        kind: key of QWIX.
        axis: dim that is divided into tiles, an input of the matrix.

    Quantizes tiles under `vmap`: qwix flattens its argument, which would gather a sharded weight.
    """
    qtype, calibration = QWIX[kind]

    def one(tile):
        tile = tile.astype(jnp.float32)
        quantized = qwix.quantize(tile, qtype, tiled_axes={0: tile.size}, calibration_method=calibration)
        return quantized.qvalue, quantized.scale

    codes, scale = jnp.vectorize(one, signature="(t)->(t),(u)")(_tiles(weight, axis))
    return jnp.moveaxis(codes, -1, axis + 1).reshape(weight.shape), scale[..., 0]


def dequantize_weight(
    codes: Integer[Array, "*dims"], scale: Float[Array, "*tiles"], dtype: DTypeLike
) -> Float[Array, "*dims"]:
    """Return the weight of these codes and scales, multiplied in float32 and rounded to `dtype`.

    Equal to `qwix.dequantize`, which flattens nf4 codes and looks up each: flattening would gather a sharded
    weight, and looking up single numbers is slow.
    """
    values = _nf4_levels(codes) if codes.dtype == jnp.uint4 else codes.astype(jnp.float32)
    for axis, (size, tiles) in enumerate(zip(codes.shape, scale.shape, strict=True)):
        scale = scale if size == tiles else jnp.repeat(scale, size // tiles, axis)
    return rounded(values * scale, dtype)


def _nf4_levels(codes: Integer[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Return the levels of codes, by a tree of selections with one level per bit."""
    table = qwix.dequantize(qwix.QArray(jnp.arange(16).astype(jnp.uint4), jnp.ones(1), None, "nf4"))
    levels = [table[i] for i in range(16)]
    codes = codes.astype(jnp.uint8)
    for bit in range(4):
        is_set = (codes & (1 << bit)) > 0
        levels = [jnp.where(is_set, high, low) for low, high in zip(levels[::2], levels[1::2], strict=True)]
    return levels[0]


def _tiles(x: jax.Array, axis: int) -> jax.Array:
    """Return x with its tiles along a last dim: [D, H, E] as [D / t, H, E, t] for axis 0."""
    shape = (*x.shape[:axis], -1, tile_size(x.shape[axis]), *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, -1)
