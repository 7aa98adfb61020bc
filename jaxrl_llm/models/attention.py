"""Positions in attention: rotary embeddings, and the sliding windows of the layers."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_kernels.flash_attention.spec import NO_WINDOW, row_windows
from jaxrl_llm.models.config import RopeConfig, TransformerConfig
from jaxrl_llm.models.global_heads import config_of_layers
from jaxrl_llm.models.mixer_config import ATTENTION

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers

ALIBI_DIMS = 8


class RopeTables(NamedTuple):
    """cos and sin of every position, float32, times yarn's attention factor.

    A model with several rotary position embeddings (`rope_configs`) has a dim of R embeddings before the last
    one, which is as large as the largest needs; `layer_rope` takes the tables of a layer.
    """

    cos: Float[Array, "B T *R half"]
    sin: Float[Array, "B T *R half"]
    growth: Float[Array, "B T"] | None  # factor of queries (`query_growth`), None = 1
    places: Float[Array, "B T 8"] | None = None  # `alibi_places`


class LayerNumbers(NamedTuple):
    """Numbers that differ between layers with weights of the same shapes, and that a scan passes to them."""

    window: int | Int[Array, ""]  # tokens that a token attends to, including itself
    rope: int | Int[Array, ""]  # index in `rope_configs`
    inputs: Float[Array, "B T P"] | None = None  # `per_layer_inputs`


def rope_configs(c: TransformerConfig) -> list[TransformerConfig | None]:
    """Return the architectures of layers by their `rope`, the global one first; None = no rotation, last.
    ALiBi's layers read none of them."""
    has_plain_layers = c.rope_layers is not None and not all(c.rope_layers)
    local = [config_of_layers(c, has_window=True)] if c.local_rope else []
    return [config_of_layers(c, has_window=False), *local, *([None] if has_plain_layers else [])]


def layer_numbers(c: TransformerConfig) -> list[LayerNumbers]:
    """Return the window and the rotary position embedding of each layer."""
    rotated = c.rope_layers or (True,) * c.num_layers
    last = len(rope_configs(c)) - 1
    return [
        LayerNumbers(window, int(window != NO_WINDOW and c.local_rope is not None) if rotates else last)
        for window, rotates in zip(window_sizes(c), rotated, strict=True)
    ]


def stacked_numbers(c: TransformerConfig, inputs: Float[Array, "L B T P"] | None = None) -> LayerNumbers:
    """Return `layer_numbers` as arrays [L], for a scan, with the layers' inputs."""
    windows, ropes, _ = zip(*layer_numbers(c), strict=True)
    return LayerNumbers(jnp.asarray(windows), jnp.asarray(ropes), inputs)


def layer_rope(c: TransformerConfig, tables: RopeTables, numbers: LayerNumbers) -> RopeTables:
    """Return the tables of one layer, without the dim R.

    Args:
        c: of the layer's stack.
    """
    if tables.cos.ndim == 3:
        return tables

    def of_layer(x):
        return jax.lax.dynamic_index_in_dim(x, numbers.rope, axis=2, keepdims=False)[..., : c.rotary_dim // 2]

    return tables._replace(cos=of_layer(tables.cos), sin=of_layer(tables.sin))


def rope_tables(
    c: TransformerConfig,
    positions: Int[Array, "B T"],
    lengths: Int[Array, "B T"] | None = None,
) -> RopeTables:
    """Compute cos and sin of every position for each rotary position embedding of the model.

    Args:
        c: its `rope`, `local_rope`, rotary_dim and max_position.
        positions: of each token in its trajectory, 0-based.
        lengths: tokens of each token's trajectory, for "dynamic" scaling, whose frequencies depend on lengths
            above max_position. None = no trajectory is longer (rollout refuses longer ones, since cached keys
            cannot be rotated again).
    """
    configs = rope_configs(c)
    half = max(of.rotary_dim for of in configs if of) // 2
    tables = [_cos_and_sin(of, half, positions, lengths) for of in configs]
    stacked = (
        tables[0] if len(tables) == 1 else [jnp.stack(parts, axis=2) for parts in zip(*tables, strict=True)]
    )
    growth = None
    if c.rope.query_growth:
        original = original_length(c)
        growth = 1 + c.rope.query_growth * jnp.log1p((positions // original).astype(jnp.float32))
    return RopeTables(*stacked, growth, alibi_places(positions) if c.alibi else None)


def _cos_and_sin(
    c: TransformerConfig | None, half: int, positions, lengths
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Return the tables of one of `rope_configs`, padded to `half` frequencies."""
    if c is None:
        shape = (*positions.shape, half)
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    rope = c.rope
    frequencies, scale = rope_frequencies(c, rope)
    frequencies = jnp.asarray(np.pad(frequencies, (0, half - len(frequencies))), jnp.float32)
    if rope.scaling == "dynamic" and lengths is not None:
        stretch = _dynamic_stretch(c, lengths)
        exponents = np.arange(0, c.rotary_dim, 2) / (c.rotary_dim - 2)
        frequencies = frequencies * stretch[..., None] ** -jnp.asarray(exponents, jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return scale * jnp.cos(angles), scale * jnp.sin(angles)


def trajectory_lengths(
    c: TransformerConfig, positions: Int[Array, "B T"], segments: Int[Array, "B T"]
) -> Int[Array, "B T"] | None:
    """Return the length of each token's trajectory within these rows; None if RoPE does not need it."""
    if c.rope.scaling != "dynamic":
        return None
    last = jax.vmap(lambda row, ids: jax.ops.segment_max(row, ids, row.size + 1))(positions, segments)
    return jnp.take_along_axis(last, segments, axis=1) + 1


def grow_queries(q: Float[Array, "B T H E"], rope: RopeTables) -> Float[Array, "B T H E"]:
    """Multiply queries by the growth of their position, rounded to the type of q, if the model has one."""
    return q if rope.growth is None else q * rope.growth.astype(q.dtype)[..., None, None]


def apply_rope(
    x: Float[Array, "B T H E"], rope: RopeTables, interleaved: bool = False
) -> Float[Array, "B T H E"]:
    """Rotate the pairs (x[i], x[i + half]) of the first 2 half dims, HF's half-split layout, in float32.

    Args:
        interleaved: the pairs are (x[2 i], x[2 i + 1]), but the result is in the same layout (DeepSeek).
    """
    size = 2 * rope.cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    rotated = rotated.astype(jnp.float32)
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    cos, sin = rope.cos[:, :, None], rope.sin[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1) if rest.size else rotated.astype(x.dtype)


def rope_frequencies(config: TransformerConfig, rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Return radians per position for each of rotary_dim / 2 pairs (float64), and the factor on cos and sin.

    Sources: linear (kaiokendev), yarn (arXiv 2309.00071, section 3), llama3 (Llama 3.1), longrope (arXiv
    2402.13753), proportional (Gemma 4), each as HF defines it. "dynamic" has the default frequencies up to
    max_position.
    """
    frequencies = rope.theta ** -(np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim)
    original = rope.original_max_position or config.max_position
    match rope.scaling:
        case "default" | "dynamic":
            return frequencies, 1.0
        case "linear":
            return frequencies / rope.factor, 1.0
        case "yarn":
            return _yarn(rope, frequencies, original), _yarn_attention_factor(rope)
        case "llama3":
            return _llama3(rope, frequencies, original), 1.0
        case "longrope":
            divisors = np.asarray(rope.long_factor if rope.is_long else rope.short_factor)
            return frequencies / divisors, _longrope_attention_factor(rope, original)
        case "proportional":
            rotated = int(rope.partial_rotary * config.rotary_dim // 2)
            return np.where(np.arange(len(frequencies)) < rotated, frequencies / rope.factor, 0.0), 1.0
    raise ValueError(f"unknown rope.scaling {rope.scaling!r}")


def _yarn(rope: RopeConfig, frequencies: np.ndarray, original: int) -> np.ndarray:
    """Keep high frequencies, divide low ones by the factor, with a linear ramp between."""

    def pair_index(rotations: float) -> float:
        return len(frequencies) * math.log(original / (rotations * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_index(rope.beta_fast), pair_index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0, 1)
    return frequencies * (1 - ramp) + frequencies / rope.factor * ramp


def attention_scale(config: TransformerConfig) -> float:
    """Return the factor of attention scores: `attention_multiplier`, or 1 / sqrt(head_dim).

    Latent attention with yarn multiplies by the square of yarn's magnitude at mscale_all_dim, as transformers
    does (`yarn_apply_mscale`).
    """
    scale, rope = config.attention_multiplier or 1 / math.sqrt(config.head_dim), config.rope
    if config.mla and rope.scaling == "yarn" and rope.mscale_all_dim:
        scale *= _yarn_magnitude(rope, rope.mscale_all_dim) ** 2
    return scale


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_magnitude(rope, rope.mscale) / _yarn_magnitude(rope, rope.mscale_all_dim)
    return _yarn_magnitude(rope, 1.0)


def _longrope_attention_factor(rope: RopeConfig, original: int) -> float:
    if rope.attention_factor is not None or rope.factor <= 1:
        return rope.attention_factor or 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(original))


def for_length(c: TransformerConfig, longest: int) -> TransformerConfig:
    """Return the architecture for sequences of up to `longest` tokens.

    A model with longrope has two sets of frequencies. transformers chooses anew at each forward pass, by the
    longest sequence in it; here one set serves a run, so that cached keys and old log-probs fit the new ones.
    """
    if c.rope.scaling != "longrope":
        return c
    is_long = longest > original_length(c)
    return dataclasses.replace(c, rope=dataclasses.replace(c.rope, is_long=is_long))


def with_yarn(c: TransformerConfig, factor: float | None, original: int | None = None) -> TransformerConfig:
    """Return the architecture with its positions stretched by YaRN (arXiv 2309.00071).

    Another factor replaces that of a model with YaRN, and "dynamic" scaling. Models with other scaling are
    returned as they are, for `recipe.rules_model` refuses them.

    Args:
        factor: ratio of the stretched length to the original one; None = no change.
        original: length before, in tokens; None = `original_length`.
    """
    rope = c.rope
    if factor is None or rope.scaling not in ("default", "dynamic", "yarn"):
        return c
    length, is_same = original or original_length(c), (rope.scaling, rope.factor) == ("yarn", factor)
    rope = dataclasses.replace(rope, scaling="yarn", factor=factor, original_max_position=length)
    if not is_same:  # a magnitude that config.json states is of its factor
        rope = dataclasses.replace(rope, attention_factor=None)
    return dataclasses.replace(c, rope=rope, max_position=int(length * factor))


def original_length(c: TransformerConfig) -> int:
    """Return the length that a model was trained at before its RoPE was stretched, in tokens."""
    return c.rope.original_max_position or c.max_position


def _yarn_magnitude(rope: RopeConfig, weight: float) -> float:
    return 0.1 * weight * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0


def _llama3(rope: RopeConfig, frequencies: np.ndarray, original: int) -> np.ndarray:
    """Keep short wavelengths, interpolate long ones by the factor, with a smooth ramp between."""
    rotations = original * frequencies / (2 * math.pi)  # over the original length
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0, 1)
    return frequencies * keep + frequencies / rope.factor * (1 - keep)


def _dynamic_stretch(config: TransformerConfig, lengths: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Return the NTK-aware stretch s: theta grows by s^(E / (E - 2)), the slowest pair's frequency falls by
    s."""
    excess = jnp.maximum(lengths.astype(jnp.float32) / config.max_position, 1.0) - 1
    return 1 + config.rope.factor * excess


def key_dim(c: TransformerConfig) -> int:
    """Return the size of one head of queries and keys in attention: ALiBi adds dims (`add_alibi`)."""
    return c.head_dim + ALIBI_DIMS * c.alibi


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slope of each head (Press et al. 2022, arXiv 2108.12409): 2^(-8 i / n) for i = 1 ... n, n
    being the largest power of 2 up to `num_heads`; further heads have every second slope of 2 n heads."""
    power = 2 ** int(math.log2(num_heads))
    first, between = (2.0 ** (-8 * np.arange(1, n + 1) / n) for n in (power, 2 * power))
    return np.concatenate([first, between[::2]])[:num_heads]


def alibi_places(positions: Int[Array, "B T"]) -> Float[Array, "B T 8"]:
    """Return four times two numbers whose sum is the position. bfloat16 represents them for positions below
    65,536."""
    low = positions % 256
    return jnp.stack([positions - low, low] * (ALIBI_DIMS // 2), axis=-1).astype(jnp.float32)


def add_alibi(
    c: TransformerConfig, q: Float[Array, "B T H E"], k, v, places: Float[Array, "B T 8"]
) -> tuple[Float[Array, "B T H R"], Float[Array, "B T K R"], Float[Array, "B T K R"]]:
    """Add dims to queries and keys whose product is the head's slope times the key's position, R =
    `key_dim`.

    ALiBi adds slope (j - i) to the score of query i and key j. All keys of a query share the part - slope i,
    which softmax ignores. So every implementation of attention, and every cache, supports ALiBi. A slope is
    the sum of four numbers of bfloat16. The values' further dims are 0.
    """
    rest, parts = alibi_slopes(c.num_heads) / attention_scale(c), []
    for _ in range(ALIBI_DIMS // 2):
        part = rest.astype(jnp.bfloat16).astype(np.float64)
        parts += [part, part]
        rest = rest - part
    of_heads = jnp.asarray(np.stack(parts, axis=-1), q.dtype)
    of_heads = jnp.broadcast_to(of_heads, (*q.shape[:3], ALIBI_DIMS))
    of_keys = jnp.broadcast_to(places[:, :, None].astype(k.dtype), (*k.shape[:3], ALIBI_DIMS))
    join = lambda x, more: jnp.concatenate([x, more], axis=-1)
    return join(q, of_heads), join(k, of_keys), join(v, jnp.zeros_like(of_keys))


def rope_fn(c: TransformerConfig):
    """Return `rope_tables` as a function for `per_token_call`."""
    return lambda _, positions, lengths=None: rope_tables(c, positions, lengths)


def window_sizes(c: TransformerConfig) -> list[int]:
    """Return the sliding window of each layer: tokens that a token attends to, including itself."""
    layers = c.window_layers or (True,) * c.num_layers
    return [c.sliding_window if on and c.sliding_window else NO_WINDOW for on in layers]


def attention_windows(c: TransformerConfig) -> list[int]:
    """Return the sliding window of each layer with attention: the most keys that a query reads, which an
    indexer chooses if the model has one."""
    kinds = c.layer_kinds or (ATTENTION,) * c.num_layers
    windows = [c.index.topk] * c.num_layers if c.index else window_sizes(c)
    return [window for window, kind in zip(windows, kinds, strict=True) if kind == ATTENTION]


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


def sinks_of(w: Layers) -> Float[Array, "H"] | None:
    """Return the attention sinks of a layer, or None."""
    return w.sinks[...] if hasattr(w, "sinks") else None
