"""HF config.json <-> TransformerConfig, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.value_head import as_classifier, has_value_head
from jaxrl_llm.models.config import RopeConfig, TransformerConfig, check_model_config

_QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL = {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "llama": _LLAMA,
    "mistral": {**_LLAMA, **_MISTRAL},
    "baichuan": {**_LLAMA, "vocab_size": 64_000, "max_position_embeddings": None},
}
"""What HF takes a key to be that config.json lacks, by `model_type`."""

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "baichuan": "BaichuanForCausalLM",
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", "original_max_position", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
}
"""Which fields of RopeConfig a `rope_type` reads. HF's names are the same, but for one."""
ORIGINAL = "original_max_position_embeddings"

SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "mlp_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position": "max_position_embeddings",
}
"""Our field -> HF key, for the sizes that every config has."""

_REQUIRED = {
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_config(folder: Path | str | dict) -> TransformerConfig:
    """TransformerConfig of an HF folder, or of the content of its config.json.

    A key that is absent means what it means to transformers for that `model_type`.

    Raises:
        ValueError: no or broken config.json; a model type, activation, RoPE type or quantization that the
            decoder does not have. The message names the key, its value and what is supported.
    """
    raw = folder if isinstance(folder, dict) else read_json(Path(folder) / "config.json")
    family = _one_of("model_type", raw.get("model_type"), DEFAULTS)
    get = lambda key, default=None: raw.get(key, DEFAULTS[family].get(key, default))
    _check(raw, family, get)
    heads = get("num_attention_heads")
    biased = bool(get("attention_bias", False)) and family in ("llama", "qwen3")
    window, window_layers = _windows(family, get)
    valued = has_value_head(raw)
    config = TransformerConfig(
        family=family,
        **{ours: get(hf) for ours, hf in SAME.items()},
        num_kv_heads=heads if family == "baichuan" else get("num_key_value_heads") or heads,
        head_dim=get("head_dim") or get("hidden_size") // heads,
        qkv_bias=biased or family == "qwen2",
        out_bias=biased,
        mlp_bias=bool(get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        activation=ACTIVATIONS[_one_of("hidden_act", get("hidden_act", "silu"), ACTIVATIONS)],
        norm_eps=float(get("rms_norm_eps", 1e-6)),
        tie_embeddings=valued or bool(get("tie_word_embeddings", False)),  # a classifier has no other head
        value_head=valued,
        rope=_read_rope(raw, get("max_position_embeddings")),
        sliding_window=window,
        window_layers=window_layers,
        attention_softcap=get("attn_logit_softcapping"),
        logit_softcap=get("final_logit_softcapping"),
        initializer_range=float(get("initializer_range", 0.02)),
    )
    check_model_config(config, "config.json")
    return config


def to_hf_config(config: TransformerConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The content of a config.json that transformers 5 and a 4.x reader understand alike.

    RoPE and dtype are written in both spellings. Soft-caps get Gemma's names: this project reads them back,
    transformers ignores them for these families.

    Raises:
        ValueError: the family cannot express a field (Mistral with biases, say).
    """
    family = _one_of("family", config.family, DEFAULTS)
    raw = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        **{hf: getattr(config, ours) for ours, hf in SAME.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": {ours: hf for hf, ours in reversed(ACTIVATIONS.items())}[config.activation],
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        **_write_rope(config),
        **_write_windows(config),
    }
    raw |= {"attention_bias": config.qkv_bias} if family in ("llama", "qwen3") else {}
    raw |= {"mlp_bias": config.mlp_bias} if family == "llama" else {}
    if config.attention_softcap is not None:
        raw["attn_logit_softcapping"] = config.attention_softcap
    if config.logit_softcap is not None:
        raw["final_logit_softcapping"] = config.logit_softcap
    raw = as_classifier(raw) if config.value_head else raw
    _check_round_trip(config, raw)
    return raw


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: missing, not JSON, or not an object.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; a Hugging Face model folder has one")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _one_of(key: str, value: Any, supported: dict[str, Any]) -> Any:
    if value not in supported:
        raise UserError(f"config.json: {key}={value!r} is not supported; supported: {', '.join(supported)}")
    return value


def _check(raw: dict, family: str, get) -> None:
    """Refuse what would load and then compute something else."""
    if raw.get("quantization_config"):
        raise UserError("config.json: quantization_config is set; only bf16, fp16 and fp32 weights are read")
    if family == "baichuan" and get("max_position_embeddings") is None:
        raise UserError(
            "config.json: baichuan without max_position_embeddings is the 13B model, which uses ALiBi; "
            "supported: the RoPE models (7B)"
        )
    if family == "baichuan" and get("vocab_size") == 125_696:
        raise UserError(
            "config.json: vocab_size=125696 is Baichuan 2, whose head normalises its rows; supported: "
            "Baichuan 1. Normalise the rows of lm_head once and save it as model_type=llama to use it"
        )
    for key in SAME.values():
        if not isinstance(get(key), int) or get(key) < 1:
            raise UserError(f"config.json: {key}={get(key)!r} must be a positive integer")


def _windows(family: str, get) -> tuple[int | None, tuple[bool, ...] | None]:
    """(sliding_window, window_layers). Llama and Baichuan have none; Mistral slides in every layer."""
    window, num_layers = get("sliding_window"), get("num_hidden_layers")
    if family == "mistral":
        return window, None
    if family not in ("qwen2", "qwen3") or not get("use_sliding_window", False) or window is None:
        return None, None
    types = get("layer_types") or [
        "sliding_attention" if i >= get("max_window_layers") else "full_attention" for i in range(num_layers)
    ]
    for kind in types:
        _one_of("layer_types", kind, {"full_attention": 0, "sliding_attention": 0})
    if len(types) != num_layers:
        raise UserError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    slides = tuple(kind == "sliding_attention" for kind in types)
    return (window if any(slides) else None), (slides if len(set(slides)) > 1 else None)


def _write_windows(config: TransformerConfig) -> dict[str, Any]:
    if config.family == "mistral":
        return {"sliding_window": config.sliding_window}
    if config.family not in ("qwen2", "qwen3"):
        return {}
    slides = config.window_layers or (True,) * config.num_layers
    if config.sliding_window is None:
        slides = (False,) * config.num_layers
    return {
        "use_sliding_window": any(slides),
        "sliding_window": config.sliding_window,
        "max_window_layers": slides.index(True) if any(slides) else config.num_layers,
        "layer_types": ["sliding_attention" if on else "full_attention" for on in slides],
    }


def _read_rope(raw: dict, max_position: int) -> RopeConfig:
    """As transformers 5 does: `rope_scaling` before `rope_parameters`, then the top-level `rope_theta`."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope = {key: value for key, value in rope.items() if value is not None}
    if any(isinstance(v, dict) for v in rope.values()):
        raise UserError(
            f"config.json: rope_parameters={rope}: one RoPE for all layers is supported, not one a layer type"
        )
    kind = _one_of("rope_type", rope.get("rope_type", rope.get("type", "default")), ROPE_FIELDS)
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UserError(f"config.json: partial_rotary_factor={partial} is not supported; supported: 1.0")
    if kind in ("yarn", "llama3"):
        rope["original_max_position"] = raw.get(ORIGINAL) or rope.get(ORIGINAL) or max_position
    missing = [key for key in _REQUIRED.get(kind, ()) if key not in rope]
    if missing:
        raise UserError(f"config.json: rope_type={kind!r} needs {missing[0]!r}; found {sorted(rope)}")
    theta = float(rope.get("rope_theta", raw.get("rope_theta") or 10_000.0))
    return RopeConfig(theta, kind, **{name: rope[name] for name in ROPE_FIELDS[kind] if name in rope})


def _write_rope(config: TransformerConfig) -> dict[str, Any]:
    rope = _canonical(config).rope
    scaling = {"rope_type": rope.scaling}
    for name in ROPE_FIELDS[rope.scaling]:
        if getattr(rope, name) is not None:
            scaling[ORIGINAL if name == "original_max_position" else name] = getattr(rope, name)
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling == "default" else {**scaling, "type": rope.scaling},
        "rope_parameters": {**scaling, "rope_theta": rope.theta},
    }


def _canonical(config: TransformerConfig) -> TransformerConfig:
    """The same model with settings that have no effect at their defaults: what a config.json can hold."""
    kept = {name: getattr(config.rope, name) for name in ROPE_FIELDS[config.rope.scaling]}
    if "original_max_position" in kept:
        kept["original_max_position"] = kept["original_max_position"] or config.max_position
    window, layers = config.sliding_window, config.window_layers
    if window is None or not any(layers or (True,)):
        window, layers = None, None
    if layers and all(layers):
        layers = None
    rope = RopeConfig(theta=config.rope.theta, scaling=config.rope.scaling, **kept)
    return dataclasses.replace(config, rope=rope, sliding_window=window, window_layers=layers)


def _check_round_trip(config: TransformerConfig, raw: dict) -> None:
    """What this family's config.json cannot say must not get lost without a word."""
    wanted, read = dataclasses.asdict(_canonical(config)), dataclasses.asdict(read_config(raw))
    lost = [
        f"{name}={wanted[name]} (would read back as {read[name]})"
        for name in wanted
        if wanted[name] != read[name]
    ]
    if lost:
        raise UserError(f"export: a {config.family} config.json cannot express {'; '.join(lost)}")
