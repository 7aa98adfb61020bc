"""Optimizer states around optax's: 8-bit moments, remainders of bfloat16 weights, averages of the weights.

Each wraps an optax transformation, whose arithmetic stays float32. Rounding needs no random numbers, so a
resumed run is bit-equal, and blocks are parts of whole rows, so every mesh has the codes of one device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Int8, UInt8

from jaxrl_llm.models.experts.router import reads_float32
from jaxrl_llm.models.lora import split_params
from jaxrl_llm.sharding.rules import on_device, on_host
from jaxrl_llm.structs import Params, TrainState

BLOCK = 128  # numbers that share a scale, at most: a row of a TPU register
MIN_BLOCK, MIN_SIZE = 16, 4096  # leaves that are smaller, or have smaller blocks, stay float32
OCTAVES = 40  # below the largest second moment of a block: 2^-40 is 1e-12
FIRST, SECOND = {"mu", "trace"}, {"nu"}  # fields of optax's states that hold moments
ONE = 0x3F800000  # bits of 1.0
CODE = OCTAVES * 2**23 / 254  # float32 bit patterns between two codes of a second moment


class Quantized(NamedTuple):
    """An 8-bit moment."""

    codes: Int8[Array, "*dims"] | UInt8[Array, "*dims"]
    scale: Float[Array, "*dims"]  # the largest absolute value of each block of the last dim


class MasterState(NamedTuple):
    """State of `store_remainders`: for each weight that is stored in bfloat16 the rest of its float32."""

    remainders: Params  # int16; MaskedNode for weights that are stored in float32
    inner: Any


class EmaState(NamedTuple):
    """State of `average_weights`."""

    ema: Params  # float32
    inner: Any


class QuantizedState(NamedTuple):
    """State of `quantize_moments`."""

    count: Int[Array, ""]
    inner: Any


def quantize_moments(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the transformation with its moments stored in 8 bits, in blocks with a float32 scale each.

    Moments of embeddings, norms, biases, decays and skips of states, and small leaves stay float32.
    """

    def init(params):
        return QuantizedState(jnp.zeros((), jnp.int32), _encode(inner.init(params), 0))

    def update(updates, state, params=None):
        count = optax.safe_increment(state.count)
        updates, new = inner.update(updates, _decode(state.inner), params)
        return updates, QuantizedState(count, _encode(new, count))

    return optax.GradientTransformation(init, update)


def store_remainders(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the transformation of float32 weights whose state holds what bfloat16 drops of the new weights.

    Nothing is lost: a float32 is the bits of its bfloat16 and 16 more (`store_param_remainders` of NVIDIA's
    Transformer Engine). `master_weights` and `stored_weights` are the two directions.
    """

    def init(params):
        return MasterState(_remainders(params), inner.init(params))

    def update(updates, state, params=None):
        updates, new = inner.update(updates, state.inner, params)
        return updates, MasterState(_remainders(optax.apply_updates(params, updates)), new)

    return optax.GradientTransformation(init, update)


def average_weights(inner: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Return the transformation with e = decay e + (1 - decay) w of the new weights w in its state.

    The average starts at the weights before the first update, as in OpenRLHF, so it has no bias to correct.
    """

    def init(params):
        return EmaState(jax.tree.map(lambda w: jnp.copy(w).astype(jnp.float32), params), inner.init(params))

    def update(updates, state, params=None):
        updates, new = inner.update(updates, state.inner, params)
        weights = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, w: e + (1 - decay) * (w - e), state.ema, weights)
        return updates, EmaState(ema, new)

    return optax.GradientTransformation(init, update)


def averaged_weights(opt_state: Any) -> Params | None:
    """Return the moving average of the trained weights, which may be in host memory, or None."""
    if isinstance(opt_state, MasterState):
        opt_state = opt_state.inner
    return opt_state.ema if isinstance(opt_state, EmaState) else None


def master_weights(params: Params, opt_state: Any) -> Params:
    """Return the float32 weights of stored ones."""
    if not isinstance(opt_state, MasterState):
        return params

    def join(low, weight):
        if isinstance(low, optax.MaskedNode):
            return weight
        high = jax.lax.bitcast_convert_type(weight, jnp.int16).astype(jnp.int32) << 16
        return jax.lax.bitcast_convert_type(high + low, jnp.float32)

    return jax.tree.map(join, opt_state.remainders, params, is_leaf=is_moment)


def float32_params(state: TrainState) -> Params:
    """Return the float32 weights of a state, for a new optimizer."""
    if not isinstance(state.opt_state, MasterState):
        return state.params
    low = jax.tree.map(lambda x: jax.device_put(x, on_device(x.sharding)), state.opt_state.remainders)
    return jax.jit(master_weights)(state.params, MasterState(low, None))


def stored_weights(params: Params, opt_state: Any) -> Params:
    """Return float32 weights in the types in which they are stored: the nearest bfloat16, or float32.

    Ties round away from 0: the 16 bits of a remainder imply it.
    """
    if not isinstance(opt_state, MasterState):
        return params

    def high(low, weight):
        if isinstance(low, optax.MaskedNode):
            return weight
        return jax.lax.bitcast_convert_type(_high_bits(weight).astype(jnp.int16), jnp.bfloat16)

    return jax.tree.map(high, opt_state.remainders, params, is_leaf=is_moment)


def is_moment(x: Any) -> bool:
    """Return whether a node of an optimizer's state stands for one weight without being an array."""
    return isinstance(x, Quantized | optax.MaskedNode)


def quantize_first(x: Float[Array, "*dims"]) -> Quantized:
    """Return a first moment as int8 of softsign(x / scale): algorithm 2 of FlashOptim, arXiv 2602.23349.

    An error is at most 1/127 of the largest value of the block, and 1/254 of it near 0.
    """
    blocks, scale = _blocks(x)
    y = blocks / jnp.where(scale > 0, scale, 1)[..., None]
    return Quantized(jnp.round(127 * 2 * y / (1 + jnp.abs(y))).astype(jnp.int8).reshape(x.shape), scale)


def quantize_second(x: Float[Array, "*dims"], count: Int[Array, ""] | int) -> Quantized:
    """Return a second moment as uint8 of its float32 bit pattern, which is about its logarithm.

    FlashOptim's square root keeps 5 decades of a block, and below them 0, by which Adam divides. This code
    keeps 12, with an error of at most 1/6 of each value; smaller values become the smallest of them. With
    b2 = 0.999 a step changes a moment by far less than that, and rounding to the nearest would undo it. So
    codes are rounded up in the fraction of steps that makes the mean right: by a Weyl sequence of step and
    place.

    Args:
        count: of the update.
    """
    blocks, scale = _blocks(x)
    bits = jax.lax.bitcast_convert_type(blocks / jnp.where(scale > 0, scale, 1)[..., None], jnp.int32)
    weyl = jnp.uint32(count) * jnp.uint32(0x9E3779B9)
    for axis in range(x.ndim):
        weyl += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(0xC13FA9A9 + 2 * axis)
    fraction = (weyl >> 8).astype(jnp.float32).reshape(blocks.shape) / 2**24
    codes = jnp.clip(jnp.floor(255 + (bits - ONE).astype(jnp.float32) / CODE + fraction), 1, 255)
    return Quantized(jnp.where(blocks > 0, codes, 0).astype(jnp.uint8).reshape(x.shape), scale)


def dequantize(moment: Quantized) -> Float[Array, "*dims"]:
    """Return the float32 moment."""
    codes = moment.codes.reshape(*moment.scale.shape, -1).astype(jnp.float32)
    if moment.codes.dtype == jnp.int8:
        y = codes / 127
        values = y / (2 - jnp.abs(y))
    else:
        bits = ONE + jnp.round((codes - 255) * CODE).astype(jnp.int32)
        values = jnp.where(codes > 0, jax.lax.bitcast_convert_type(bits, jnp.float32), 0)
    return (values * moment.scale[..., None]).reshape(moment.codes.shape)


def state_shardings(
    state: TrainState, optimizer: optax.GradientTransformation, params: Params, *, offload: bool = False
) -> TrainState:
    """Return shardings of the state: moments are sharded as their weights, counters are replicated.

    Args:
        state: abstract.
        params: shardings of the weights.
        offload: moments are in host memory.
    """
    place = on_host if offload else lambda sharding: sharding
    replicated = NamedSharding(jax.tree.leaves(params)[0].mesh, PartitionSpec())

    def like_weight(moment, p, s):
        if isinstance(moment, optax.MaskedNode):  # of optax.partition: its other part updates it
            return moment
        return moment_shardings(moment, p.shape, place(s), replicated)

    opt = optax.tree.map_params(
        optimizer,
        like_weight,
        state.opt_state,
        *(split_params(tree)[0] for tree in (state.params, params)),
        transform_non_params=lambda _: replicated,
        is_leaf=is_moment,
    )
    return replace(jax.tree.map(lambda _: replicated, state), params=params, opt_state=opt)


def moment_shardings(moment: Any, shape: tuple[int, ...], like: NamedSharding, other: NamedSharding) -> Any:
    """Return the sharding of a moment: its weight's sharding for codes and for arrays of the weight's shape.

    Args:
        moment: abstract, an array or `Quantized`.
        shape: of the weight, whose sharding is `like`.
        other: for arrays of other shapes.
    """
    if not isinstance(moment, Quantized):
        return like if moment.shape == shape else other
    shards = shape[-1] // like.shard_shape(shape)[-1]
    spec = like.spec if moment.scale.shape[-1] % shards == 0 else like.spec[:-1]
    scale = NamedSharding(like.mesh, PartitionSpec(*spec), memory_kind=like.memory_kind)
    return Quantized(like, scale)


def _remainders(params: Params) -> Params:
    """Return the remainders of the weights that the forward pass rounds (`reads_float32`)."""

    def low(path, weight):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        if reads_float32(name):
            return optax.MaskedNode()
        bits = jax.lax.bitcast_convert_type(weight, jnp.int32)
        return (bits - (_high_bits(weight) << 16)).astype(jnp.int16)

    return jax.tree_util.tree_map_with_path(low, params)


def _high_bits(weight: Float[Array, "*dims"]) -> Int[Array, "*dims"]:
    """Return the bits of the nearest bfloat16, as the upper half of an int32 shifted down."""
    return (jax.lax.bitcast_convert_type(weight, jnp.int32) + 0x8000) >> 16


def _blocks(x: Float[Array, "*dims"]) -> tuple[Float[Array, "*dims_and_block"], Float[Array, "*blocks"]]:
    """Return the last dim in blocks, and the largest absolute value of each."""
    blocks = x.reshape(*x.shape[:-1], -1, _block_size(x.shape[-1]))
    return blocks, jnp.max(jnp.abs(blocks), axis=-1)


def _block_size(dim: int) -> int:
    """Return the largest divisor that is at most BLOCK."""
    return max(size for size in range(1, BLOCK + 1) if dim % size == 0)


def _encode(state: Any, count: Int[Array, ""] | int) -> Any:
    def one(path, x):
        names = set(jax.tree_util.keystr(path, simple=True, separator=".").split("."))
        exempt = any(word in name for name in names for word in ("embed", "norm", "bias", "a_log", "skip"))
        if exempt or x.ndim < 2 or x.size < MIN_SIZE or _block_size(x.shape[-1]) < MIN_BLOCK:
            return x
        if names & SECOND:
            return quantize_second(x, count)
        return quantize_first(x) if names & FIRST else x

    return jax.tree_util.tree_map_with_path(one, state)


def _decode(state: Any) -> Any:
    is_quantized = lambda x: isinstance(x, Quantized)
    return jax.tree.map(lambda x: dequantize(x) if is_quantized(x) else x, state, is_leaf=is_quantized)
