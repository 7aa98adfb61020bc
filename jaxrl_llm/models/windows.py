"""Sliding windows of a model's layers."""

from __future__ import annotations

from jaxtyping import Array, Int

from jaxrl_kernels.flash_attention.spec import NO_WINDOW, row_windows
from jaxrl_llm.models.config import TransformerConfig


def window_sizes(c: TransformerConfig) -> list[int]:
    """Return the sliding window of each layer: tokens that a token attends to, including itself."""
    layers = c.window_layers or (True,) * c.num_layers
    return [c.sliding_window if on and c.sliding_window else NO_WINDOW for on in layers]


def window_spans(
    c: TransformerConfig,
    segments: Int[Array, "B T"],
    last: Int[Array, "B T"] | None,
    positions: Int[Array, "B T"],
) -> Int[Array, "B T"] | None:
    """Return the tokens of the row that each token's sliding window spans (`row_windows`); None if the row
    has no shared prefixes, or every window spans the whole row."""
    if last is None or not c.sliding_window or c.sliding_window >= segments.shape[1]:
        return None
    return row_windows(segments, last, positions, c.sliding_window)
