"""Keys of config.json that describe layers of other kinds than attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.hf.families import FAMILIES, Defaults
from jaxrl_llm.hf.json_file import LARGEST, JsonKeys
from jaxrl_llm.hf.windows import check_layer_types
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.mixer_config import (
    ATTENTION,
    RECURRENT_KINDS,
    ConvConfig,
    DeltaConfig,
    LayerKind,
    MambaConfig,
)

KEYS: dict[LayerKind, dict[str, str]] = {
    "delta": {
        "key_heads": "linear_num_key_heads",
        "value_heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "conv_width": "linear_conv_kernel_dim",
    },
    "conv": {"conv_width": "conv_L_cache", "conv_bias": "conv_bias"},
    "mamba": {
        "heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state_size": "ssm_state_size",
        "groups": "n_groups",
        "conv_width": "conv_kernel",
        "conv_bias": "use_conv_bias",
        "bias": "use_bias",
        "dt_min": "time_step_min",
    },
}
"""Kind -> fields of its Config -> HF keys."""
GRANITE_KEYS = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "state_size": "mamba_d_state",
    "groups": "mamba_n_groups",
    "conv_width": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}
"""Fields of MambaConfig -> Granite's keys."""
NEGATIVE = "linear_allow_neg_eigval"
CONFIGS = {"delta": DeltaConfig, "conv": ConvConfig, "mamba": MambaConfig}
PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""Letters of `hybrid_override_pattern` of Nemotron-H -> names in `layers_block_type`."""
OLD_MAMBA = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
}
"""Older keys of Nemotron-H, which count before the newer ones, as in transformers."""
OLD_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older names in `layers_block_type`."""
QWEN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Families of Qwen with recurrent layers."""
SHARED_SIZE = "shared_intermediate_size"
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
    if recurrent not in kinds:
        return {"layer_kinds": kinds}
    keys = _with_default_sizes(keys) if family == "olmo_hybrid" else keys
    keys = _with_head_size(keys) if family == "granitemoehybrid" else keys

    def read(field, key):
        default = getattr(CONFIGS[recurrent], field)
        if isinstance(default, bool):
            return keys.flag(key)
        return keys.number(key, 0.0, high=1e3) if isinstance(default, float) else keys.integer(key, 2**16)

    fields = {field: read(field, key) for field, key in _keys(family, recurrent).items()}
    return {"layer_kinds": kinds, recurrent: CONFIGS[recurrent](**fields, **FAMILIES[family].recurrent)}


def _keys(family: str, kind: LayerKind) -> dict[str, str]:
    """Return the fields of a kind's Config -> the keys of a family."""
    negative = {"negative_eigenvalues": NEGATIVE} if family == "olmo_hybrid" else {}
    return (GRANITE_KEYS if family == "granitemoehybrid" else KEYS[kind]) | negative


def with_layer_types(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with `layer_types` and `num_hidden_layers`. Nemotron-H has other keys for them:
    `layers_block_type`, with older names, or `hybrid_override_pattern`, with a letter for each layer.
    Granite 4 has the older names, too, and transformers 5 saves the newer ones."""
    if raw.get("model_type") == "granitemoehybrid":
        types = raw.get("layer_types", raw.get("layers_block_type"))
        older = {new: old for old, new in OLD_TYPES.items()}
        layers = raw.get("num_hidden_layers", Defaults("granitemoehybrid").get("num_hidden_layers"))
        is_size = isinstance(layers, int) and layers <= LARGEST["num_hidden_layers"]
        types = ["mamba"] * layers if types is None and is_size else types
        if isinstance(types, list):
            types = [older.get(name, name) if isinstance(name, str) else name for name in types]
        return {**raw, "layer_types": types}
    if raw.get("model_type") != "nemotron_h":
        return raw
    raw = raw | {new: raw[old] for old, new in OLD_MAMBA.items() if old in raw}
    types, letters = raw.get("layers_block_type", raw.get("layer_types")), raw.get("hybrid_override_pattern")
    if types is None:
        letters = "ME*-" if letters is None else letters
        types = [PATTERN.get(letter, letter) for letter in letters] if isinstance(letters, str) else letters
    if not isinstance(types, list):
        return {"num_hidden_layers": 1, **raw, "layer_types": types}  # refused by `check_layer_types`
    types = [OLD_TYPES.get(name, name) if isinstance(name, str) else name for name in types]
    return {"num_hidden_layers": len(types), **raw, "layer_types": types}


def _recurrent_kind(family: str) -> LayerKind:
    """Return the kind of a family's layers that are not attention."""
    return next(kind for kind in FAMILIES[family].kinds.values() if kind in RECURRENT_KINDS)


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
    every = keys.integer("full_attention_interval")
    types = [names[recurrent if (i + 1) % every else ATTENTION] for i in layers]
    if family == "olmo_hybrid" and num_layers < every:
        types[-1] = names[ATTENTION]
    return types


def _with_default_sizes(keys: JsonKeys) -> JsonKeys:
    """Return the keys with defaults of absent and null sizes, which follow from other sizes (OLMo-hybrid)."""
    sizes = KEYS["delta"]
    heads, raw = keys.integer("num_attention_heads"), dict(keys.raw)
    for key in (sizes["key_heads"], sizes["value_heads"]):
        raw[key] = keys.optional(key, 2**16) or heads
    size = int(0.75 * keys.integer("hidden_size") / raw[sizes["key_heads"]])
    raw[sizes["key_dim"]] = keys.optional(sizes["key_dim"], 2**16) or size
    raw[sizes["value_dim"]] = keys.optional(sizes["value_dim"], 2**16) or 2 * raw[sizes["key_dim"]]
    return JsonKeys(raw, keys.file, keys.defaults)


def _with_head_size(keys: JsonKeys) -> JsonKeys:
    """Return the keys of Granite with the size of Mamba's heads, which may be "auto".

    Raises:
        UserError: heads of this size do not fill `mamba_expand` times the hidden size, or step sizes have
            bounds.
    """
    sizes, heads = keys.integer("mamba_expand", 2**16), keys.integer("mamba_n_heads", 2**16)
    inner = sizes * keys.integer("hidden_size")
    own = keys.get("mamba_d_head")
    size = inner // heads if own == "auto" else keys.integer("mamba_d_head", 2**13)
    if size * heads != inner:
        raise keys.wrong(
            "mamba_d_head", own, f"times mamba_n_heads must be {inner}, mamba_expand times hidden_size"
        )
    bounds = keys.get("time_step_limit")
    if bounds not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise keys.wrong("time_step_limit", bounds, "is not supported; supported: [0.0, Infinity]")
    return JsonKeys({**keys.raw, "mamba_d_head": size}, keys.file, keys.defaults)


def write_layer_kinds(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of config.json that `read_layer_kinds` reads."""
    known, recurrent = FAMILIES[config.family].kinds, config.recurrent_kind
    if not known:
        return {}
    names = {kind: name for name, kind in known.items()}
    kinds = config.layer_kinds or (ATTENTION,) * config.num_layers
    of_kind = _keys(config.family, recurrent).items() if recurrent else ()
    sizes = {key: getattr(getattr(config, recurrent), field) for field, key in of_kind}
    types = [names[kind] for kind in kinds]
    if config.family == "granitemoehybrid":  # sizes that transformers accepts without such layers, too
        inner = config.mamba.inner // config.hidden_size if config.mamba else 2
        sizes = {"mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": inner, **sizes}
    if config.family in QWEN and (every := attention_interval(kinds)):
        sizes["full_attention_interval"] = every  # SGLang reads it in place of `layer_types`
    if config.family != "nemotron_h":
        return {"layer_types": types, **sizes}
    letters = {name: letter for letter, name in PATTERN.items()}
    pattern = "".join(letters[name] for name in types)
    return {"layers_block_type": types, "hybrid_override_pattern": pattern, **sizes}


def attention_interval(kinds: Sequence[LayerKind]) -> int | None:
    """Return n if every n-th layer is attention and no other; None = there is no such n."""
    every = kinds.index(ATTENTION) + 1
    return every if all((kind == ATTENTION) == (i % every == 0) for i, kind in enumerate(kinds, 1)) else None


def read_mlp_size(keys: JsonKeys, family: str) -> int:
    """Return the width of the dense feed-forward. For LFM2 it is two thirds of the key, times a factor, and
    rounded up to a multiple. Granite 4 has another key for it, and for Qwen 1 it is half the key."""
    largest = LARGEST["intermediate_size"]
    if family == "granitemoehybrid":
        return keys.integer(SHARED_SIZE, largest)
    old = family == "lfm2" and OLD_SIZE in keys.raw
    size = keys.integer(OLD_SIZE if old else "intermediate_size", largest)
    if family == "qwen":
        if size % 2:
            raise keys.wrong("intermediate_size", size, "must be even: it counts w1 and w2")
        return size // 2
    if family != "lfm2" or not keys.flag(ADJUST, True):
        return size
    size, factor = int(2 * size / 3), keys.number("block_ffn_dim_multiplier", None, high=1e6)
    if factor is None:
        return size
    multiple = keys.integer("block_multiple_of", largest)
    return multiple * -(-int(factor * size) // multiple)


def write_mlp_size(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys with which `read_mlp_size` reads the width of the dense feed-forward."""
    if config.family == "granitemoehybrid":
        size = config.moe.shared_size if config.moe else config.mlp_size
        return {SHARED_SIZE: size, "num_local_experts": 0}
    if config.family == "qwen":
        return {"intermediate_size": 2 * config.mlp_size}
    return {ADJUST: False} if config.family == "lfm2" else {}
