"""Layers with a gated short convolution in place of attention (LFM2).

A projection gives three vectors B, C and x of each token. The output is a projection of C * conv(B * x), with
a causal convolution of each channel over a few tokens and no activation. A cache keeps the last inputs of the
convolution. The functions are the functions of `recurrent.RecurrentKind`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.linear import Initializer, apply_linear
from jaxrl_llm.models.paths import causal_conv, conv_taps, conv_window, convolve
from jaxrl_llm.models.rows import Packing, last_inputs, per_token_call, step_window
from jaxrl_llm.sharding.rules import constrain

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers


class ConvState(NamedTuple):
    """The state of a layer for S sequences; dim -4 is S."""

    inputs: Float[Array, "*L S 1 N D"]
    """The last N = conv_width - 1 inputs of the convolution, the oldest first, 0 before the start."""


def add_weights(layers: Layers, c: TransformerConfig, init: Initializer) -> None:
    """Add the two projections and the convolution."""
    d = c.hidden_size
    layers.conv_in = init.normal((d, 3 * d), ("embed", "mlp"))
    layers.conv_kernel = init.uniform((d, 1, c.conv.conv_width), ("conv",) * 3, 0.5)
    layers.conv_out = init.normal((d, d), ("mlp", "embed"), residual=True)
    if c.conv.conv_bias:
        layers.conv_in_bias = init.zeros((3 * d,), ("mlp",))
        layers.conv_kernel_bias = init.zeros((d,), ("norm",))
        layers.conv_out_bias = init.zeros((d,), ("norm",))


def empty_state(c: TransformerConfig, shape: tuple[int, ...], dtype: DTypeLike) -> ConvState:
    """Return zeros."""
    return ConvState(jnp.zeros((*shape, 1, c.conv.conv_width - 1, c.hidden_size), dtype))


def project_inputs(c: TransformerConfig, w: Layers, h: Float[Array, "B T D"]):
    """Return (B * x, the inputs of the convolution, C, the gate of its outputs), each [B, T, D]."""
    before, gate, x = jnp.split(apply_linear(c, w, "conv_in", h), 3, axis=-1)
    return constrain(before * x, "batch", "sequence", "mlp"), gate


def finish_mixed(
    c: TransformerConfig, w: Layers, out: Float[Array, "B T D"], gate: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """Gate the outputs of the convolution, and project them."""
    return apply_linear(c, w, "conv_out", gate * out)


def make_rows_fn(c: TransformerConfig, w: Layers, rows: Packing, *, strict: bool = False):
    """Return the function ((inputs,)) -> (out, ConvState after each row)."""

    def apply(parts):
        (inputs,) = parts
        if strict:
            out = _mix_windows(w, conv_window(inputs, rows.paths), inputs.dtype, strict=strict)
        else:
            taps, bias = conv_taps(w, "conv_kernel")
            out = causal_conv(inputs, taps, rows.paths, bias).astype(inputs.dtype)
        return out, ConvState(last_inputs(inputs, rows))

    return apply


def make_step_fn(
    c: TransformerConfig, w: Layers, state: ConvState, valid: Bool[Array, "S T"], *, strict: bool = False
):
    """Return the function (inputs) -> (out, ConvState) for the next tokens of each sequence."""

    def apply(inputs):
        window, kept = step_window(state.inputs, inputs, valid)
        return _mix_windows(w, window, inputs.dtype, strict=strict), ConvState(kept)

    return apply


def split_channels(c: TransformerConfig, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"]]:
    """Return (x,)."""
    return (x,)


def _mix_windows(w: Layers, window: Float[Array, "B T W D"], dtype: DTypeLike, *, strict: bool):
    """Return the convolution of each token's inputs."""
    mix = lambda taps, window: convolve(window, *taps).astype(dtype)
    return per_token_call(strict)(mix, conv_taps(w, "conv_kernel"), window)


def mixer_weights(c: TransformerConfig) -> int:
    """Return the number of weights in matrices."""
    return 4 * c.hidden_size**2


def state_flops(c: TransformerConfig) -> float:
    """Return 0: as elsewhere, only products with matrices and between heads count."""
    return 0.0
