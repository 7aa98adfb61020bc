"""Packed rows: the places of their tokens, and functions of single tokens."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Int

from jaxrl_kernels import batch_invariant
from jaxrl_llm.models.paths import Paths


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


def per_token_call(strict: bool):
    """Return a function that applies f(weights, *arrays [B, T, ...]) per token: call(f, weights, *arrays)."""
    return batch_invariant.map_tokens if strict else lambda f, weights, *xs: f(weights, *xs)
