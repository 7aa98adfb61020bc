"""The decoder one token at a time: rollout's weights, its ring cache, prefill and decode.

The layers are the `block` that training runs. They are unrolled, each with arrays of its own: on a
CPU a scan would copy every weight and every cache out of its stack for every token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels.attention.reference import attention
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.params import shardings
from jaxrl_llm.models.rope import rope_tables
from jaxrl_llm.models.transformer import Layers, Transformer, attend_row, block, rms_norm, window_sizes
from jaxrl_llm.sharding.rules import Rules, constrain


class DecodeWeights(NamedTuple):
    """Weights of the policy as decoding reads them."""

    embed: Float[Array, "V D"]
    norm: Float[Array, "D"]
    head: Float[Array, "V D"] | None  # None = tied to embed
    layers: tuple[Layers, ...]  # no L dim in front


class RingCache(NamedTuple):
    """Keys and values of S slots, all written at one shared index that runs around the ring.

    A slot's newest token is at `cursor` - 1, the one before at `cursor` - 2, and so on modulo C, so a
    step writes one column for all slots, however long each is, instead of scattering.
    """

    k: tuple[Float[Array, "S K E C"], ...]  # one array a layer; C last suits q k^T
    v: tuple[Float[Array, "S K C E"], ...]
    cursor: Int[Array, ""]  # the index that the next token takes

    @property
    def length(self) -> int:
        """Tokens that a slot can hold."""
        return self.v[0].shape[2]


def decode_weights(params: Transformer, dtype: DTypeLike) -> DecodeWeights:
    """A copy of the weights for decoding: norms as they are, all others in `dtype`.

    Always a copy, so that the trainer may donate its own.
    """

    def cast(path, w):
        norm = "norm" in jax.tree_util.keystr(path)
        return jnp.copy(w if norm else w.astype(dtype))

    params = jax.tree_util.tree_map_with_path(cast, params)
    layers = (jax.tree.map(lambda w, i=i: w[i], params.layers) for i in range(params.config.num_layers))
    head = None if params.config.tie_embeddings else params.lm_head[...]
    return DecodeWeights(params.embed[...], params.norm[...], head, tuple(layers))


def decode_shardings(c: TransformerConfig, mesh: Mesh, rules: Rules) -> DecodeWeights:
    """The tree of `decode_weights` with `NamedSharding` leaves."""
    tree = shardings(c, mesh, rules)
    one_layer = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(*s.spec[1:])), tree.layers)
    head = None if c.tie_embeddings else tree.lm_head.get_value()
    return DecodeWeights(tree.embed.get_value(), tree.norm.get_value(), head, (one_layer,) * c.num_layers)


def ring_cache(c: TransformerConfig, slots: int, length: int, dtype: DTypeLike) -> RingCache:
    """Room for `slots` sequences of `length` tokens."""
    k = tuple(jnp.zeros((slots, c.num_kv_heads, c.head_dim, length), dtype) for _ in range(c.num_layers))
    v = tuple(jnp.zeros((slots, c.num_kv_heads, length, c.head_dim), dtype) for _ in range(c.num_layers))
    return RingCache(k, v, jnp.int32(0))


def logits(c: TransformerConfig, weights: DecodeWeights, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
    """Next-token logits, float32, soft-capped where the model is."""
    head = weights.embed if weights.head is None else weights.head
    out = jnp.einsum("sd,vd->sv", hidden, head, preferred_element_type=jnp.float32)
    return out if c.logit_softcap is None else c.logit_softcap * jnp.tanh(out / c.logit_softcap)


def prefill(
    c: TransformerConfig, weights: DecodeWeights, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[tuple[Float[Array, "B K E T"], ...], tuple[Float[Array, "B K T E"], ...]]:
    """Keys and values of prompts that end at the right edge of their rows.

    Args:
        tokens: row b holds its prompt in the last lengths[b] places.

    Returns: (k, v), one array a layer, laid out as in `RingCache`; what lies left of a prompt is noise.
    """
    positions = jnp.arange(tokens.shape[1]) - (tokens.shape[1] - lengths)[:, None]
    inside = positions >= 0
    distance = positions[:, :, None] - positions[:, None, :]
    visible = inside[:, :, None] & inside[:, None, :] & (distance >= 0)
    positions = jnp.maximum(positions, 0)
    tables = rope_tables(c, positions)
    x = constrain(weights.embed[tokens], "batch", "sequence", "hidden")
    ks, vs = [], []
    for layer, window in zip(weights.layers, window_sizes(c), strict=True):
        x, (k, v) = block(c, layer, x, tables, attend_row(c, visible & (distance < window)))
        ks.append(k.transpose(0, 2, 3, 1))
        vs.append(v.transpose(0, 2, 1, 3))
    return tuple(ks), tuple(vs)


def decode(
    c: TransformerConfig,
    weights: DecodeWeights,
    cache: RingCache,
    tokens: Int[Array, "S"],
    positions: Int[Array, "S"],
) -> tuple[Float[Array, "S D"], RingCache]:
    """Read one token a slot. Returns (hidden after the final norm, cache with the token in it)."""
    tables = rope_tables(c, positions[:, None])
    age = jnp.mod(cache.cursor - jnp.arange(cache.length), cache.length)
    visible = age <= positions[:, None]
    x = constrain(weights.embed[tokens][:, None], "batch", "sequence", "hidden")
    ks, vs = [], []
    for i, window in enumerate(window_sizes(c)):
        attend = _attend_ring(c, cache, i, (visible & (age < window))[:, None])
        x, (k, v) = block(c, weights.layers[i], x, tables, attend)
        ks.append(k)
        vs.append(v)
    hidden = rms_norm(x, weights.norm, c.norm_eps)[:, 0]
    return hidden, RingCache(tuple(ks), tuple(vs), jnp.mod(cache.cursor + 1, cache.length))


def _attend_ring(c: TransformerConfig, cache: RingCache, layer: int, visible: Bool[Array, "S 1 C"]):
    """`attend` of `block`: write the new key and value at the cursor, look at the slot's own past."""

    def attend(q, k, v):
        k_column = k.transpose(0, 2, 3, 1).astype(cache.k[layer].dtype)
        v_column = v.transpose(0, 2, 1, 3).astype(cache.v[layer].dtype)
        k = jax.lax.dynamic_update_slice_in_dim(cache.k[layer], k_column, cache.cursor, axis=3)
        v = jax.lax.dynamic_update_slice_in_dim(cache.v[layer], v_column, cache.cursor, axis=2)
        out = attention(
            q,
            k.transpose(0, 3, 1, 2).astype(q.dtype),
            v.transpose(0, 2, 1, 3).astype(q.dtype),
            visible,
            scale=1 / math.sqrt(c.head_dim),
            softcap=c.attention_softcap,
        )
        return out, (k, v)

    return attend
