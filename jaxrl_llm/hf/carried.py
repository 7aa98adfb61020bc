"""Parts of a base folder that are not trained, copied to exports: layers of multi-token prediction, and all
of a model that also sees images (or hears) beside its language model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.hf.config import WRAPPERS
from jaxrl_llm.hf.expert_config import GROUPED
from jaxrl_llm.hf.quantization import KEYS as QUANTIZATION
from jaxrl_llm.hf.stored import StoredTensor
from jaxrl_llm.models import TransformerConfig

_DEEPSEEK = tuple(family for family in GROUPED if family != "mistral4")
COUNTS = {
    **dict.fromkeys((*_DEEPSEEK, "qwen3_next", "nemotron_h"), "num_nextn_predict_layers"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "mtp_num_hidden_layers"),
    "minimax_m2": "num_mtp_modules",
}
"""Family -> key of the number of layers of multi-token prediction."""
_AFTER_THE_LAST = (*_DEEPSEEK, "minimax_m2")
"""Families that number these layers after the decoder's; others name them `mtp`."""
_NONE = {"minimax_m2": {"use_mtp": False}}
"""Family -> further keys of a folder without these layers."""
_MOST = 64  # layers of any model
_INSIDE = {family for families in WRAPPERS.values() for family in families}
_PAD = "pad_token_id"  # Gemma 4 puts it in the places of images, also if the tokenizer has none
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a folder that say how images, videos and sounds become inputs."""
_ROPES = ("rope_parameters", "rope_scaling")  # have keys that only images need, such as mrope_section


class Outer(NamedTuple):
    """The model around a language model: it also sees images."""

    raw: Mapping[str, Any]
    """Content of config.json."""
    prefix: str
    """Of its language model's tensors: "language_model.", or "model.language_model." in place of "model."."""
    files: tuple[Path, ...]
    """PROCESSOR_FILES of the folder."""


class Carried(NamedTuple):
    """Parts of a folder that exports have as they are."""

    keys: Mapping[str, Any]
    """Keys in the language model's config.json."""
    tensors: Mapping[str, StoredTensor]
    """By their names in exports."""
    outer: Outer | None = None
    """None = exports have the language model alone."""

    def name(self, name: str) -> str:
        """Return the name in exports of a tensor of the language model."""
        if self.outer is None:
            return name
        in_model = self.outer.prefix != "language_model."
        return name.replace("model.", self.outer.prefix, 1) if in_model else f"{self.outer.prefix}{name}"

    def complete(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of an export's config.json.

        Args:
            raw: of the language model alone. Its keys count; keys of the outer model that it lacks are kept.
        """
        raw = {**raw, **self.keys}
        if self.outer is None:
            return raw
        keys = {key: value for key, value in self.outer.raw.items() if key not in QUANTIZATION}
        text = {key: value for key, value in keys["text_config"].items() if key not in QUANTIZATION}
        text |= {key: value for key, value in raw.items() if key not in ("architectures", *_ROPES, _PAD)}
        text |= {_PAD: raw[_PAD]} if raw.get(_PAD) is not None else {}
        text |= {key: _add_missing(raw[key], text.get(key)) for key in _ROPES if key in raw}
        shared = {key: raw[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings")}
        return {**keys, **shared, "text_config": text}


def _add_missing(ours: Any, base: Any) -> Any:
    """Return the section of RoPE, or one for each type of layers, with keys that only `base` has."""
    if not isinstance(ours, dict) or not isinstance(base, dict):
        return ours
    return {**base, **{key: _add_missing(value, base.get(key)) for key, value in ours.items()}}


def may_carry(family: str) -> bool:
    """Return whether folders of a family, or of a model around it, may have parts that are not trained."""
    return family in COUNTS or family in _INSIDE


def nothing_carried(config: TransformerConfig) -> Carried:
    """Return the description of a language model alone: config.json counts 0 layers of multi-token
    prediction."""
    counts = {COUNTS[config.family]: 0} if config.family in COUNTS else {}
    return Carried({**counts, **_NONE.get(config.family, {})}, {})


def predictor_names(config: TransformerConfig, raw: Mapping[str, Any], names: Collection[str]) -> set[str]:
    """Return the names of tensors of layers of multi-token prediction.

    Args:
        raw: content of config.json, of the language model.
        names: of the folder's tensors.
    """
    if config.family not in COUNTS:
        return set()
    count = raw.get(COUNTS[config.family], 1)
    count = min(count, _MOST) if isinstance(count, int) else 0
    starts = ("mtp.",)
    if config.family in _AFTER_THE_LAST:
        starts = tuple(f"model.layers.{config.num_layers + i}." for i in range(count))
    return {name for name in names if name.startswith(starts)}


def predictor_keys(config: TransformerConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that describe these layers, as the folder has them."""
    count = COUNTS.get(config.family)
    return {key: value for key, value in raw.items() if key == count or "mtp" in key.split("_")}
