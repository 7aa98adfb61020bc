"""Layers with the gated delta rule in place of attention (Gated DeltaNet, arXiv 2412.06464; Qwen3-Next).

A projection gives queries, keys and values, which a short causal convolution mixes with the projections of
the tokens before. The delta rule reads and corrects a state, a map from keys to values; its output is
normalised and gated. The state of a sequence and the last inputs of its convolution are what a cache keeps.
The functions are the functions of `recurrent.RecurrentKind`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.gated_delta import api
from jaxrl_kernels.gated_delta.reference import delta_step, exact_step, recurrent_delta
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.linear import Initializer, apply_linear, rms_norm
from jaxrl_llm.models.mixer_config import DeltaConfig
from jaxrl_llm.models.paths import conv_window, convolve, convolve_parts
from jaxrl_llm.models.rows import MAX_LEVELS, Packing, last_inputs, per_token_call, step_window
from jaxrl_llm.sharding.attention import DIVIDED_HEADS, divide_heads
from jaxrl_llm.sharding.rules import current_spec

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers

STATE = "recurrent_state"
"""Scope of `sharded_delta` within the scope of attention, by which `plan` finds its kernels."""
KEY_EPS = 1e-6
"""Added to the squared length of queries and keys (transformers)."""


class DeltaState(NamedTuple):
    """The state of a layer for S sequences; dim -4 is S in both arrays."""

    map: Float[Array, "*L S H K V"]
    """From keys to values, float32."""
    inputs: Float[Array, "*L S 1 N C"]
    """The last N = conv_width - 1 inputs of the convolution, the oldest first, 0 before the start."""


def add_weights(layers: Layers, c: TransformerConfig, init: Initializer) -> None:
    """Add the projections, the convolution, the decay and the norm."""
    delta, d = c.delta, c.hidden_size
    heads = (delta.value_heads, delta.value_dim)
    if delta.projections == "qkvz":
        served = delta.value_heads // delta.key_heads
        of_head = 2 * (delta.key_dim + served * delta.value_dim)
        layers.delta_qkvz = init.normal((d, delta.key_heads, of_head), ("embed", "kv_heads", "head_dim"))
        layers.delta_ba = init.normal((d, delta.key_heads, 2 * served), ("embed", "kv_heads", "head_dim"))
    else:
        if delta.projections == "qkv":
            layers.delta_qkv = init.normal((d, delta.channels), ("embed", "mlp"))
        else:
            shape, axes = (d, delta.key_heads, delta.key_dim), ("embed", "kv_heads", "head_dim")
            layers.delta_q, layers.delta_k = init.normal(shape, axes), init.normal(shape, axes)
            layers.delta_v = init.normal((d, *heads), ("embed", "heads", "head_dim"))
        layers.delta_z = init.normal((d, *heads), ("embed", "heads", "head_dim"))
        layers.delta_b = init.normal((d, delta.value_heads), ("embed", "heads"))
        layers.delta_a = init.normal((d, delta.value_heads), ("embed", "heads"))
    for name, channels in _convolutions(delta).items():
        setattr(layers, name, init.uniform((channels, 1, delta.conv_width), ("conv",) * 3, 0.5))
    layers.delta_a_log = init.uniform(heads[:1], ("heads",), 2.0)  # decays at rates of 0.14 to 7.4
    layers.delta_dt_bias = init.ones(heads[:1], ("heads",))
    layers.delta_norm = init.ones(heads[1:], ("head_dim",))
    layers.delta_o = init.normal((*heads, d), ("heads", "head_dim", "embed"), residual=True)


def empty_state(c: TransformerConfig, shape: tuple[int, ...], dtype: DTypeLike) -> DeltaState:
    """Return zeros."""
    delta = c.delta
    return DeltaState(
        jnp.zeros((*shape, delta.value_heads, delta.key_dim, delta.value_dim), jnp.float32),
        jnp.zeros((*shape, 1, delta.conv_width - 1, delta.channels), dtype),
    )


def project_inputs(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"]):
    """Return (inputs of the convolution [B, T, C], g, beta [B, T, H] float32, gate [B, T, H, V])."""
    qkv, gate, b, a = (_project_key_heads if c.delta.projections == "qkvz" else _project)(c, w, h)
    rate = jax.nn.softplus(a.astype(jnp.float32) + w.delta_dt_bias[...])
    beta = jax.nn.sigmoid(b).astype(jnp.float32) * (2 if c.delta.negative_eigenvalues else 1)
    return qkv, -jnp.exp(w.delta_a_log[...]) * rate, beta, gate


def _project(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"]):
    """Return (queries, keys and values of all heads [B, T, C], gate [B, T, H, V], b, a [B, T, H])."""
    linear = lambda name: apply_linear(c, w, f"delta_{name}", h)
    if c.delta.projections == "qkv":
        qkv = linear("qkv")
    else:
        qkv = jnp.concatenate([linear(name).reshape(*h.shape[:2], -1) for name in "qkv"], axis=-1)
    return qkv, linear("z"), linear("b"), linear("a")


def _project_key_heads(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"]):
    """Return `_project` from matrices with the rows of one key head after the other."""
    delta, merge = c.delta, lambda x, *dims: x.reshape(*h.shape[:2], *dims)
    values = delta.value_heads // delta.key_heads * delta.value_dim
    ends = [delta.key_dim, 2 * delta.key_dim, 2 * delta.key_dim + values]
    *qkv, gate = jnp.split(apply_linear(c, w, "delta_qkvz", h), ends, axis=-1)
    b, a = jnp.split(apply_linear(c, w, "delta_ba", h), 2, axis=-1)
    qkv = jnp.concatenate([merge(x, -1) for x in qkv], axis=-1)
    return qkv, merge(gate, delta.value_heads, delta.value_dim), merge(b, -1), merge(a, -1)


def finish_mixed(
    c: TransformerConfig, w: Layers, out: Float[Array, "B T H V"], gate: Float[Array, "B T H V"]
) -> Float[Array, "B T D"]:
    """Normalise and gate the output of the delta rule, and project it."""
    eps = c.norm_eps if c.delta.norm_eps is None else c.delta.norm_eps
    normed = rms_norm(out, w.delta_norm[...], eps)
    gated = (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(out.dtype)
    return apply_linear(c, w, "delta_o", gated)


def make_rows_fn(c: TransformerConfig, w: Layers, rows: Packing, *, strict: bool = False):
    """Return the function ((q, k, v) before the convolution, g, beta) -> (out, DeltaState after each row).

    In strict mode tokens are added one by one, as in decoding; the gradient is that of chunks.
    """
    rule = make_rule(strict)

    def apply(qkv, g, beta):
        inputs = jnp.concatenate(qkv, axis=-1)
        if strict:
            q, k, v = _mix_windows(c, w, conv_window(inputs, rows.paths), inputs.dtype, strict=strict)
        else:
            mixed = (jax.nn.silu(x) for x in convolve_parts(qkv, _conv_weight(c, w), rows.paths))
            q, k, v = _to_heads(c, (x.astype(inputs.dtype) for x in mixed))
        q, k, v = map(divide_heads, (q, k, v))
        out, state = rule(rows, q, k, v, g, beta)
        return out, DeltaState(state, last_inputs(inputs, rows))

    return apply


def make_rule(strict: bool):
    """Return the function (rows, q, k, v, g, beta or none) -> (out, states) of `sharded_delta`."""
    plain, exact = (functools.partial(_over_rows, rule) for rule in (sharded_delta, recurrent_delta))
    return functools.partial(batch_invariant.straight_through, plain, exact) if strict else plain


def _over_rows(rule, rows: Packing, *tokens: Array):
    return rule(*tokens, segments=rows.segments, last=rows.last, levels=MAX_LEVELS)


def sharded_delta(q, k, v, *numbers: Array, **rows: Any) -> tuple[Array, Array]:
    """Compute `api.gated_delta` of whole rows, whose heads the devices of a row divide."""
    spec = current_spec(("batch", None, "heads", "head_dim"), v.shape, DIVIDED_HEADS)
    with jax.named_scope(STATE):
        return api.gated_delta(q, k, v, *numbers, **rows, partition_spec=spec)


def make_step_fn(
    c: TransformerConfig, w: Layers, state: DeltaState, valid: Bool[Array, "S T"], *, strict: bool = False
):
    """Return the function (inputs, g, beta) -> (out, DeltaState) for the next tokens of each sequence."""

    def apply(inputs, g, beta):
        window, kept = step_window(state.inputs, inputs, valid)
        q, k, v = _mix_windows(c, w, window, inputs.dtype, strict=strict)
        out, new = add_tokens(state.map, valid, q, k, v, g, beta, strict=strict)
        return out, DeltaState(new, kept)

    return apply


def add_tokens(
    state: Float[Array, "S H K V"], valid: Bool[Array, "S T"], *tokens: Array, strict: bool
) -> tuple[Float[Array, "S T H V"], Float[Array, "S H K V"]]:
    """Add the valid tokens (q, k, v, g, beta or none) to the states by `sharded_delta`; return (out, states).

    In strict mode every token is added by `exact_step`, so that its bits do not depend on the other tokens.
    """
    if valid.shape[1] > 1:
        rule = recurrent_delta if strict else sharded_delta
        return rule(*tokens, segments=valid.astype(jnp.int32), initial=state)
    out, new = (exact_step if strict else delta_step)(state, *(x[:, 0] for x in tokens))
    return out[:, None], jnp.where(valid[..., None, None], new, state)


def _mix_windows(
    c: TransformerConfig, w: Layers, window: Float[Array, "B T W C"], dtype: DTypeLike, *, strict: bool
):
    """Return `_to_heads` of the convolution of each token's inputs."""

    def mix(weight, window):
        return _to_heads(c, split_channels(c, jax.nn.silu(convolve(window, weight)).astype(dtype)))

    return per_token_call(strict)(mix, _conv_weight(c, w), window)


def _convolutions(delta: DeltaConfig) -> dict[str, int]:
    """Return the names of the convolutions -> their channels, in the order of `_to_heads`."""
    if delta.projections != "separate":
        return {"delta_conv": delta.channels}
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    return {"delta_conv_q": keys, "delta_conv_k": keys, "delta_conv_v": values}


def _conv_weight(c: TransformerConfig, w: Layers) -> Float[Array, "C W"]:
    return jnp.concatenate([getattr(w, name)[:, 0] for name in _convolutions(c.delta)])


def split_channels(c: TransformerConfig, qkv: Float[Array, "B T C"]) -> tuple[Float[Array, "B T _"], ...]:
    """Return (q, k, v)."""
    size = c.delta.key_heads * c.delta.key_dim
    return tuple(jnp.split(qkv, [size, 2 * size], axis=-1))


def _to_heads(c: TransformerConfig, mixed: Iterable[Float[Array, "B T _"]]):
    """Return (q, k [B, T, Hk, K], v [B, T, H, V]); queries and keys have length 1, queries times K^-0.5."""
    delta = c.delta
    q, k, v = mixed
    heads = lambda x, dim: x.reshape(*x.shape[:2], -1, dim)

    def normed(x, scale):
        x32 = heads(x, delta.key_dim).astype(jnp.float32)
        length = jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + KEY_EPS)
        return (x32 * length * scale).astype(x.dtype)

    return normed(q, delta.key_dim**-0.5), normed(k, 1.0), heads(v, delta.value_dim)


def mixer_weights(c: TransformerConfig) -> int:
    """Return the number of weights in matrices."""
    values = c.delta.value_heads * c.delta.value_dim
    return c.hidden_size * (c.delta.channels + 2 * values + 2 * c.delta.value_heads)


def state_flops(c: TransformerConfig) -> float:
    """Return the FLOPs of reading, correcting and reading the state."""
    return 6.0 * c.delta.value_heads * c.delta.key_dim * c.delta.value_dim
