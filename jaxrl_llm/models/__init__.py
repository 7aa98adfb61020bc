"""The decoder as the rest of the system sees it: a config, a pytree of weights and one function.

params = init(config, key)
hidden, _ = params(tokens, positions, segments)  # logits = hidden @ params.head.T
"""

from jaxrl_llm.models.config import RopeConfig, TransformerConfig
from jaxrl_llm.models.params import (
    abstract,
    cast,
    empty_cache,
    init,
    logical_axes,
    named_leaves,
    shardings,
)
from jaxrl_llm.models.transformer import KVCache, Transformer

__all__ = [
    "KVCache",
    "RopeConfig",
    "Transformer",
    "TransformerConfig",
    "abstract",
    "cast",
    "empty_cache",
    "init",
    "logical_axes",
    "named_leaves",
    "shardings",
]
