"""Heads of layers without a sliding window, in models whose layers have heads of two sizes (Gemma 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from jaxrl_llm.ranges import Range

if TYPE_CHECKING:
    from jaxrl_llm.models.config import TransformerConfig


@dataclass(frozen=True)
class GlobalHeads:
    """Heads of the layers without a sliding window, if the layers with one have others (Gemma 4)."""

    num_kv_heads: Annotated[int, Range(1, 2**16)] = 4
    """Key and value heads."""
    head_dim: Annotated[int, Range(2, 2**13, usual="512 is usual")] = 512
    """Size of one head."""
    keys_as_values: bool = False
    """As `keys_as_values` of TransformerConfig."""

    def problems_in(self, config: TransformerConfig) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for an architecture that cannot have these heads."""
        if config.num_heads % self.num_kv_heads:
            have = f"has num_kv_heads {self.num_kv_heads}"
            yield "global_heads", f"{have}: it must divide num_heads, {config.num_heads}."
        if self.head_dim % 2:
            yield "global_heads", f"has head_dim {self.head_dim}: it must be even, since RoPE rotates pairs."
        has_both = set(config.window_layers or ()) == {True, False}
        if not (config.sliding_window and config.local_rope and has_both):
            needs = "sliding_window, local_rope, and window_layers with and without a window"
            yield "global_heads", f"is set: it needs {needs}."
        if config.mla or config.layer_kinds or config.rope_layers:
            yield "global_heads", "is set: mla, layer_kinds and rope_layers must be None."
        if config.moe and config.moe.dense_layers:
            yield "global_heads", "is set: moe.dense_layers must be 0."


def config_of_layers(c: TransformerConfig, has_window: bool) -> TransformerConfig:
    """Return the architecture of the layers with, or without, a sliding window: their heads and RoPE."""
    rope = c.local_rope if has_window and c.local_rope else c.rope
    own = {} if has_window or not c.global_heads else vars(c.global_heads)
    return replace(c, rope=rope, local_rope=None, global_heads=None, **own)
