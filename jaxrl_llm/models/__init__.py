"""The decoder's interface: a config, a pytree of weights and one forward function.

params = init(config, key)
hidden = params(tokens, positions, segments)  # logits = hidden @ params.head.T

Configs are data; the functions are imported on first use, and with them jax and Flax.
"""

import importlib
from typing import Any

from jaxrl_llm.models.config import RopeConfig, TransformerConfig
from jaxrl_llm.models.lora_config import AdaptedConfig, LoraConfig

_FUNCTIONS = {
    "params": (
        "abstract",
        "init",
        "layer_matrices",
        "logical_axes",
        "named_leaves",
        "nonfinite",
        "shardings",
        "to_host",
        "with_heads",
        "without_value_head",
    ),
    "transformer": ("Transformer", "cast_weights"),
}
_MODULES = {name: module for module, names in _FUNCTIONS.items() for name in names}

__all__ = ["AdaptedConfig", "LoraConfig", "RopeConfig", "TransformerConfig", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
