"""JSON files of model folders, which are untrusted input: types and ranges are checked when read."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.families import Defaults

_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 80
LARGEST = {
    "vocab_size": 10**8,
    "hidden_size": 10**6,
    "intermediate_size": 10**7,
    "num_hidden_layers": 10**4,
    "num_attention_heads": 10**5,
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), 2**31 - 1),
    # Layers that differ from others.
    **dict.fromkeys(("full_attention_interval", "sliding_window_pattern", "no_rope_layer_interval"), 10**4),
    **dict.fromkeys(("max_window_layers", "num_kv_shared_layers"), 10**4),
    # Experts, and latent attention with its indexer.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_group", "topk_group"), 2**16),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "n_shared_experts"), 2**8),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 10**7),
    "moe_latent_size": 10**6,
    **dict.fromkeys(("shared_intermediate_size", "shared_expert_intermediate_size"), 10**7),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 10**4),
    **dict.fromkeys(("index_topk_freq", "index_skip_topk_offset"), 10**4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 10**6),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim"), 2**12),
    **{"index_n_heads": 2**16, "index_topk": 2**24},
}
"""Upper limits of sizes, above any model: a nonsensical size would take hours to list its weights."""


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file.

    Raises:
        UserError: the file is missing, unreadable, not JSON, or not an object; the message names the file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; a Hugging Face model folder has one")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        what = f"not JSON: {error}" if isinstance(error, ValueError) else f"cannot be read: {error}"
        raise UserError(f"{path}: {what}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


class JsonKeys:
    """The content of a JSON file, read key by key with checks of type and range.

    Args:
        raw: the object.
        file: name of the file, for messages.
        defaults: values of absent keys.
        names: usual key -> key in this file, for files with other keys.
    """

    def __init__(
        self,
        raw: dict[str, Any],
        file: str,
        defaults: dict[str, Any] | Defaults,
        names: Mapping[str, str] | None = None,
    ):
        self.raw, self.file, self.defaults, self.names = raw, file, defaults, names or {}
        self.seen: set[str] = set()
        """Keys that were read."""

    def get(self, key: str) -> Any:
        """Return the unchecked value; None = absent without a default, or null."""
        name = self.names.get(key, key)
        self.seen.add(name)
        return self.raw[name] if name in self.raw else self.defaults.get(key)

    def integer(self, key: str, high: int | None = None, low: int = 1) -> int:
        """Return a whole number in [low, high]; None = the limit of the key in LARGEST."""
        value, high = self.get(key), high or LARGEST[key]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, value, f"must be a whole number from {low} to {high:,}")
        return value

    def optional(self, key: str, high: int | None = None) -> int | None:
        """Return a whole number in [1, high], or None for null."""
        return None if self.get(key) is None else self.integer(key, high)

    def number(self, key: str, default: float | None, low: float = 0.0, high: float = 1e12) -> float | None:
        """Return a number in [low, high]; null = the default."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.wrong(key, value, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false; null = the default."""
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "must be true or false")
        return value

    def one_of(self, key: str, supported: Collection[str], default: str | None = None) -> str:
        """Return one of the supported words; null = the default."""
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, str) or value not in supported:
            raise self.wrong(key, value, f"is not supported; supported: {', '.join(supported)}")
        return value

    def require(self, supported: Mapping[str, Any]) -> None:
        """Refuse keys with another value than the supported one; null and absent keys have it."""
        for key, value in supported.items():
            if self.get(key) not in (None, value):
                raise self.wrong(key, self.get(key), f"is not supported; supported: {json.dumps(value)}")

    def section(self, key: str) -> JsonKeys:
        """Return the keys of an object in the file; null = the default, or none."""
        value = self.get(key) or self.defaults.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, value, "must be an object")
        return JsonKeys({name: inner for name, inner in value.items() if inner is not None}, self.file, {})

    def wrong(self, key: str, value: Any, requirement: str) -> UserError:
        """Return the error that names the file, the key and its value."""
        return UserError(f"{self.file}: {self.names.get(key, key)}={_shorten.repr(value)} {requirement}")
