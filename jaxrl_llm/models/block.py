"""One decoder layer: norms, attention, feed-forward or experts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.flash_attention.spec import NO_WINDOW
from jaxrl_llm.models.attention import (
    RopeTables,
    add_alibi,
    apply_rope,
    attention_scale,
    grow_queries,
    sinks_of,
    window_sizes,
)
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.experts.router import sparse_mlp
from jaxrl_llm.models.indexer import make_selected_fn, pack_keys
from jaxrl_llm.models.linear import apply_linear, normalize, rms_norm
from jaxrl_llm.models.mla import DecodeLatents, decode_latents, expand_latents
from jaxrl_llm.models.recurrent import RECURRENT
from jaxrl_llm.models.rows import Packing, per_token_call
from jaxrl_llm.models.shared_kv import KeysValues
from jaxrl_llm.sharding.attention import ContextParallel, over_whole_rows, sharded_attention
from jaxrl_llm.sharding.rules import TRAIN, Rules, constrain, constrain_residual, gather_tokens

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def make_attention_fn(
    c: TransformerConfig,
    w: Layers,
    rows: Packing,
    *,
    window: int | Int[Array, ""],
    method: ContextParallel = "none",
    strict: bool = False,
    shared: KeysValues | UInt[Array, "B T W"] | None = None,
):
    """Return the `attention_fn` of `block` for whole rows: causal attention within the segments of a row, or
    the layer's recurrence. None for a layer that does not mix tokens.

    Args:
        rows: in the order of `method` for attention, in natural order for a recurrence.
        window: tokens of its sequence that a token attends to, including itself.
        shared: keys and values of an earlier layer, for a layer that has none: its function takes q alone.
            For a layer without an indexer the choice of an earlier layer.
    """
    if not c.mixes:
        return None
    if c.kind in RECURRENT:
        recurrent = RECURRENT[c.kind]
        mix = over_whole_rows(recurrent.make_rows_fn(c, w, rows, strict=strict), method)
        return lambda inputs, *others: mix(recurrent.split_channels(c, inputs), *others)
    # Attention, by the kernels or batch-invariant.
    scale, softcap, windows = attention_scale(c), c.attention_softcap, tuple(sorted(set(window_sizes(c))))
    by_kernel = functools.partial(
        sharded_attention, scale=scale, softcap=softcap, windows=windows, method=method
    )

    def plain(q, k, v, rows, window, sinks):
        if rows.spans is not None:
            window = jnp.where(window == NO_WINDOW, NO_WINDOW, rows.spans)
        return by_kernel(q, k, v, rows.segments, rows.last, window=window, sinks=sinks)

    def exact(q, k, v, rows, window, sinks):
        ring = batch_invariant.RingKeys(jnp.arange(q.shape[1]) - rows.positions)
        where = ring if rows.last is None else batch_invariant.RowKeys(rows.segments, rows.last)
        return batch_invariant.invariant_attention(
            q, k, v, where, rows.positions, window, scale=scale, softcap=softcap, sinks=sinks
        )

    attend = functools.partial(batch_invariant.straight_through, plain, exact) if strict else plain
    rest = rows, jnp.asarray(window), sinks_of(w)
    if c.index and method != "none":
        raise ValueError(f"an indexer reads whole rows: no context parallelism ({method})")
    if c.index and (strict or rows.segments.shape[1] > c.index.topk):
        return make_selected_fn(c, rows, strict=strict, chosen=shared)
    if c.index:  # a token may read all earlier ones
        return lambda q, k, v, _: (attend(q, k, v, *rest), (None, None, None))
    if shared is not None:
        return lambda q: (attend(q, *shared, *rest), None)
    return lambda q, k, v: (attend(q, k, v, *rest), (k, v))


def block(
    c: TransformerConfig,
    w: Layers,
    x,
    rope: RopeTables,
    *,
    attention_fn,
    strict: bool = False,
    valid: Bool[Array, "B T"] | None = None,
    rules: Rules = TRAIN,
    routes: UInt[Array, "B T K"] | None = None,
    layer_inputs: Float[Array, "B T P"] | None = None,
):
    """Compute one decoder layer. Returns (x, kv, routing); kv is None if it mixes no tokens, routing without
    experts.

    Args:
        w: the layer's weights, cast to the type of x by `cast_weights`.
        rope: tables of every position for this layer (`layer_rope`).
        attention_fn: (q, k, v) -> (out, kv); applies the mask, reads and writes the KV cache; (q) for a layer
            that reads another's keys and values. DecodeLatents for a cache of latents. With latent attention,
            kv are latents except in strict mode. Of a layer with a state (*inputs) -> (out, state), as
            `RecurrentKind.make_rows_fn`.
        strict: batch-invariant.
        valid: False = padding, which no expert computes; None = all tokens are valid.
        rules: sharding of the experts.
        routes: see `sparse_mlp`.
        layer_inputs: of this layer (`per_layer_inputs`), if the model has them.
    """
    per_token, recurrent, out, gate, kv = per_token_call(strict), RECURRENT.get(c.kind), None, None, None
    read_stream, add_mixed = functools.partial(_read_stream, c), functools.partial(_add_mixed, c)

    def before(w, x, rope):
        h = read_stream(w, x, "attention")
        if recurrent:
            return recurrent.project_inputs(c, w, h)
        return (expand_latents if c.mla else project_heads)(c, w, h, rope)

    def after(w, x, out, gate, layer_inputs):
        x = add_mixed(w, x, out, gate) if c.mixes else x
        with jax.named_scope("mlp"):
            x = _add_to_stream(c, w, x, mlp(c, w, read_stream(w, x, "mlp")), "mlp") if c.has_mlp else x
        return _add_layer_inputs(c, w, x, layer_inputs)

    # Attention, or the layer's other way to mix tokens.
    with jax.named_scope("attention"):
        if isinstance(attention_fn, DecodeLatents):
            h = read_stream(w, x, "attention")
            out, kv = decode_latents(c, w, h, rope, attention_fn=attention_fn)
        elif c.mixes:
            *inputs, gate = per_token(before, w, x, rope)
            if not recurrent:
                inputs[0] = constrain(inputs[0], "batch", "sequence", "heads", "head_dim")
            out, kv = attention_fn(*inputs)
            if c.mla:
                kv = kv if strict else _latent_kv(c, gate, inputs, kv)
                out, gate = out[..., : c.mla.value_dim], None
    # Feed-forward; strict mode computes the steps between attention and experts token by token.
    if not c.moe:
        return per_token(after, w, x, out, gate, layer_inputs), kv, None
    x = per_token(add_mixed, w, x, out, gate) if c.mixes else x
    with jax.named_scope("experts"):
        experts = functools.partial(sparse_mlp, valid=valid, rules=rules, strict=strict, routes=routes)
        x, routing = _add_experts(c, w, x, experts, per_token)
    if c.per_layer_inputs:
        x = per_token(functools.partial(_add_layer_inputs, c), w, x, layer_inputs)
    return x, kv, routing


def _latent_kv(c: TransformerConfig, latents: Float[Array, "B T 1 E"], inputs, kv) -> tuple:
    """Return a layer's entries in a cache of latents, and the choice of its indexer if it has one."""
    return (pack_keys(c, latents, inputs[3]), None, kv[2]) if c.index else (latents, None)


def _add_mixed(c: TransformerConfig, w: Layers, x: Float[Array, "B T D"], out, gate):
    """Add the output of attention, or of the layer's recurrence, to the residual stream."""
    if c.kind in RECURRENT:
        return _add_to_stream(c, w, x, RECURRENT[c.kind].finish_mixed(c, w, out, gate), "attention")
    out = out[..., : c.head_dim] if gate is None else out * jax.nn.sigmoid(gate)
    return _add_to_stream(c, w, x, apply_linear(c, w, "o", out), "attention")


def _add_layer_inputs(
    c: TransformerConfig, w: Layers, x: Float[Array, "B T D"], inputs: Float[Array, "B T P"] | None
):
    """Add the projection of a layer's inputs, times their gate, to the residual stream, if there are any."""
    if inputs is None:
        return x
    gate = ACTIVATIONS[c.activation](apply_linear(c, w, "input_gate", gather_tokens(x)))
    return _add_to_stream(c, w, x, apply_linear(c, w, "input_proj", gate * inputs), "input")


def _add_experts(c: TransformerConfig, w: Layers, x: Float[Array, "B T D"], experts, per_token):
    """Return (the residual stream with the experts, and the shared expert if there is one, added, routing).

    Args:
        experts: `sparse_mlp` with its settings.
        per_token: of `per_token_call`.
    """

    def read(name):
        return per_token(lambda w, x: _read_stream(c, w, x, name), w, x)

    def add_shared_expert(w, h, y):
        out = mlp(c, w, h)
        if c.moe.branches:
            return normalize(c, out, w.shared_out_norm[...]) + normalize(c, y, w.experts_out_norm[...])
        return y + (jax.nn.sigmoid(apply_linear(c, w, "shared_gate", h)) * out if c.moe.shared_gate else out)

    h = read("mlp")
    inputs, seen = (read("experts"), read("router") * c.hidden_size**-0.5) if c.moe.branches else (h, None)
    if c.moe.latent_size:
        inputs, seen = per_token(lambda w, h: apply_linear(c, w, "latent_in", h), w, h), h
    y, routing = experts(c, w, inputs, ACTIVATIONS[c.activation], seen=seen)
    if c.moe.latent_size:
        y = per_token(lambda w, y: apply_linear(c, w, "latent_out", y), w, y)
    y = per_token(add_shared_expert, w, h, y) if c.moe.shared_size else y
    return per_token(lambda w, x, y: _add_to_stream(c, w, x, y, "mlp"), w, x, y), routing


def _read_stream(c: TransformerConfig, w: Layers, x: Float[Array, "B T D"], name: str):
    """Return the input of attention or feed-forward, normalised if the model does so before them."""
    if c.norms == "after":
        return gather_tokens(x)
    return gather_tokens(normalize(c, x, getattr(w, f"{name}_norm")[...]))


def _add_to_stream(c: TransformerConfig, w: Layers, x: Float[Array, "B T D"], y, name: str):
    """Add an output of a part of the layer to the residual stream, times the model's multiplier. After the
    last part the stream is multiplied by the layer's scalar, if the model has one, which gets no gradient."""
    is_last = name == ("input" if c.per_layer_inputs else "mlp")
    if c.norms != "before" or name == "input":
        y = normalize(c, constrain_residual(y), getattr(w, f"{name}_out_norm")[...])
    if c.residual_multiplier != 1.0:  # in float32: bfloat16 would round the number itself
        y = (y.astype(jnp.float32) * c.residual_multiplier).astype(y.dtype)
    scalar = jax.lax.stop_gradient(w.layer_scalar[...]) if c.layer_scalar and is_last else None
    return constrain_residual(x + y if scalar is None else (x + y) * scalar)


def project_heads(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"], rope: RopeTables):
    """Return (q, k, v, gate of the output), without k and v if the layer has none; the gate is None if the
    model has none."""
    if not c.has_kv:
        q, gate = _project_queries(c, w, h)
        return grow_queries(_rotate(c, w, "q", q, rope=rope), rope), gate
    (q, gate), k = _project_queries(c, w, h), apply_linear(c, w, "k", h)
    v = k if c.keys_as_values else apply_linear(c, w, "v", h)
    v = rms_norm(v, jnp.ones(c.head_dim), c.norm_eps) if c.value_norm else v
    if c.alibi:
        return *add_alibi(c, _qk_norm(c, w, "q", q), _qk_norm(c, w, "k", k), v, rope.places), gate
    q, k = (_rotate(c, w, name, x, rope=rope) for name, x in (("q", q), ("k", k)))
    return grow_queries(q, rope), k, v, gate


def _project_queries(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"]):
    """Return (queries before norm and RoPE, gate of the output or None)."""
    q = apply_linear(c, w, "q", h)
    return jnp.split(q, 2, axis=-1) if c.attention_gate else (q, None)


def _rotate(c: TransformerConfig, w: Layers, name: str, x: Float[Array, "B T H E"], *, rope: RopeTables):
    """Return queries or keys with RoPE and their norm, in the model's order."""
    if c.qk_norm_after_rope:
        return _qk_norm(c, w, name, apply_rope(x, rope))
    return apply_rope(_qk_norm(c, w, name, x), rope)


def _qk_norm(c: TransformerConfig, w: Layers, name: str, x: Float[Array, "B T H E"]):
    """Return queries or keys ("q", "k"), normalised if the model does so."""
    if not c.qk_norm:
        return x
    flat = x.reshape(*x.shape[:2], -1) if c.qk_norm_over_heads else x
    return normalize(c, flat, getattr(w, f"{name}_norm")[...]).reshape(x.shape)


def mlp(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Apply the dense feed-forward."""
    activation, up = ACTIVATIONS[c.activation], apply_linear(c, w, "up", h)
    hidden = activation(apply_linear(c, w, "gate", h)) * up if c.mlp_gate else activation(up)
    return apply_linear(c, w, "down", constrain(hidden, "batch", "sequence", "mlp"))


def final_norm_fn(c: TransformerConfig):
    """Return the final norm, which also divides logits by `logits_scaling`, as a function for
    `per_token_call`."""
    return lambda weight, x: normalize(c, x, weight, c.logits_scaling)
