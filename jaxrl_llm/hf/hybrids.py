"""Keys of config.json that describe layers of other kinds than attention."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.hf.families import FAMILIES
from jaxrl_llm.hf.json_file import LARGEST, JsonKeys
from jaxrl_llm.hf.windows import check_layer_types
from jaxrl_llm.models.config import ATTENTION, DELTA, DeltaConfig, TransformerConfig

SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
"""Fields of DeltaConfig -> HF keys."""


def read_layer_kinds(keys: JsonKeys, family: str, num_layers: int) -> dict[str, Any]:
    """Return the fields layer_kinds and delta of TransformerConfig; none for a family of attention alone.

    Raises:
        UserError: `layer_types` names unknown kinds, or another number of layers.
    """
    known = FAMILIES[family].kinds
    if not known:
        return {}
    types = keys.get("layer_types")
    if types is None:
        every = keys.integer("full_attention_interval", LARGEST["num_hidden_layers"])
        names = {kind: name for name, kind in known.items()}
        types = [names[DELTA if (i + 1) % every else ATTENTION] for i in range(num_layers)]
    check_layer_types(keys, types, known, num_layers=num_layers)
    kinds = tuple(known[name] for name in types)
    if set(kinds) == {ATTENTION}:
        return {}
    sizes = {field: keys.integer(key, 2**16) for field, key in SIZES.items()}
    return {"layer_kinds": kinds, "delta": DeltaConfig(**sizes, **FAMILIES[family].delta)}


def write_layer_kinds(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of config.json that `read_layer_kinds` reads."""
    known = FAMILIES[config.family].kinds
    if not known:
        return {}
    names = {kind: name for name, kind in known.items()}
    kinds = config.layer_kinds or (ATTENTION,) * config.num_layers
    sizes = {key: getattr(config.delta, field) for field, key in SIZES.items()} if config.delta else {}
    return {"layer_types": [names[kind] for kind in kinds], **sizes}
