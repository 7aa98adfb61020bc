"""Keys of config.json that describe layers of other kinds than attention."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.hf.families import FAMILIES
from jaxrl_llm.hf.json_file import LARGEST, JsonKeys
from jaxrl_llm.hf.windows import check_layer_types
from jaxrl_llm.models.config import ATTENTION, ConvConfig, DeltaConfig, LayerKind, TransformerConfig

KEYS: dict[LayerKind, dict[str, str]] = {
    "delta": {
        "key_heads": "linear_num_key_heads",
        "value_heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "conv_width": "linear_conv_kernel_dim",
    },
    "conv": {"conv_width": "conv_L_cache", "conv_bias": "conv_bias"},
}
"""Kind -> fields of its Config -> HF keys."""
CONFIGS = {"delta": DeltaConfig, "conv": ConvConfig}
NEGATIVE = "linear_allow_neg_eigval"
FLAGS = ("conv_bias", NEGATIVE)
ADJUST, OLD_SIZE = "block_auto_adjust_ff_dim", "block_ff_dim"


def read_layer_kinds(keys: JsonKeys, family: str, num_layers: int) -> dict[str, Any]:
    """Return the field layer_kinds of TransformerConfig and the field of the recurrent kind; none for a model
    of attention alone.

    Raises:
        UserError: `layer_types` names unknown kinds, or another number of layers.
    """
    known = FAMILIES[family].kinds
    if not known:
        return {}
    types = keys.get("layer_types")
    if types is None:
        types = _default_layer_types(keys, family, num_layers)
    check_layer_types(keys, types, known, num_layers=num_layers)
    kinds = tuple(known[name] for name in types)
    if set(kinds) == {ATTENTION}:
        return {}
    recurrent = _recurrent_kind(family)
    keys = _with_default_sizes(keys) if family == "olmo_hybrid" else keys
    read = lambda key: keys.flag(key) if key in FLAGS else keys.integer(key, 2**16)
    fields = {field: read(key) for field, key in _keys(family, recurrent).items()}
    return {"layer_kinds": kinds, recurrent: CONFIGS[recurrent](**fields, **FAMILIES[family].delta)}


def _keys(family: str, kind: LayerKind) -> dict[str, str]:
    """Return the fields of a kind's Config -> the keys of a family."""
    negative = {"negative_eigenvalues": NEGATIVE} if NEGATIVE in FAMILIES[family].defaults else {}
    return KEYS[kind] | negative


def _recurrent_kind(family: str) -> LayerKind:
    """Return the kind of a family's layers that are not attention."""
    return next(kind for kind in FAMILIES[family].kinds.values() if kind != ATTENTION)


def _default_layer_types(keys: JsonKeys, family: str, num_layers: int) -> list[str]:
    """Return the `layer_types` of a config.json without this key."""
    names = {kind: name for name, kind in FAMILIES[family].kinds.items()}
    recurrent, layers = _recurrent_kind(family), range(num_layers)
    if recurrent == "conv":
        attends = keys.get("full_attn_idxs")
        attends = list(layers) if attends is None else attends
        if not isinstance(attends, list) or any(i not in layers for i in attends):
            raise keys.wrong("full_attn_idxs", attends, f"must be a list of layers, 0 to {num_layers - 1}")
        return [names[ATTENTION if i in attends else recurrent] for i in layers]
    every = keys.integer("full_attention_interval", LARGEST["num_hidden_layers"])
    types = [names[recurrent if (i + 1) % every else ATTENTION] for i in layers]
    if family == "olmo_hybrid" and num_layers < every:
        types[-1] = names[ATTENTION]
    return types


def _with_default_sizes(keys: JsonKeys) -> JsonKeys:
    """Return the keys with defaults of absent and null sizes, which follow from other sizes (OLMo-hybrid)."""
    sizes = KEYS["delta"]
    heads, raw = keys.integer("num_attention_heads", LARGEST["num_attention_heads"]), dict(keys.raw)
    for key in (sizes["key_heads"], sizes["value_heads"]):
        raw[key] = keys.optional(key, 2**16) or heads
    size = int(0.75 * keys.integer("hidden_size", LARGEST["hidden_size"]) / raw[sizes["key_heads"]])
    raw[sizes["key_dim"]] = keys.optional(sizes["key_dim"], 2**16) or size
    raw[sizes["value_dim"]] = keys.optional(sizes["value_dim"], 2**16) or 2 * raw[sizes["key_dim"]]
    return JsonKeys(raw, keys.file, keys.defaults)


def write_layer_kinds(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of config.json that `read_layer_kinds` reads."""
    known, recurrent = FAMILIES[config.family].kinds, config.recurrent_kind
    if not known:
        return {}
    names = {kind: name for name, kind in known.items()}
    kinds = config.layer_kinds or (ATTENTION,) * config.num_layers
    of_kind = _keys(config.family, recurrent).items() if recurrent else ()
    sizes = {key: getattr(getattr(config, recurrent), field) for field, key in of_kind}
    return {"layer_types": [names[kind] for kind in kinds], **sizes}


def read_mlp_size(keys: JsonKeys, family: str) -> int:
    """Return the width of the dense feed-forward. For LFM2 it is two thirds of the key, times a factor, and
    rounded up to a multiple."""
    largest = LARGEST["intermediate_size"]
    old = family == "lfm2" and OLD_SIZE in keys.raw
    size = keys.integer(OLD_SIZE if old else "intermediate_size", largest)
    if family != "lfm2" or not keys.flag(ADJUST, True):
        return size
    size, factor = int(2 * size / 3), keys.number("block_ffn_dim_multiplier", None, high=1e6)
    if factor is None:
        return size
    multiple = keys.integer("block_multiple_of", largest)
    return multiple * -(-int(factor * size) // multiple)


def write_mlp_size(config: TransformerConfig) -> dict[str, Any]:
    """Return the key with which `read_mlp_size` reads intermediate_size as it is."""
    return {ADJUST: False} if config.family == "lfm2" else {}
