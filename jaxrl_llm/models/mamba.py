"""Layers of Mamba-2 in place of attention (arXiv 2405.21060; Nemotron-H).

A projection gives a gate z, the inputs x, B and C of each token, and a step size dt of each head. A short
causal convolution mixes x, B and C with the tokens before. The state S of a head decays by e^(dt A) and adds
dt x B^T; its output is S C + D x, gated by z and normalised. transformers 5.24 keeps dt from falling below
`dt_min` for whole sequences, but not for single tokens: here it is so in both.

The functions are the functions of `recurrent.RecurrentKind`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.delta import add_tokens, make_rule
from jaxrl_llm.models.linear import Initializer, apply_linear, rms_norm
from jaxrl_llm.models.paths import conv_taps, conv_window, convolve, convolve_parts
from jaxrl_llm.models.rows import Packing, last_inputs, per_token_call, step_window
from jaxrl_llm.sharding.attention import divide_heads

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers


class MambaState(NamedTuple):
    """The state of a layer for S sequences; dim -4 is S in both arrays."""

    map: Float[Array, "*L S H N P"]
    """From C to outputs, float32."""
    inputs: Float[Array, "*L S 1 W C"]
    """The last W = conv_width - 1 inputs of the convolution, the oldest first, 0 before the start."""


def add_weights(layers: Layers, c: TransformerConfig, init: Initializer) -> None:
    """Add the projections, the convolution, decay, skip and norm."""
    mamba, d = c.mamba, c.hidden_size
    layers.mamba_in = init.normal((d, mamba.inner + mamba.channels + mamba.heads), ("embed", "mlp"))
    layers.mamba_kernel = init.uniform((mamba.channels, 1, mamba.conv_width), ("conv",) * 3, 0.5)
    layers.mamba_a_log = init.uniform((mamba.heads,), ("heads",), 2.0)  # decays at rates of 0.14 to 7.4
    layers.mamba_dt_bias = init.ones((mamba.heads,), ("heads",))
    layers.mamba_skip = init.ones((mamba.heads,), ("heads",))
    layers.mamba_norm = init.ones((mamba.inner,), ("norm",))
    layers.mamba_out = init.normal((mamba.inner, d), ("mlp", "embed"), residual=True)
    if mamba.conv_bias:
        layers.mamba_kernel_bias = init.zeros((mamba.channels,), ("norm",))
    if mamba.bias:
        layers.mamba_in_bias = init.zeros((mamba.inner + mamba.channels + mamba.heads,), ("mlp",))
        layers.mamba_out_bias = init.zeros((d,), ("norm",))


def empty_state(c: TransformerConfig, shape: tuple[int, ...], dtype: DTypeLike) -> MambaState:
    """Return zeros."""
    mamba = c.mamba
    return MambaState(
        jnp.zeros((*shape, mamba.heads, mamba.state_size, mamba.head_dim), jnp.float32),
        jnp.zeros((*shape, 1, mamba.conv_width - 1, mamba.channels), dtype),
    )


def project_inputs(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"]):
    """Return (inputs of the convolution [B, T, C], dt A and dt [B, T, H] float32, z [B, T, I])."""
    mamba = c.mamba
    projected = apply_linear(c, w, "mamba_in", h)
    z, inputs, dt = jnp.split(projected, [mamba.inner, mamba.inner + mamba.channels], axis=-1)
    dt = jax.nn.softplus(dt.astype(jnp.float32) + w.mamba_dt_bias[...])
    dt = jnp.maximum(dt, mamba.dt_min)
    return inputs, -jnp.exp(w.mamba_a_log[...]) * dt, dt, z


def finish_mixed(
    c: TransformerConfig, w: Layers, out: tuple[Float[Array, "B T H P"], ...], gate: Float[Array, "B T I"]
) -> Float[Array, "B T D"]:
    """Add D x to the outputs of the state, gate and normalise them by group, and project them.

    Args:
        out: outputs of the state, and x, float32.
    """
    y, x = out
    y = (y + w.mamba_skip[..., None] * x).reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))
    groups = y.reshape(*y.shape[:-1], c.mamba.groups, -1)
    normed = rms_norm(groups, jnp.ones(groups.shape[-1]), c.norm_eps).reshape(gate.shape)
    return apply_linear(c, w, "mamba_out", (normed * w.mamba_norm[...]).astype(gate.dtype))


def make_rows_fn(c: TransformerConfig, w: Layers, rows: Packing, *, strict: bool = False):
    """Return the function ((x, B, C), g, dt) -> ((out, x), MambaState after each row).

    In strict mode tokens are added one by one, as in decoding; the gradient is that of chunks.
    """
    rule = make_rule(strict)

    def apply(parts, g, dt):
        inputs = jnp.concatenate(parts, axis=-1)
        if strict:
            q, k, x, v = _mix_windows(c, w, conv_window(inputs, rows.paths), dt, strict=strict)
        else:
            taps, bias = conv_taps(w, "mamba_kernel")
            mixed = (jax.nn.silu(x) for x in convolve_parts(parts, taps, rows.paths, bias))
            q, k, x, v = _to_heads(c, (x.astype(inputs.dtype) for x in mixed), dt)
        q, k, v = map(divide_heads, (q, k, v))
        out, state = rule(rows, q, k, v, g)
        return (out, x), MambaState(state, last_inputs(inputs, rows))

    return apply


def make_step_fn(
    c: TransformerConfig, w: Layers, state: MambaState, valid: Bool[Array, "S T"], *, strict: bool = False
):
    """Return the function (inputs, g, dt) -> ((out, x), MambaState) for the next tokens of each sequence."""

    def apply(inputs, g, dt):
        window, kept = step_window(state.inputs, inputs, valid)
        q, k, x, v = _mix_windows(c, w, window.astype(inputs.dtype), dt, strict=strict)
        out, new = add_tokens(state.map, valid, q, k, v, g, strict=strict)
        return (out, x), MambaState(new, kept)

    return apply


def _mix_windows(
    c: TransformerConfig, w: Layers, window: Float[Array, "B T W C"], dt: Float[Array, "B T H"], *, strict
):
    """Return `_to_heads` of the convolution of each token's inputs."""

    def mix(taps, window, dt):
        mixed = jax.nn.silu(convolve(window, *taps)).astype(window.dtype)
        return _to_heads(c, split_channels(c, mixed), dt)

    return per_token_call(strict)(mix, conv_taps(w, "mamba_kernel"), window, dt)


def split_channels(c: TransformerConfig, x: Float[Array, "B T C"]) -> tuple[Float[Array, "B T _"], ...]:
    """Return (x, B, C)."""
    return tuple(jnp.split(x, [c.mamba.inner, c.mamba.inner + c.mamba.groups * c.mamba.state_size], axis=-1))


def _to_heads(c: TransformerConfig, mixed: Iterable[Float[Array, "B T _"]], dt: Float[Array, "B T H"]):
    """Return (C, B [B, T, G, N], x, dt x [B, T, H, P]), the last two float32."""
    mamba = c.mamba
    x, b, read = mixed
    heads = lambda x, count: x.reshape(*x.shape[:2], count, -1)
    x = heads(x, mamba.heads).astype(jnp.float32)
    return heads(read, mamba.groups), heads(b, mamba.groups), x, x * dt[..., None]


def mixer_weights(c: TransformerConfig) -> int:
    """Return the number of weights in matrices."""
    return c.hidden_size * (2 * c.mamba.inner + c.mamba.channels + c.mamba.heads)


def state_flops(c: TransformerConfig) -> float:
    """Return the FLOPs of adding to the state and reading it."""
    return 4.0 * c.mamba.heads * c.mamba.head_dim * c.mamba.state_size
