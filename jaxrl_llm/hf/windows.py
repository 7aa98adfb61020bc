"""Sliding windows in HF's config.json: which layers have one, by family."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.json_file import LARGEST, JsonKeys
from jaxrl_llm.models.config import TransformerConfig

WINDOWED = ("mistral", "mixtral")
"""Families with a sliding window in all layers, or in the layers that `layer_types` names."""
SWITCHED = ("qwen2", "qwen3", "qwen2_moe")
"""Families for which transformers cannot run `layer_types` with windows if `use_sliding_window` is false."""
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_windows(keys: JsonKeys, family: str, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """Return (sliding_window, window_layers).

    Llama and Baichuan have no window. Mixtral and Qwen3-MoE have a window in every layer (for Qwen3-MoE
    transformers ignores `layer_types` and `max_window_layers`), and so has Mistral without `layer_types`;
    with `layer_types` it is Ministral.
    """
    largest = LARGEST["max_position_embeddings"]
    kinds = keys.get("layer_types")
    # Families with one window for all layers, or none.
    if family in WINDOWED and (kinds is None or family == "mixtral"):
        return keys.optional("sliding_window", largest), None
    names_windows = isinstance(kinds, list) and LAYER_TYPES[True] in kinds
    has_windows = family in (*WINDOWED, "gpt_oss")
    if not has_windows and not (family.startswith("qwen") and keys.flag("use_sliding_window")):
        if names_windows and family in SWITCHED:
            raise keys.wrong("layer_types", kinds, "has windows, which need use_sliding_window: true")
        return None, None
    window = keys.optional("sliding_window", largest)
    if window is None and names_windows and family != "qwen3_moe":
        raise keys.wrong("layer_types", kinds, "has windows, which need sliding_window, their size")
    if window is None or family == "qwen3_moe":
        return window, None
    if kinds is None:
        kinds = _default_layer_types(keys, family, num_layers)
    # A window for the layers that `layer_types` names.
    if not isinstance(kinds, list) or not all(
        isinstance(kind, str) and kind in LAYER_TYPES for kind in kinds
    ):
        raise keys.wrong("layer_types", kinds, f"must be a list of {' and '.join(LAYER_TYPES)}")
    if len(kinds) != num_layers:
        raise UserError(f"{keys.file}: layer_types has {len(kinds)} entries for {num_layers} layers")
    slides = tuple(kind == LAYER_TYPES[True] for kind in kinds)
    return (window if any(slides) else None), (slides if len(set(slides)) > 1 else None)


def _default_layer_types(keys: JsonKeys, family: str, num_layers: int) -> list[str]:
    """Return the default `layer_types` of a family."""
    if family == "gpt_oss":
        return [LAYER_TYPES[i % 2 == 0] for i in range(num_layers)]
    first = keys.integer("max_window_layers", LARGEST["num_hidden_layers"], low=0)
    if family == "qwen2_moe":
        return [LAYER_TYPES[i % 2 == 0 and i < first] for i in range(num_layers)]
    return [LAYER_TYPES[i >= first] for i in range(num_layers)]


def write_windows(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of config.json that `read_windows` reads."""
    if config.family in WINDOWED and not config.window_layers:
        return {"sliding_window": config.sliding_window}
    if not config.family.startswith("qwen") and config.family not in (*WINDOWED, "gpt_oss"):
        return {}
    slides = config.window_layers or (True,) * config.num_layers
    if config.sliding_window is None:
        slides = (False,) * config.num_layers
    both = {
        "sliding_window": config.sliding_window,
        "layer_types": [LAYER_TYPES[on] for on in slides],
    }
    if not config.family.startswith("qwen"):
        return both
    first = slides.index(True) if any(slides) else config.num_layers
    return {**both, "use_sliding_window": any(slides), "max_window_layers": first}
