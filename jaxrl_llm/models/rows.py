"""Packed rows: the places of their tokens, and functions of single tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels import batch_invariant
from jaxrl_llm.models.paths import Paths, conv_state

MAX_LEVELS = 2
"""Levels of shared prefixes in a row that recurrent layers read: a prompt and its responses."""


class Packing(NamedTuple):
    """Places of the tokens of packed rows."""

    segments: Int[Array, "B T"]
    """Number of each token's trajectory, or of a prefix that several share; 0 = padding."""
    positions: Int[Array, "B T"]
    """Position of each token in its trajectory, 0-based."""
    last: Int[Array, "B T"] | None = None
    """Number of the last segment that continues each token's segment; None = no shared prefixes."""
    spans: Int[Array, "B T"] | None = None
    """Tokens of the row that contain the sliding window (`row_windows`); None = the same number."""
    paths: Paths | None = None
    """Tokens that the convolution of each token reads; None = the model has none."""


def last_inputs(inputs: Float[Array, "B T C"], rows: Packing) -> Float[Array, "B 1 N C"]:
    """Return the last inputs of the convolution of each row's last token, as a cache keeps them; 0 for an
    empty row."""
    return jnp.where(rows.segments[:, -1:, None] > 0, conv_state(inputs, rows.paths), 0)[:, None]


def step_window(
    kept: Float[Array, "S 1 N C"], inputs: Float[Array, "S T C"], valid: Bool[Array, "S T"]
) -> tuple[Float[Array, "S T W C"], Float[Array, "S 1 N C"]]:
    """Return the inputs of the convolution of each next token, and the inputs to keep after the valid ones.

    Args:
        valid: False = padding, after the tokens of a sequence.
    """
    (*_, count, _), length = kept.shape, inputs.shape[1]
    joined = jnp.concatenate([kept[:, 0], inputs.astype(kept.dtype)], axis=1)
    window = jnp.stack([joined[:, i : i + length] for i in range(count + 1)], axis=2)
    last = jnp.sum(valid, axis=1)[:, None] + jnp.arange(count)
    return window, jnp.take_along_axis(joined, last[..., None], axis=1)[:, None]


def per_token_call(strict: bool):
    """Return a function that applies f(weights, *arrays [B, T, ...]) per token: call(f, weights, *arrays)."""
    return batch_invariant.map_tokens if strict else lambda f, weights, *xs: f(weights, *xs)
