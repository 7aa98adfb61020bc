"""Causal short convolution along the paths of tokens: through packed rows and shared prefixes.

The path of a token are the earlier tokens of its segment, and of the segments that it continues, as in
attention (`flash_attention.spec.DynamicMask`). The token before the first one of a response may be far to the
left, at the end of the prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels.chunks import map_chunks
from jaxrl_kernels.flash_attention.spec import MAX_PAIRS, NO_WINDOW, DynamicMask, visible

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers


class Paths(NamedTuple):
    """The N tokens before each token on its path, the nearest first."""

    exists: Bool[Array, "B T N"]
    """False = the path is shorter."""
    columns: Int[Array, "B T N"] | None
    """Their columns in the row, any column of it if they do not exist; None = the N columns to the left."""


def find_paths(
    segments: Int[Array, "B T"],
    last: Int[Array, "B T"] | None,
    *,
    positions: Int[Array, "B T"],
    width: int,
) -> Paths:
    """Find the N = width - 1 tokens before each token, once for all layers.

    Args:
        segments, last: as in `Transformer.forward`; last None = no segment continues another.
        positions: of each token in its trajectory, which has all its earlier tokens in the row.
    """
    steps = jnp.arange(1, width)
    exists = (segments[..., None] > 0) & (positions[..., None] >= steps)
    if last is None:
        return Paths(exists, None)
    columns = jnp.arange(segments.shape[1])

    # The token before is the nearest visible one to the left. A path is then followed step by step.
    def token_before(rows, of_rows):
        rows, of_rows = rows[..., None], of_rows[..., None]
        seen = visible(DynamicMask(), rows, columns, NO_WINDOW, of_rows, last[:, None]) & (columns < rows)
        return jnp.max(jnp.where(seen, columns, 0), axis=-1)

    rows = jnp.broadcast_to(columns, segments.shape)
    before = map_chunks(token_before, max(MAX_PAIRS // segments.size, 1), rows, segments)
    path = [before]
    for _ in range(width - 2):
        path.append(jnp.take_along_axis(before, path[-1], axis=1))
    return Paths(exists, jnp.stack(path, axis=-1))


def conv_taps(w: Layers, name: str) -> tuple[Float[Array, "D width"], Float[Array, "D"] | None]:
    """Return the weights of a layer's convolution and its bias, None if it has none."""
    bias = getattr(w, f"{name}_bias", None)
    return getattr(w, name)[:, 0], None if bias is None else bias[...]


def causal_conv(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D width"],
    paths: Paths,
    bias: Float[Array, "D"] | None = None,
) -> Float[Array, "B T D"]:
    """Compute the depthwise convolution of each token and the tokens before it, in float32.

    Args:
        weight: of the oldest to the newest token, as in torch.
        paths: of `find_paths` with this width.
    """
    before = (_step_back(x, paths, n) for n in range(1, weight.shape[1]))
    return _weighted_sum((x, *before), weight, bias)


def convolve_parts(
    parts: tuple[Float[Array, "B T _"], ...],
    weight: Float[Array, "D width"],
    paths: Paths,
    bias: Float[Array, "D"] | None = None,
) -> list[Float[Array, "B T _"]]:
    """Compute `causal_conv` of each part of the D channels, as devices divide each part evenly."""
    ends = list(itertools.accumulate(x.shape[2] for x in parts))[:-1]
    biases = [None] * len(parts) if bias is None else jnp.split(bias, ends)
    weights = jnp.split(weight, ends)
    return [causal_conv(x, w, paths, b) for x, w, b in zip(parts, weights, biases, strict=True)]


def conv_window(x: Float[Array, "B T D"], paths: Paths) -> Float[Array, "B T width D"]:
    """Return the inputs of each token's convolution, the oldest first, 0 before the start."""
    count = paths.exists.shape[2]
    return jnp.stack([*(_step_back(x, paths, n) for n in range(count, 0, -1)), x], axis=2)


def convolve(
    window: Float[Array, "*B width D"],
    weight: Float[Array, "D width"],
    bias: Float[Array, "D"] | None = None,
) -> Float[Array, "*B D"]:
    """Compute `causal_conv` from the inputs of each token (`conv_window`)."""
    return _weighted_sum(jnp.moveaxis(window, -2, 0)[::-1], weight, bias)


def conv_state(x: Float[Array, "B T D"], paths: Paths) -> Float[Array, "B N D"]:
    """Return the inputs that precede the next token of each row, the oldest first, 0 before the start.

    Args:
        x: the last column must not be padding.
    """
    count = paths.exists.shape[2]
    inputs = [x, *(_step_back(x, paths, n) for n in range(1, count))]
    return jnp.stack([x[:, -1] for x in inputs[::-1]], axis=1)


def _step_back(x: Float[Array, "B T D"], paths: Paths, n: int) -> Float[Array, "B T D"]:
    """Return the input of the n-th token before each token, 0 if none."""
    if paths.columns is None:
        found = jnp.pad(x, ((0, 0), (n, 0), (0, 0)))[:, : x.shape[1]]
    else:
        found = jnp.take_along_axis(x, paths.columns[:, :, n - 1, None], axis=1, mode="clip")
    return jnp.where(paths.exists[:, :, n - 1, None], found, 0)


def _weighted_sum(
    inputs: Iterable[Float[Array, "*B D"]], weight: Float[Array, "D width"], bias: Float[Array, "D"] | None
) -> Float[Array, "*B D"]:
    """Sum the inputs, the newest first, times their weights."""
    weights = weight.astype(jnp.float32).T[::-1]
    total = sum(x.astype(jnp.float32) * w for x, w in zip(inputs, weights, strict=True))
    return total if bias is None else total + bias.astype(jnp.float32)
