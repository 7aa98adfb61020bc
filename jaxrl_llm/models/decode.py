"""The decoder one token at a time: rollout's weights, its ring cache, prefill and decode.

The layers are the `block` that training runs. Up to UNROLLED of them are unrolled, each with arrays of
its own: on a CPU a scan copies every weight and every cache out of its stack for every token, which takes
a third more time. Deeper models are scanned, as in training: compile time does not grow with depth.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.flash_attention.reference import attention
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.params import shardings
from jaxrl_llm.models.transformer import (
    Layers,
    Transformer,
    block,
    cast_weights,
    final_norm_fn,
    make_attention_fn,
    per_token_call,
    rope_fn,
    window_sizes,
)
from jaxrl_llm.sharding.rules import Rules, constrain

UNROLLED = 12
"""Layers at most that have arrays of their own. Each costs about 0.1 s to compile, in every program."""


class DecodeWeights(NamedTuple):
    """Weights of the policy as decoding reads them."""

    embed: Float[Array, "V D"]
    norm: Float[Array, "D"]
    head: Float[Array, "V D"] | None  # None = tied to embed
    layers: tuple[Layers, ...]  # one a layer, without L in front; or, of a deep model, all in one


class RingCache(NamedTuple):
    """Keys and values of S slots, all written at one shared index that runs around the ring.

    A slot's newest token is at `cursor` - 1, the one before at `cursor` - 2, and so on modulo C, so a
    step writes one column for all slots, however long each is, instead of scattering.
    """

    k: tuple[Float[Array, "*L S K E C"], ...]  # one array a layer, or one [L, ...]; C last suits q k^T
    v: tuple[Float[Array, "*L S K C E"], ...]
    cursor: Int[Array, ""]  # the index that the next token takes

    @property
    def length(self) -> int:
        """Tokens that a slot can hold."""
        return self.v[0].shape[-2]


def is_unrolled(c: TransformerConfig) -> bool:
    """Whether every layer has arrays of its own."""
    return c.num_layers <= UNROLLED


def decode_weights(
    params: Transformer, dtype: DTypeLike, where: DecodeWeights | None = None
) -> DecodeWeights:
    """A copy of the weights for decoding: norms as they are, all others in `dtype`.

    Always a copy, so that the trainer may donate its own.

    Args:
        where: `decode_shardings` of the copy. Layers in one array then travel one by one: all at once, a TPU
            would hold what it has gathered and the copy of it.
    """
    params = jax.tree.map(jnp.copy, cast_weights(params, dtype))
    c, layers = params.config, (params.layers,)
    if is_unrolled(c):
        layers = tuple(jax.tree.map(lambda w, i=i: w[i], params.layers) for i in range(c.num_layers))
    elif where is not None:
        there = jax.tree.map(_of_one_layer, where.layers[0])
        move = lambda layer: jax.tree.map(jax.lax.with_sharding_constraint, layer, there)
        layers = (jax.lax.map(move, params.layers),)
    head = None if c.tie_embeddings else params.lm_head[...]
    return DecodeWeights(params.embed[...], params.norm[...], head, layers)


def decode_shardings(c: TransformerConfig, mesh: Mesh, rules: Rules) -> DecodeWeights:
    """The tree of `decode_weights` with `NamedSharding` leaves."""
    tree = shardings(c, mesh, rules)
    layers = (tree.layers,)
    if is_unrolled(c):
        layers = (jax.tree.map(_of_one_layer, tree.layers),) * c.num_layers
    head = None if c.tie_embeddings else tree.lm_head.get_value()
    return DecodeWeights(tree.embed.get_value(), tree.norm.get_value(), head, layers)


def _of_one_layer(stack: NamedSharding) -> NamedSharding:
    return NamedSharding(stack.mesh, PartitionSpec(*stack.spec[1:]))


def ring_cache(c: TransformerConfig, slots: int, length: int, dtype: DTypeLike) -> RingCache:
    """Room for `slots` sequences of `length` tokens."""
    arrays, depth = (c.num_layers, ()) if is_unrolled(c) else (1, (c.num_layers,))
    shape = (*depth, slots, c.num_kv_heads)
    k = tuple(jnp.zeros((*shape, c.head_dim, length), dtype) for _ in range(arrays))
    v = tuple(jnp.zeros((*shape, length, c.head_dim), dtype) for _ in range(arrays))
    return RingCache(k, v, jnp.int32(0))


def logits(
    c: TransformerConfig, weights: DecodeWeights, hidden: Float[Array, "S D"], strict: bool = False
) -> Float[Array, "S V"]:
    """Next-token logits, float32, soft-capped where the model is."""
    head = weights.embed if weights.head is None else weights.head
    found = per_token_call(strict)(batch_invariant.logits_fn(c.logit_softcap), head, hidden[:, None])
    return found[:, 0]


def prefill(
    c: TransformerConfig,
    weights: DecodeWeights,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    strict: bool = False,
) -> tuple[tuple[Float[Array, "*L B K E T"], ...], tuple[Float[Array, "*L B K T E"], ...]]:
    """Keys and values of prompts that end at the right edge of their rows.

    Args:
        tokens: row b holds its prompt in the last lengths[b] places.

    Returns: (k, v), arrays laid out as in `RingCache`; what lies left of a prompt is noise.
    """
    positions = jnp.arange(tokens.shape[1]) - (tokens.shape[1] - lengths)[:, None]
    segments, positions = (positions >= 0).astype(jnp.int32), jnp.maximum(positions, 0)
    tables = per_token_call(strict)(rope_fn(c), None, positions)

    def layer(x, w, window, *_):
        attend = make_attention_fn(c, segments, positions, window, strict=strict)
        x, (k, v) = block(c, w, x, tables, attend, strict)
        return x, (k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))

    x = constrain(weights.embed[tokens], "batch", "sequence", "hidden")
    _, kv = through_layers(c, weights.layers, layer, x)
    return tuple(k for k, _ in kv), tuple(v for _, v in kv)


def decode(
    c: TransformerConfig,
    weights: DecodeWeights,
    cache: RingCache,
    tokens: Int[Array, "S"],
    positions: Int[Array, "S"],
    strict: bool = False,
) -> tuple[Float[Array, "S D"], RingCache]:
    """Read one token a slot. Returns (hidden after the final norm, cache with the token in it)."""
    by_row, positions = per_token_call(strict), positions[:, None]
    tables = by_row(rope_fn(c), None, positions)

    def layer(carry, w, window, array, place):
        x, ks, vs = carry
        attend = _attend_ring(c, (ks[array], vs[array]), place, cache.cursor, positions, window, strict)
        x, (k, v) = block(c, w, x, tables, attend, strict)
        put = lambda arrays, new: (*arrays[:array], new, *arrays[array + 1 :])
        return (x, put(ks, k), put(vs, v)), None

    x = constrain(weights.embed[tokens][:, None], "batch", "sequence", "hidden")
    (x, ks, vs), _ = through_layers(c, weights.layers, layer, (x, cache.k, cache.v))
    hidden = by_row(final_norm_fn(c), weights.norm, x)[:, 0]
    return hidden, RingCache(ks, vs, jnp.mod(cache.cursor + 1, cache.length))


def through_layers(c: TransformerConfig, layers: tuple[Layers, ...], layer, carry):
    """`layer(carry, weights, window, array, place) -> (carry, out)` for all layers in order.

    `array` and `place` say where the layer's cache is: in place () of array 0, 1, ... where each has its
    own, in place (i,) of array 0 where all share one.

    Returns: (carry, outs): an out a layer, or one of all, stacked.
    """
    windows = window_sizes(c)
    if is_unrolled(c):
        outs = []
        for i, (weights, window) in enumerate(zip(layers, windows, strict=True)):
            carry, out = layer(carry, weights, window, i, ())
            outs.append(out)
        return carry, outs
    one = lambda carry, xs: layer(carry, xs[0], xs[1], 0, (xs[2],))
    carry, outs = jax.lax.scan(one, carry, (layers[0], jnp.asarray(windows), jnp.arange(c.num_layers)))
    return carry, [outs]


def _attend_ring(
    c: TransformerConfig, kv, place: tuple, cursor, positions: Int[Array, "S 1"], window, strict: bool
):
    """`attend` of `block`: write the new key and value at the cursor, look at the slot's own past."""

    def write(cache, column, at):
        column = jnp.expand_dims(column, tuple(range(len(place)))).astype(cache.dtype)
        cache = jax.lax.dynamic_update_slice(cache, column, (*place, *at))
        return cache, jax.lax.dynamic_index_in_dim(cache, *place, keepdims=False) if place else cache

    settings = {"scale": 1 / math.sqrt(c.head_dim), "softcap": c.attention_softcap}

    def attend(q, k, v):
        ks, k = write(kv[0], k.transpose(0, 2, 3, 1), (0, 0, 0, cursor))
        vs, v = write(kv[1], v.transpose(0, 2, 1, 3), (0, 0, cursor, 0))
        k, v = k.transpose(0, 3, 1, 2).astype(q.dtype), v.transpose(0, 2, 1, 3).astype(q.dtype)
        if strict:
            start = cursor - positions
            return batch_invariant.attention(q, k, v, start, positions, window, **settings), (ks, vs)
        age = jnp.mod(cursor - jnp.arange(k.shape[1]), k.shape[1])
        visible = (age <= positions) & (age < window)
        return attention(q, k, v, visible[:, None], **settings), (ks, vs)

    return attend
