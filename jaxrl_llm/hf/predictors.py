"""Layers of multi-token prediction: no part of the decoder, copied from the base folder to exports."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.hf.expert_config import GROUPED
from jaxrl_llm.hf.stored import StoredTensor
from jaxrl_llm.models import TransformerConfig

_DEEPSEEK = tuple(family for family in GROUPED if family != "mistral4")
COUNTS = {
    **dict.fromkeys((*_DEEPSEEK, "qwen3_next", "nemotron_h"), "num_nextn_predict_layers"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "mtp_num_hidden_layers"),
    "minimax_m2": "num_mtp_modules",
}
"""Family -> key of the number of these layers."""
_AFTER_THE_LAST = (*_DEEPSEEK, "minimax_m2")
"""Families that number these layers after the decoder's; others name them `mtp`."""
_NONE = {"minimax_m2": {"use_mtp": False}}
"""Family -> further keys of a folder without these layers."""
_MOST = 64  # layers of any model


class Predictors(NamedTuple):
    """Layers of multi-token prediction of a folder."""

    keys: Mapping[str, Any]  # of config.json
    tensors: Mapping[str, StoredTensor]


def no_predictors(config: TransformerConfig) -> Predictors:
    """Return the description of a folder without these layers: config.json counts 0."""
    counts = {COUNTS[config.family]: 0} if config.family in COUNTS else {}
    return Predictors({**counts, **_NONE.get(config.family, {})}, {})


def predictor_names(config: TransformerConfig, raw: Mapping[str, Any], names: Collection[str]) -> set[str]:
    """Return the names of tensors of these layers.

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
