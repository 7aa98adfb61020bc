"""The decoder. One forward serves training, scoring and rollout; families are configs of it."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.batch_invariant import rounded
from jaxrl_kernels.flash_attention import api as flash_attention
from jaxrl_kernels.flash_attention.spec import EVERYTHING
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.rope import apply_rope, rope_tables
from jaxrl_llm.sharding.rules import constrain
from jaxrl_llm.sharding.sequence import Division, arrange_rows, restore_rows, row_attention, row_division

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
SAVED = jax.checkpoint_policies.save_only_these_names(flash_attention.SAVED)
REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": SAVED,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        SAVED, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


class Layers(nnx.Module):
    """All decoder layers, each weight stacked over L in front: one name a weight, scanned."""

    def __init__(self, config: TransformerConfig, key: jax.Array):
        c, init = config, _Initializer(key, config)
        d, e = c.hidden_size, c.head_dim
        self.attention_norm = init.ones((d,), ("norm",))
        self.q = init.normal((d, c.num_heads, e), ("embed", "heads", "head_dim"))
        self.k = init.normal((d, c.num_kv_heads, e), ("embed", "kv_heads", "head_dim"))
        self.v = init.normal((d, c.num_kv_heads, e), ("embed", "kv_heads", "head_dim"))
        self.o = init.normal((c.num_heads, e, d), ("heads", "head_dim", "embed"), residual=True)
        if c.qkv_bias:
            self.q_bias = init.zeros((c.num_heads, e), ("heads", "head_dim"))
            self.k_bias = init.zeros((c.num_kv_heads, e), ("kv_heads", "head_dim"))
            self.v_bias = init.zeros((c.num_kv_heads, e), ("kv_heads", "head_dim"))
        if c.out_bias:
            self.o_bias = init.zeros((d,), ("norm",))
        if c.qk_norm:
            self.q_norm = init.ones((e,), ("head_dim",))
            self.k_norm = init.ones((e,), ("head_dim",))
        self.mlp_norm = init.ones((d,), ("norm",))
        self.gate = init.normal((d, c.mlp_size), ("embed", "mlp"))
        self.up = init.normal((d, c.mlp_size), ("embed", "mlp"))
        self.down = init.normal((c.mlp_size, d), ("mlp", "embed"), residual=True)
        if c.mlp_bias:
            self.gate_bias = init.zeros((c.mlp_size,), ("mlp",))
            self.up_bias = init.zeros((c.mlp_size,), ("mlp",))
            self.down_bias = init.zeros((d,), ("norm",))


class Transformer(nnx.Module):
    """Token ids to final hidden states. Holds weights and its config; no state, no rngs."""

    def __init__(self, config: TransformerConfig, key: jax.Array):
        self.config = config
        embed_key, layer_key, head_key = jax.random.split(key, 3)
        shape, axes = (config.vocab_size, config.hidden_size), ("vocab", "embed")
        std = config.initializer_range
        self.embed = nnx.Param(std * jax.random.normal(embed_key, shape, jnp.float32), axes=axes)
        self.layers = Layers(config, layer_key)
        self.norm = nnx.Param(jnp.ones(config.hidden_size, jnp.float32), axes=("norm",))
        if config.value_head:  # zeros: a new critic expects nothing
            self.value = nnx.Param(jnp.zeros((1, config.hidden_size), jnp.float32), axes=("norm", "norm"))
        if not config.tie_embeddings:
            self.lm_head = nnx.Param(std * jax.random.normal(head_key, shape, jnp.float32), axes=axes)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The output matrix: the embedding itself when tied."""
        return (self.embed if self.config.tie_embeddings else self.lm_head)[...]

    def values(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """What the value head reads from the final hidden states, float32."""
        return hidden.astype(jnp.float32) @ self.value[...][0]

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        *,
        dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        sequence_parallel: Division = "ring",
        strict: bool = False,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm. A token sees the earlier tokens of its own segment.

        The layers are scanned: compile time does not grow with depth.

        Args:
            tokens, positions: ids and their place in the trajectory (0-based).
            segments: which trajectory of the row each token belongs to, 0 = padding; None = one a row.
            dtype: of activations and products; norms, softmax and RoPE are float32.
            remat: what the backward pass keeps: "none" = everything; "full" = layer inputs only; "attention"
                = those and what attention found; "dots" = these and matrix products.
            sequence_parallel: how attention works where the mesh divides the tokens of a row.
            strict: every bit of a token depends on its trajectory alone, and is the one that decoding finds
                (`jaxrl_kernels.batch_invariant`); one device.
        """
        c, windows = self.config, window_sizes(self.config)
        if segments is None:
            segments = jnp.ones_like(tokens)
        division = row_division(tokens.shape[1], sequence_parallel)
        tokens, positions, segments = [arrange_rows(x, division) for x in (tokens, positions, segments)]
        by_row = row_wise(strict)
        tables = by_row(rope_of(c), None, positions, trajectory_lengths(c, positions, segments))
        table = constrain(rounded(self.embed[...], dtype), "vocab", "hidden")  # looked up by whole rows
        x = constrain(table[tokens], "batch", "sequence", "hidden")

        def body(x, layer_and_window):
            layer, window = layer_and_window
            attend = attend_row(c, segments, positions, window, division, strict)
            return block(c, computed_with(layer, dtype), x, tables, attend, strict)[0], None

        if remat != "none":
            body = jax.checkpoint(body, policy=REMAT[remat], prevent_cse=False)
        x, _ = jax.lax.scan(body, x, (self.layers, jnp.asarray(windows)))
        return restore_rows(by_row(final_norm(c), self.norm[...], x), division)


def attend_row(
    c: TransformerConfig,
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    window: int | Int[Array, ""],
    division: Division = "whole",
    strict: bool = False,
):
    """`attend` of `block` for tokens that see the earlier ones of their segment; its kv are the row's."""
    settings = {"scale": 1 / math.sqrt(c.head_dim), "softcap": c.attention_softcap}

    def at_once(q, k, v, segments, positions, window):
        return row_attention(q, k, v, segments, window=window, division=division, **settings)

    def in_order(q, k, v, segments, positions, window):
        start = jnp.arange(q.shape[1]) - positions
        return batch_invariant.attention(q, k, v, start, positions, window, **settings)

    how = functools.partial(batch_invariant.with_gradient_of, at_once, in_order) if strict else at_once
    return lambda q, k, v: (how(q, k, v, segments, positions, jnp.asarray(window)), (k, v))


def block(c: TransformerConfig, w: Layers, x, tables, attend, strict: bool = False):
    """One decoder layer. `attend(q, k, v) -> (out, kv)` decides who sees whom. Returns (x, kv).

    The weights are `computed_with` the type of x.
    """

    def bias(w, name):
        return getattr(w, name)[...] if hasattr(w, name) else 0

    def before(w, x, tables):
        h = rms_norm(x, w.attention_norm[...], c.norm_eps)
        q = project(h, w.q[...]) + bias(w, "q_bias")
        k = project(h, w.k[...]) + bias(w, "k_bias")
        v = project(h, w.v[...]) + bias(w, "v_bias")
        if c.qk_norm:
            q = rms_norm(q, w.q_norm[...], c.norm_eps)
            k = rms_norm(k, w.k_norm[...], c.norm_eps)
        return apply_rope(q, *tables), apply_rope(k, *tables), v

    def after(w, x, out):
        x = x + project(out, w.o[...]) + bias(w, "o_bias")
        x = constrain(x, "batch", "sequence", "hidden")
        with jax.named_scope("mlp"):
            h = rms_norm(x, w.mlp_norm[...], c.norm_eps)
            gate = project(h, w.gate[...]) + bias(w, "gate_bias")
            up = project(h, w.up[...]) + bias(w, "up_bias")
            hidden = constrain(ACTIVATIONS[c.activation](gate) * up, "batch", "sequence", "mlp")
            x = x + project(hidden, w.down[...]) + bias(w, "down_bias")
            return constrain(x, "batch", "sequence", "hidden")

    by_row = row_wise(strict)
    with jax.named_scope("attention"):
        q, k, v = by_row(before, w, x, tables)
        out, kv = attend(constrain(q, "batch", "sequence", "heads", "head_dim"), k, v)
    return by_row(after, w, x, out), kv


def row_wise(strict: bool):
    """How f(weights, *arrays [B, T, ...]), which treats every token alike, is called."""
    return batch_invariant.rows if strict else lambda f, weights, *xs: f(weights, *xs)


def rope_of(c: TransformerConfig):
    """`rope_tables` for `row_wise`."""
    return lambda _, positions, lengths=None: rope_tables(c, positions, lengths)


def final_norm(c: TransformerConfig):
    """The norm of the last hidden states for `row_wise`."""
    return lambda weight, x: rms_norm(x, weight, c.norm_eps)


def computed_with(weights: nnx.Module, dtype: DTypeLike) -> nnx.Module:
    """Norms as they are, all others in `dtype`."""

    def cast(path, w):
        return w if "norm" in jax.tree_util.keystr(path) else rounded(w, dtype)

    return jax.tree_util.tree_map_with_path(cast, weights)


def project(x: Float[Array, "B T *I"], w: Float[Array, "*I_and_O"]) -> Float[Array, "B T *O"]:
    """x w, summed over all dims of x but B and T; the other dims of w follow.

    On one device B and T are made one dim first: with two, XLA's CPU backend copies the transpose of
    every output gradient, and a weight's gradient takes 1.8 times as long. On several they stay apart,
    for each may be divided.
    """
    inner, outer = x.ndim - 2, x.shape[:2]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        x = x.reshape(-1, *x.shape[2:])
    return jnp.tensordot(x, w, inner).reshape(*outer, *w.shape[inner:])


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """x / sqrt(mean x^2 + eps) * weight (Zhang & Sennrich 2019), float32 inside, the type of x outside."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight).astype(x.dtype)


def trajectory_lengths(
    c: TransformerConfig, positions: Int[Array, "B T"], segments: Int[Array, "B T"]
) -> Int[Array, "B T"] | None:
    """How long the trajectory of each token is, as far as these tokens tell. None where RoPE never asks."""
    if c.rope.scaling != "dynamic":
        return None
    last = jax.vmap(lambda row, ids: jax.ops.segment_max(row, ids, row.size + 1))(positions, segments)
    return jnp.take_along_axis(last, segments, axis=1) + 1


def window_sizes(c: TransformerConfig) -> list[int]:
    """Per layer, how many tokens a token sees, itself included."""
    layers = c.window_layers or (True,) * c.num_layers
    return [c.sliding_window if on and c.sliding_window else EVERYTHING for on in layers]


class _Initializer:
    """Makes the stacked weights of `Layers`, a key of its own for each."""

    def __init__(self, key: jax.Array, config: TransformerConfig):
        self.key, self.config, self.count = key, config, 0

    def _param(self, value, axes):
        return nnx.Param(value, axes=("layers", *axes))

    def normal(self, shape, axes, residual: bool = False) -> nnx.Param:
        self.count += 1
        key = jax.random.fold_in(self.key, self.count)
        std = self.config.initializer_range
        if residual:  # GPT-2: the residual stream keeps its size whatever the depth
            std /= math.sqrt(2 * self.config.num_layers)
        return self._param(std * jax.random.normal(key, (self.config.num_layers, *shape), jnp.float32), axes)

    def ones(self, shape, axes) -> nnx.Param:
        return self._param(jnp.ones((self.config.num_layers, *shape), jnp.float32), axes)

    def zeros(self, shape, axes) -> nnx.Param:
        return self._param(jnp.zeros((self.config.num_layers, *shape), jnp.float32), axes)
