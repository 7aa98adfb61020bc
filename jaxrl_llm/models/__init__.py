"""The decoder's interface: a config, a pytree of weights and one forward function.

params = init(config, key)
hidden = params(tokens, positions, segments)  # logits = hidden @ params.head.T
"""

from jaxrl_llm.models.config import AdaptedConfig, LoraConfig, RopeConfig, TransformerConfig
from jaxrl_llm.models.params import (
    abstract,
    cast,
    init,
    layer_matrices,
    logical_axes,
    named_leaves,
    nonfinite,
    shardings,
    to_host,
    with_heads,
    without_value_head,
)
from jaxrl_llm.models.transformer import Transformer

__all__ = [
    "AdaptedConfig",
    "LoraConfig",
    "RopeConfig",
    "Transformer",
    "TransformerConfig",
    "abstract",
    "cast",
    "init",
    "layer_matrices",
    "logical_axes",
    "named_leaves",
    "nonfinite",
    "shardings",
    "to_host",
    "with_heads",
    "without_value_head",
]
