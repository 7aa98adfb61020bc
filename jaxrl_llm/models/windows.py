"""Sliding windows of the layers of a model."""

from __future__ import annotations

from jaxtyping import Array, Int

from jaxrl_kernels.flash_attention.spec import NO_WINDOW, row_windows
from jaxrl_llm.models.config import TransformerConfig


def window_sizes(c: TransformerConfig) -> list[int]:
    """Return the sliding window of each layer: tokens that a token attends to, itself included."""
    layers = c.window_layers or (True,) * c.num_layers
    return [c.sliding_window if on and c.sliding_window else NO_WINDOW for on in layers]


def window_spans(
    c: TransformerConfig,
    segments: Int[Array, "B T"],
    last: Int[Array, "B T"] | None,
    positions: Int[Array, "B T"],
) -> Int[Array, "B T"] | None:
    """Return the tokens of the row that the sliding window of each token spans (`row_windows`); None where
    they are as many as those of its sequence, or all."""
    if last is None or not c.sliding_window or c.sliding_window >= segments.shape[1]:
        return None
    return row_windows(segments, last, positions, c.sliding_window)
