"""Keys of config.json that only Gemma 4 has: heads of global layers, shared keys, per-layer inputs."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.families import FAMILIES
from jaxrl_llm.hf.json_file import LARGEST, JsonKeys
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.global_heads import GlobalHeads

HEADS = {"head_dim": 2**13, "num_key_value_heads": 2**16}
"""Keys of a layer in `per_layer_config`, and their upper limits."""
INPUTS, INPUT_VOCABULARY = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
OVERRIDES = "per_layer_config"
"""Layer -> its keys, as transformers 5 writes it instead of the keys of all global layers."""


def read_global_heads(
    keys: JsonKeys, family: str, window_layers: tuple[bool, ...] | None, *, has_window: bool
) -> dict[str, Any]:
    """Return fields of TransformerConfig: `global_heads`, or, if no layer has a window, the heads themselves;
    per-layer inputs, and layers without keys and values.

    Args:
        window_layers, has_window: of `read_windows`.

    Raises:
        UserError: tokens attend to later ones, layers differ in more than global layers from others, or the
            second embedding has another vocabulary than the first.
    """
    if not FAMILIES[family].global_heads:
        return {}
    if (direction := keys.get("use_bidirectional_attention")) not in (None, False, "vision"):
        supported = 'is not supported; supported: null, and "vision", which text does not read'
        raise keys.wrong("use_bidirectional_attention", direction, supported)
    shared = keys.flag("attention_k_eq_v")
    dims = {"head_dim": keys.integer("global_head_dim", HEADS["head_dim"])}
    if shared and keys.get("num_global_key_value_heads") is not None:
        dims["num_key_value_heads"] = keys.integer("num_global_key_value_heads", HEADS["num_key_value_heads"])
    if keys.get(OVERRIDES) is not None:
        no_windows = (False,) * keys.integer("num_hidden_layers")
        dims = _read_overrides(keys, window_layers or no_windows)
    kv_heads, head_dim = (dims.get(key) or keys.integer(key, HEADS[key]) for key in reversed(HEADS))
    heads = GlobalHeads(kv_heads, head_dim, shared)
    fields = {"global_heads": heads} if has_window else vars(heads)
    # The inputs of each layer, from a second embedding, and layers that read earlier layers' keys.
    size = keys.integer(INPUTS, 2**16, low=0)
    shared_layers, vocab_size = keys.integer("num_kv_shared_layers", low=0), keys.get("vocab_size")
    is_wide = keys.flag("use_double_wide_mlp") and shared_layers > 0
    if size and (rows := keys.integer(INPUT_VOCABULARY, LARGEST["vocab_size"])) != vocab_size:
        raise keys.wrong(INPUT_VOCABULARY, rows, f"is not supported; supported: vocab_size, {vocab_size}")
    return {**fields, "per_layer_inputs": size, "shared_kv_layers": shared_layers, "wide_shared_mlp": is_wide}


def _read_overrides(keys: JsonKeys, slides: tuple[bool, ...]) -> dict[str, int]:
    """Return the keys of `per_layer_config` that all global layers have."""
    layers, found = keys.section(OVERRIDES), [{} for _ in slides]
    for name in layers.raw:  # "5", or "05" in a model of more than ten layers
        if not name.isdecimal() or int(name) >= len(slides):
            raise UserError(f"{keys.file}: {OVERRIDES} has layer {name!r} of {len(slides)} layers")
        found[int(name)] = layers.section(name).raw
    of_global = [raw for raw, has_window in zip(found, slides, strict=True) if not has_window]
    if set(of_global[0]) - set(HEADS) or any(raw != of_global[0] for raw in of_global):
        same = f"must have the same {' and '.join(HEADS)} for each layer with full_attention"
        raise keys.wrong(OVERRIDES, layers.raw, f"{same}, and no other keys")
    if any(raw for raw, has_window in zip(found, slides, strict=True) if has_window):
        raise keys.wrong(OVERRIDES, layers.raw, "must have no layer with sliding_attention")
    first = JsonKeys(of_global[0], keys.file, {})
    return {key: first.integer(key, HEADS[key]) for key in first.raw}


def write_global_heads(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of config.json that `read_global_heads` reads, in the spelling of published models."""
    if not FAMILIES[config.family].global_heads:
        return {}
    heads = config.global_heads or config
    return {
        "global_head_dim": heads.head_dim,
        "num_global_key_value_heads": heads.num_kv_heads if heads.keys_as_values else None,
        "attention_k_eq_v": heads.keys_as_values,
        INPUTS: config.per_layer_inputs,
        INPUT_VOCABULARY: config.vocab_size,
        "num_kv_shared_layers": config.shared_kv_layers,
        "use_double_wide_mlp": config.wide_shared_mlp,
    }
