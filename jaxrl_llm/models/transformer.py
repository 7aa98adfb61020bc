"""The decoder: one forward function for training, scoring and rollout; a model family is a config."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.batch_invariant import rounded
from jaxrl_kernels.flash_attention.spec import NO_WINDOW
from jaxrl_llm.models.attention import (
    apply_rope,
    attention_scale,
    rope_fn,
    sinks_of,
    trajectory_lengths,
    window_sizes,
    window_spans,
)
from jaxrl_llm.models.config import MLP, MoEConfig, TransformerConfig, layer_stacks, linear_layers
from jaxrl_llm.models.experts.router import RoutingSums, join_routes, reads_float32, routing_sums, sparse_mlp
from jaxrl_llm.models.linear import Initializer, apply_linear, matrix_dims, rms_norm
from jaxrl_llm.models.mla import DecodeLatents, add_latent_weights, decode_latents, expand_latents
from jaxrl_llm.models.quantize import SCALE, quantize_weight
from jaxrl_llm.models.remat import LAYER_INPUT, REMAT
from jaxrl_llm.sharding.attention import (
    ContextParallel,
    context_parallel,
    reorder_tokens,
    restore_tokens,
    sharded_attention,
)
from jaxrl_llm.sharding.rules import (
    TRAIN,
    Rules,
    constrain,
    constrain_residual,
    fetch,
    gather_tokens,
    look_up,
)

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Layers(nnx.Module):
    """Equal decoder layers, each weight stacked along a leading dim L, for a scan.

    Args:
        config: of this stack (`layer_stacks`).
        depth: layers of the whole model.
    """

    def __init__(self, config: TransformerConfig, key: jax.Array, depth: int):
        c, init = config, Initializer(key, config, depth)
        d = c.hidden_size
        # Attention.
        self.attention_norm = init.ones((d,), ("norm",))
        if c.mla:
            add_latent_weights(self, c, init)
        else:
            self._add_attention(c, init)
        if c.out_bias:
            self.o_bias = init.zeros((d,), ("norm",))
        if c.attention_sinks:
            self.sinks = init.zeros((c.num_heads,), ("heads",))
        # Feed-forward, dense or experts.
        self.mlp_norm = init.ones((d,), ("norm",))
        if size := c.moe.shared_size if c.moe else c.mlp_size:
            self.gate = init.normal((d, size), ("embed", "mlp"))
            self.up = init.normal((d, size), ("embed", "mlp"))
            self.down = init.normal((size, d), ("mlp", "embed"), residual=True)
        if c.mlp_bias:
            self.gate_bias = init.zeros((c.mlp_size,), ("mlp",))
            self.up_bias = init.zeros((c.mlp_size,), ("mlp",))
            self.down_bias = init.zeros((d,), ("norm",))
        if c.moe:
            self._add_experts(c.moe, d, init)
        # Adapters and codes come last, beside the weights that they belong to.
        if c.quantize != "none":
            for name in (*linear_layers(c).values(), *(f"expert_{name}" for name in MLP)):
                if hasattr(self, name):
                    self._quantize(name, c.quantize)
        if c.lora:
            for name, (rank, _) in c.adapters.items():
                self._add_adapter(name, rank, init)

    def _add_attention(self, c: TransformerConfig, init: Initializer) -> None:
        d, e = c.hidden_size, c.head_dim
        self.q = init.normal((d, c.num_heads, e), ("embed", "heads", "head_dim"))
        self.k = init.normal((d, c.num_kv_heads, e), ("embed", "kv_heads", "head_dim"))
        self.v = init.normal((d, c.num_kv_heads, e), ("embed", "kv_heads", "head_dim"))
        self.o = init.normal((c.num_heads, e, d), ("heads", "head_dim", "embed"), residual=True)
        if c.qkv_bias:
            self.q_bias = init.zeros((c.num_heads, e), ("heads", "head_dim"))
            self.k_bias = init.zeros((c.num_kv_heads, e), ("kv_heads", "head_dim"))
            self.v_bias = init.zeros((c.num_kv_heads, e), ("kv_heads", "head_dim"))
        if c.qk_norm:
            q_width, k_width = (c.num_heads * e, c.num_kv_heads * e) if c.qk_norm_over_heads else (e, e)
            self.q_norm = init.ones((q_width,), ("head_dim",))
            self.k_norm = init.ones((k_width,), ("head_dim",))

    def _add_experts(self, moe: MoEConfig, d: int, init: Initializer) -> None:
        shape, axes = (moe.num_experts, d, moe.expert_size), ("experts", "expert_embed", "expert_mlp")
        self.router = init.normal((d, moe.num_experts), ("router", "router"))
        self.expert_gate = init.normal(shape, axes)
        self.expert_up = init.normal(shape, axes)
        down = (moe.num_experts, moe.expert_size, d), ("experts", "expert_mlp", "expert_embed")
        self.expert_down = init.normal(*down, residual=True)
        if moe.bias:
            self.router_logit_bias = init.zeros((moe.num_experts,), ("router",))
            self.expert_gate_bias = init.zeros((moe.num_experts, moe.expert_size), ("experts", "expert_mlp"))
            self.expert_up_bias = init.zeros((moe.num_experts, moe.expert_size), ("experts", "expert_mlp"))
            self.expert_down_bias = init.zeros((moe.num_experts, d), ("experts", "expert_embed"))
        if moe.selection_bias:
            self.router_bias = init.zeros((moe.num_experts,), ("router",))
        if moe.shared_size and moe.shared_gate:
            self.shared_gate = init.normal((d, 1), ("router", "router"))

    def _quantize(self, name: str, kind: str) -> None:
        """Replace a weight by its codes, and add their scales."""
        weight = getattr(self, name)
        axes = weight.get_metadata("axes")
        codes, scale = quantize_weight(weight[...], kind, matrix_dims(axes)[0][-1])
        setattr(self, name, nnx.Param(codes, axes=axes))
        setattr(self, name + SCALE, nnx.Param(scale, axes=axes))

    def _add_adapter(self, name: str, rank: int, init: Initializer) -> None:
        """Add A, uniform as in PEFT, and B, zero, for a weight, so that outputs are unchanged at first."""
        weight = getattr(self, name)
        axes, shape = weight.get_metadata("axes")[1:], weight.shape[1:]
        inner = matrix_dims(weight.get_metadata("axes"))[0]
        first, end = inner[0] - 1, inner[-1]  # after the dim of experts, if any
        bound = 1 / math.sqrt(math.prod(shape[first:end]))
        a = init.uniform((*shape[:end], rank), (*axes[:end], "rank"), bound)
        b = (*shape[:first], rank, *shape[end:]), (*axes[:first], "rank", *axes[end:])
        setattr(self, f"{name}_lora_a", a)
        setattr(self, f"{name}_lora_b", init.zeros(*b))


class Transformer(nnx.Module):
    """The decoder: weights and config, no other state. Call it on token ids for final hidden states."""

    def __init__(self, config: TransformerConfig, key: jax.Array):
        self.config = config
        embed_key, layer_key, head_key = jax.random.split(key, 3)
        shape, axes = (config.vocab_size, config.hidden_size), ("vocab", "embed")
        std = config.initializer_range
        self.embed = nnx.Param(std * jax.random.normal(embed_key, shape, jnp.float32), axes=axes)
        for name, stack in layer_stacks(config).items():
            key = layer_key if name == "layers" else jax.random.fold_in(layer_key, 0)
            setattr(self, name, Layers(stack, key, config.num_layers))
        self.norm = nnx.Param(jnp.ones(config.hidden_size, jnp.float32), axes=("norm",))
        if config.value_head:  # zeros: a new critic predicts 0
            self.value = nnx.Param(jnp.zeros((1, config.hidden_size), jnp.float32), axes=("norm", "norm"))
        if not config.tie_embeddings:
            self.lm_head = nnx.Param(std * jax.random.normal(head_key, shape, jnp.float32), axes=axes)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The LM head: the embedding itself when tied."""
        return fetch((self.embed if self.config.tie_embeddings else self.lm_head)[...])

    def values(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """Apply the value head to final hidden states, in float32."""
        return hidden.astype(jnp.float32) @ fetch(self.value[...])[0]

    def __call__(self, *args, **settings) -> Float[Array, "B T D"]:
        """Return the hidden states of `forward`."""
        return self.forward(*args, **settings)[0]

    def forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        routes: UInt[Array, "B T L K"] | None = None,
        *,
        last: Int[Array, "B T"] | None = None,
        dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        sequence_parallel: ContextParallel = "ring",
        strict: bool = False,
    ) -> tuple[Float[Array, "B T D"], RoutingSums | None, UInt[Array, "B T L K"] | None]:
        """Compute hidden states after the final norm. A token attends to earlier tokens of its segment, and
        of the segments that it continues.

        Equal layers are scanned: compile time does not grow with depth.

        Args:
            tokens, positions: ids and their positions in the trajectory (0-based).
            segments: number of each token's trajectory, or of a prefix that several trajectories share: 1, 2,
                ... in the order of the row, 0 = padding; None = one per row.
            last: number of the last segment that continues each token's segment (`flash_attention`); None =
                no segment continues another.
            routes: experts of each token (`moe.route_spec`); None = the routers choose.
            dtype: of activations and products; norms, softmax and RoPE are float32.
            remat: results saved for the backward pass: "none" = all; "dots" = layer inputs, attention outputs
                and matrix products; "attention" = layer inputs and attention outputs; "full" = layer inputs;
                "offload" = layer inputs, in host memory.
            sequence_parallel: method of context parallelism if the mesh shards the tokens of a row.
            strict: a token's bits depend only on its trajectory, and equal the bits of decoding
                (`jaxrl_kernels.batch_invariant`); one device.

        Returns: (hidden states, sums of the routing, routes); the last two are None without experts.

        Raises:
            ValueError: `last` with dynamic RoPE, which reads the length of a trajectory.
        """
        c = self.config
        if last is not None and c.rope.scaling == "dynamic":
            raise ValueError("dynamic RoPE takes no shared prefixes (`last`)")
        if segments is None:
            segments = jnp.ones_like(tokens)
        # Context parallelism may reorder the tokens of a row, so that devices have equal work.
        method = context_parallel(tokens.shape[1], sequence_parallel)
        rows = tokens, positions, segments, last, window_spans(c, segments, last, positions)
        tokens, positions, segments, last, spans = jax.tree.map(lambda x: reorder_tokens(x, method), rows)
        readers = jnp.where(segments > 0, 1 if last is None else last - segments + 1, 0)
        per_token = per_token_call(strict)
        rope = per_token(rope_fn(c), None, positions, trajectory_lengths(c, positions, segments))
        x = constrain_residual(look_up(fetch(self.embed[...]), tokens, dtype))

        if routes is not None:
            routes = jnp.moveaxis(reorder_tokens(routes, method), 2, 0)

        def body(c, x, layer_inputs):
            layer, window, routes = layer_inputs
            x, w = checkpoint_name(x, LAYER_INPUT), cast_weights(layer, dtype)
            attention_fn = make_attention_fn(
                c, w, segments, positions, window=window, last=last, spans=spans, method=method, strict=strict
            )
            x, _, routing = block(
                c, w, x, rope, attention_fn=attention_fn, strict=strict, valid=segments > 0, routes=routes
            )
            return x, routing and (routing_sums(c.moe, routing, readers), routing.chosen)

        for name, stack in layer_stacks(c).items():
            layer = functools.partial(body, stack)
            if remat != "none" or stack.moe:
                layer = jax.checkpoint(layer, policy=REMAT[remat], prevent_cse=False)
            inputs = getattr(self, name), jnp.asarray(window_sizes(stack)), routes if stack.moe else None
            x, routing = jax.lax.scan(layer, x, inputs)
        x = per_token(final_norm_fn(c), fetch(self.norm[...]), x)
        hidden = restore_tokens(constrain(x, "batch", "sequence", "hidden"), method)
        sums, chosen = routing or (None, None)
        return hidden, sums, None if chosen is None else restore_tokens(join_routes(c, chosen), method)


def make_attention_fn(
    c: TransformerConfig,
    w: Layers,
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    window: int | Int[Array, ""],
    last: Int[Array, "B T"] | None = None,
    spans: Int[Array, "B T"] | None = None,
    method: ContextParallel = "none",
    strict: bool = False,
):
    """Return the `attention_fn` of `block` for causal attention within the segments of a row.

    Args:
        window: tokens of its sequence that a token attends to, including itself.
        spans: tokens of the row that contain the window (`row_windows`); None = the same number.
    """
    settings = {"scale": attention_scale(c), "softcap": c.attention_softcap}

    def plain(q, k, v, segments, last, spans, positions, window, sinks):
        window = window if spans is None else jnp.where(window == NO_WINDOW, NO_WINDOW, spans)
        known = {"windows": tuple(sorted(set(window_sizes(c)))), "method": method}
        return sharded_attention(q, k, v, segments, last, window=window, sinks=sinks, **known, **settings)

    def exact(q, k, v, segments, last, spans, positions, window, sinks):
        ring = batch_invariant.RingKeys(jnp.arange(q.shape[1]) - positions)
        where = ring if last is None else batch_invariant.RowKeys(segments, last)
        return batch_invariant.invariant_attention(q, k, v, where, positions, window, sinks=sinks, **settings)

    attend = functools.partial(batch_invariant.straight_through, plain, exact) if strict else plain
    rest = segments, last, spans, positions, jnp.asarray(window), sinks_of(w)
    return lambda q, k, v: (attend(q, k, v, *rest), (k, v))


def block(
    c: TransformerConfig,
    w: Layers,
    x,
    rope,
    *,
    attention_fn,
    strict: bool = False,
    valid: Bool[Array, "B T"] | None = None,
    rules: Rules = TRAIN,
    routes: UInt[Array, "B T K"] | None = None,
):
    """Compute one decoder layer. Returns (x, kv, routing); the last is None without experts.

    Args:
        w: the layer's weights, cast to the type of x by `cast_weights`.
        rope: (cos, sin) of every position.
        attention_fn: (q, k, v) -> (out, kv); applies the mask, reads and writes the KV cache. DecodeLatents
            for a cache of latents. With latent attention, kv are latents except in strict mode.
        strict: batch-invariant.
        valid: False = padding, which no expert computes; None = all tokens are valid.
        rules: sharding of the experts.
        routes: see `sparse_mlp`.
    """
    linear = functools.partial(apply_linear, c)

    def norm(x, weight):
        return gather_tokens(rms_norm(x, weight, c.norm_eps))

    def before_attention(w, x, rope):
        return (expand_latents if c.mla else project_heads)(c, w, norm(x, w.attention_norm[...]), rope)

    def add_attention(w, x, out):
        return constrain_residual(x + linear(w, "o", out))

    def after_attention(w, x, out):
        x = add_attention(w, x, out)
        with jax.named_scope("mlp"):
            return constrain_residual(x + mlp(c, w, norm(x, w.mlp_norm[...])))

    def add_shared_expert(w, h, y):
        out = mlp(c, w, h)
        return y + (jax.nn.sigmoid(linear(w, "shared_gate", h)) * out if c.moe.shared_gate else out)

    per_token = per_token_call(strict)
    # Strict mode computes the steps between attention and experts token by token.
    with jax.named_scope("attention"):
        if isinstance(attention_fn, DecodeLatents):
            out, kv = decode_latents(c, w, norm(x, w.attention_norm[...]), rope, attention_fn=attention_fn)
        else:
            q, k, v, latents = per_token(before_attention, w, x, rope)
            out, kv = attention_fn(constrain(q, "batch", "sequence", "heads", "head_dim"), k, v)
            if c.mla:
                out, kv = out[..., : c.mla.value_dim], kv if strict else (latents, None)
    if not c.moe:
        return per_token(after_attention, w, x, out), kv, None
    x = per_token(add_attention, w, x, out)
    with jax.named_scope("experts"):
        h = per_token(lambda w, x: norm(x, w.mlp_norm[...]), w, x)
        experts = functools.partial(sparse_mlp, valid=valid, rules=rules, strict=strict, routes=routes)
        y, routing = experts(c, w, h, ACTIVATIONS[c.activation])
        y = per_token(add_shared_expert, w, h, y) if c.moe.shared_size else y
        return constrain_residual(x + y), kv, routing


def project_heads(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"], rope):
    """Return (q, k, v, None); the last is the MLA latents."""
    q, k, v = (apply_linear(c, w, name, h) for name in "qkv")
    if c.qk_norm:
        q, k = _qk_norm(c, q, w.q_norm[...]), _qk_norm(c, k, w.k_norm[...])
    return apply_rope(q, *rope), apply_rope(k, *rope), v, None


def _qk_norm(c: TransformerConfig, x: Float[Array, "B T H E"], weight: Array) -> Float[Array, "B T H E"]:
    flat = x.reshape(*x.shape[:2], -1) if c.qk_norm_over_heads else x
    return rms_norm(flat, weight, c.norm_eps).reshape(x.shape)


def mlp(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Apply the dense gated feed-forward."""
    gate, up = apply_linear(c, w, "gate", h), apply_linear(c, w, "up", h)
    hidden = constrain(ACTIVATIONS[c.activation](gate) * up, "batch", "sequence", "mlp")
    return apply_linear(c, w, "down", hidden)


def per_token_call(strict: bool):
    """Return a function that applies f(weights, *arrays [B, T, ...]) per token: call(f, weights, *arrays)."""
    return batch_invariant.map_tokens if strict else lambda f, weights, *xs: f(weights, *xs)


def final_norm_fn(c: TransformerConfig):
    """Return the final norm as a function for `per_token_call`."""
    return lambda weight, x: rms_norm(x, weight, c.norm_eps)


def cast_weights(weights: nnx.Module, dtype: DTypeLike) -> nnx.Module:
    """Cast weights to `dtype`, except codes and weights that the forward pass reads in float32.

    Weights in host memory are copied to the devices.
    """

    def cast(path, w):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        w = fetch(w)
        kept = reads_float32(name) or not jnp.issubdtype(w.dtype, jnp.floating)
        return w if kept else rounded(w, dtype)

    return jax.tree_util.tree_map_with_path(cast, weights)
