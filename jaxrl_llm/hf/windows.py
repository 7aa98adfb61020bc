"""Sliding windows in HF's config.json: which layers have one, by family; layers without RoPE."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.families import FAMILIES, Defaults
from jaxrl_llm.hf.json_file import JsonKeys
from jaxrl_llm.models.config import TransformerConfig

LAYER_TYPES = ("full_attention", "sliding_attention")


def read_windows(keys: JsonKeys, family: str, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """Return (sliding_window, window_layers).

    Mistral with `layer_types` is Ministral.
    """
    facts, kinds = FAMILIES[family], keys.get("layer_types")
    if facts.windows == "none":
        return None, None
    is_typed = facts.windows == "typed" or (facts.windows == "all or typed" and kinds is not None)
    names_windows = is_typed and isinstance(kinds, list) and LAYER_TYPES[True] in kinds
    if facts.window_switch and not keys.flag("use_sliding_window"):
        if names_windows:  # transformers cannot run it either
            raise keys.wrong("layer_types", kinds, "has windows, which need use_sliding_window: true")
        return None, None
    window = keys.optional("sliding_window")
    if window is None and names_windows:
        raise keys.wrong("layer_types", kinds, "has windows, which need sliding_window, their size")
    if window is None or not is_typed:
        return window, None
    if kinds is None:
        kinds = _default_layer_types(keys, family, num_layers)
    # A window for the layers that `layer_types` names.
    check_layer_types(keys, kinds, LAYER_TYPES, num_layers=num_layers)
    if facts.global_heads:  # as in transformers
        kinds = [*kinds[:-1], LAYER_TYPES[False]]
    slides = tuple(kind == LAYER_TYPES[True] for kind in kinds)
    return (window if any(slides) else None), (slides if len(set(slides)) > 1 else None)


def check_layer_types(keys: JsonKeys, types: Any, known: Collection[str], *, num_layers: int) -> None:
    """Refuse `layer_types` that are not a known name for each layer.

    Raises:
        UserError: the message names the file, the value and the known names.
    """
    if not isinstance(types, list) or not all(isinstance(name, str) and name in known for name in types):
        raise keys.wrong("layer_types", types, f"must be a list of {' and '.join(known)}")
    if len(types) != num_layers:
        raise UserError(f"{keys.file}: layer_types has {len(types)} entries for {num_layers} layers")


def _default_layer_types(keys: JsonKeys, family: str, num_layers: int) -> list[str]:
    """Return the default `layer_types` of a family."""
    layers = range(num_layers)
    if family == "smollm3":
        return [
            LAYER_TYPES[not rotates]
            for rotates in read_rope_layers(keys, family, num_layers) or (True,) * num_layers
        ]
    if period := FAMILIES[family].full_every:
        if family in ("gemma3_text", "exaone4"):
            period = keys.optional("sliding_window_pattern") or period
        return [LAYER_TYPES[bool((i + 1) % period)] for i in layers]
    first = keys.integer("max_window_layers", low=0)
    if family == "qwen2_moe":
        return [LAYER_TYPES[i % 2 == 0 and i < first] for i in layers]
    return [LAYER_TYPES[i >= first] for i in layers]


def write_windows(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of config.json that `read_windows` reads."""
    facts = FAMILIES[config.family]
    if facts.windows == "none":
        return {}
    if not facts.window_switch and not config.window_layers and facts.windows != "typed":
        return {"sliding_window": config.sliding_window}
    slides = config.window_layers or (True,) * config.num_layers
    if config.sliding_window is None:
        slides = (False,) * config.num_layers
    window = config.sliding_window
    means_rope = facts.rope_in_windows and config.rope_layers is None
    if window is None and not facts.window_switch and not means_rope:  # Gemma 4 refuses null
        window = Defaults(config.family).get("sliding_window")
    both = {"sliding_window": window, "layer_types": [LAYER_TYPES[on] for on in slides]}
    if not facts.window_switch:
        return both
    both["use_sliding_window"] = any(slides)
    if config.family == "smollm3":
        return both
    return {**both, "max_window_layers": slides.index(True) if any(slides) else config.num_layers}


def read_rope_layers(keys: JsonKeys, family: str, num_layers: int) -> tuple[bool, ...] | None:
    """Return which layers rotate queries and keys; None = all.

    `no_rope_layers` of SmolLM3 has 1 for a layer with RoPE and 0 for a layer without, despite its name. No
    layer of OLMo-hybrid rotates them if `rope_theta` is null, which an absent key is not; none of Nemotron-H.
    All layers of Granite 4 do if `position_embedding_type` is "rope", else none. All layers of EXAONE 4 do
    if `sliding_window` is null, else the layers with a window.
    """
    if not FAMILIES[family].has_rope:
        return (False,) * num_layers
    if switch := FAMILIES[family].rope_switch:
        return None if keys.get(switch) == "rope" else (False,) * num_layers
    if FAMILIES[family].null_theta:
        parameters = keys.get("rope_parameters")
        given = parameters if isinstance(parameters, dict) and "rope_theta" in parameters else keys.raw
        return None if given.get("rope_theta", 0) is not None else (False,) * num_layers
    if FAMILIES[family].rope_in_windows:
        window, slides = read_windows(keys, family, num_layers)
        in_all = keys.get("sliding_window") is None or (window and not slides)
        return None if in_all else slides or (False,) * num_layers
    every = keys.optional("no_rope_layer_interval")
    if every is None:
        return None
    rotates = keys.get("no_rope_layers")
    if rotates is None:
        rotates = [int((i + 1) % every != 0) for i in range(num_layers)]
    if not isinstance(rotates, list) or any(one not in (0, 1) for one in rotates):
        raise keys.wrong("no_rope_layers", rotates, "must be a list of 1 (RoPE) and 0 (no RoPE)")
    if len(rotates) < num_layers:
        raise UserError(f"{keys.file}: no_rope_layers has {len(rotates)} entries for {num_layers} layers")
    return None if all(rotates[:num_layers]) else tuple(map(bool, rotates[:num_layers]))


def write_rope_layers(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of config.json that `read_rope_layers` reads."""
    if switch := FAMILIES[config.family].rope_switch:
        return {switch: "rope" if all(config.rope_layers or (True,)) else "nope"}
    if config.family != "smollm3":
        return {}
    return {"no_rope_layers": [int(on) for on in config.rope_layers or (True,) * config.num_layers]}
