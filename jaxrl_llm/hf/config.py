"""HF config.json <-> TransformerConfig, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.expert_config import (
    EXPERT_DEFAULTS,
    read_experts,
    read_latent_attention,
    write_experts,
    write_latent_attention,
)
from jaxrl_llm.hf.json_file import LARGEST, JsonKeys, read_json
from jaxrl_llm.hf.windows import read_windows, write_windows
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
    "qwen2_moe": {**_QWEN, **EXPERT_DEFAULTS["qwen2_moe"]},
    "qwen3_moe": {**_QWEN, **EXPERT_DEFAULTS["qwen3_moe"]},
    "mixtral": {**_LLAMA, **_MISTRAL, **EXPERT_DEFAULTS["mixtral"]},
    "deepseek_v3": EXPERT_DEFAULTS["deepseek_v3"],
    "glm4_moe": EXPERT_DEFAULTS["glm4_moe"],
    "olmoe": EXPERT_DEFAULTS["olmoe"],
    "gpt_oss": EXPERT_DEFAULTS["gpt_oss"],
    "llama": _LLAMA,
    "mistral": {**_LLAMA, **_MISTRAL},
    "baichuan": {**_LLAMA, "vocab_size": 64_000, "max_position_embeddings": None},
}
"""HF's defaults of keys that config.json lacks, by `model_type`."""

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
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
"""`rope_type` -> the fields of RopeConfig that it reads. HF's names are the same, except ORIGINAL."""
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"

SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "mlp_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position": "max_position_embeddings",
}
"""Our field -> HF key, for the sizes that every config has."""

_FIXED = {"clip_qkv": None, "is_causal": True, "per_layer_config": None}
"""Keys of every family that have one supported value."""
LANGUAGE, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
BIAS_FLAG = ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "olmoe", "gpt_oss")
"""Families whose attention has biases if `attention_bias` is true."""
DEQUANTIZE = {
    "fp8": "; convert the fp8 weights to bf16 with the model's own script first",
    "mxfp4": "; dequantize them once: transformers.AutoModelForCausalLM.from_pretrained(FOLDER, "
    "quantization_config=transformers.Mxfp4Config(dequantize=True)).save_pretrained(NEW_FOLDER)",
}
"""Kind of quantized weights -> how to get unquantized weights, for the message."""

_REQUIRED = {
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_config(folder: Path | str | dict) -> TransformerConfig:
    """Return the TransformerConfig of an HF folder, or of the content of its config.json.

    An absent key has the default of transformers for the `model_type`.

    Raises:
        UserError: config.json is missing or broken; a key has a wrong type or is out of range; the decoder
            does not support a model type, activation, RoPE type or quantization. The message names the file,
            the key, its value and the supported values.
    """
    raw = folder if isinstance(folder, dict) else read_json(Path(folder) / "config.json")
    file = "config.json" if isinstance(folder, dict) else str(Path(folder) / "config.json")
    family = JsonKeys(raw, file, {}).one_of("model_type", DEFAULTS)
    keys = JsonKeys(raw, file, DEFAULTS[family])
    _check_supported(keys, family)
    # Sizes and heads; keys that only some families have.
    sizes = {ours: keys.integer(hf, LARGEST[hf]) for ours, hf in SAME.items()}
    heads = sizes["num_heads"]
    biased = keys.flag("attention_bias") and family in BIAS_FLAG
    window, window_layers = read_windows(keys, family, sizes["num_layers"])
    has_head = _has_value_head(keys)
    own_kv = (
        None if family == "baichuan" else keys.optional("num_key_value_heads", LARGEST["num_attention_heads"])
    )
    mla = read_latent_attention(keys, family, heads)
    head_dim = keys.optional("head_dim", 1 << 16) or sizes["hidden_size"] // heads
    head_dim = mla.nope_dim + mla.rope_dim if mla else head_dim
    if not head_dim:
        raise keys.wrong("hidden_size", sizes["hidden_size"], f"is less than num_attention_heads={heads}")
    # Family switches, then keys with a default.
    config = TransformerConfig(
        family=family,
        **sizes,
        num_kv_heads=own_kv or heads,
        head_dim=head_dim,
        mla=mla,
        moe=read_experts(keys, family),
        qkv_bias=biased or (family in ("qwen2", "qwen2_moe") and keys.flag("qkv_bias", True)),
        out_bias=biased and family != "glm4_moe",
        mlp_bias=keys.flag("mlp_bias") and family == "llama",
        qk_norm=family in ("qwen3", "qwen3_moe", "olmoe")
        or (family == "glm4_moe" and keys.flag("use_qk_norm")),
        qk_norm_over_heads=family == "olmoe",
        attention_sinks=family == "gpt_oss",
        activation=ACTIVATIONS[keys.one_of("hidden_act", ACTIVATIONS, "silu")],
        norm_eps=keys.number("rms_norm_eps", 1e-6, high=1.0),
        tie_embeddings=keys.flag("tie_word_embeddings") or has_head,  # a classifier has no other head
        value_head=has_head,
        rope=_read_rope(keys, sizes["max_position"], family),
        sliding_window=window,
        window_layers=window_layers,
        attention_softcap=keys.number("attn_logit_softcapping", None, low=1e-6),
        logit_softcap=keys.number("final_logit_softcapping", None, low=1e-6),
        initializer_range=keys.number("initializer_range", 0.02, high=1e3),
    )
    check_model_config(config, file)
    return config


def to_hf_config(config: TransformerConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the content of a config.json that transformers 4 and 5 read the same way.

    RoPE and dtype are written in both spellings. Soft-caps get Gemma's names: this project reads them back,
    transformers ignores them for these families.

    Raises:
        UserError: the family cannot express a field (such as Mistral with biases).
    """
    family = config.family
    if family not in DEFAULTS:
        raise UserError(f"export: family={family!r} is not supported; supported: {', '.join(DEFAULTS)}")
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
        **write_windows(config),
    }
    # Keys of some families only: transformers would warn of others.
    raw |= {"attention_bias": config.qkv_bias} if family in BIAS_FLAG else {}
    raw |= {"qkv_bias": config.qkv_bias} if family == "qwen2_moe" else {}
    raw |= {"use_qk_norm": config.qk_norm} if family == "glm4_moe" else {}
    raw |= write_experts(config) | write_latent_attention(config)
    raw |= {"mlp_bias": config.mlp_bias} if family == "llama" else {}
    if config.attention_softcap is not None:
        raw["attn_logit_softcapping"] = config.attention_softcap
    if config.logit_softcap is not None:
        raw["final_logit_softcapping"] = config.logit_softcap
    raw = _as_classifier(raw) if config.value_head else raw
    _check_round_trip(config, raw)
    return raw


def _check_supported(keys: JsonKeys, family: str) -> None:
    """Refuse a model that would load but compute other results."""
    if method := keys.get("quantization_config"):
        method = method.get("quant_method") if isinstance(method, dict) else None
        known = "only bf16, fp16 and fp32 weights are read"
        raise UserError(f"{keys.file}: quantization_config is set; {known}{DEQUANTIZE.get(method, '')}")
    for key, supported in _FIXED.items():
        if keys.get(key) not in (None, supported):
            raise keys.wrong(key, keys.get(key), f"is not supported; supported: {json.dumps(supported)}")
    if family == "baichuan" and keys.get("max_position_embeddings") is None:
        raise UserError(
            f"{keys.file}: baichuan without max_position_embeddings is the 13B model, which uses ALiBi; "
            "supported: the RoPE models (7B)"
        )
    if family == "baichuan" and keys.get("vocab_size") == 125_696:
        raise UserError(
            f"{keys.file}: vocab_size=125696 is Baichuan 2, whose head normalises its rows; supported: "
            "Baichuan 1. Normalise the rows of lm_head once and save it as model_type=llama to use it"
        )


def _has_value_head(keys: JsonKeys) -> bool:
    """Return whether it is a sequence (or token) classifier with one label.

    Raises:
        UserError: the model has several labels, but a score is one number.
    """
    names = keys.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise keys.wrong("architectures", names, "must be a list of names")
    if not names or not names[0].endswith((CLASSIFIER, "ForTokenClassification")):
        return False
    count = keys.get("num_labels")
    if count is None:
        count = len(keys.section("id2label").raw) or 1
    if count != 1 or isinstance(count, bool):
        raise keys.wrong("num_labels", count, f"of {names[0]}: a reward model or critic has 1")
    return True


def _as_classifier(raw: dict[str, Any]) -> dict[str, Any]:
    """Turn the config.json of a language model into a classifier of the same family with one label."""
    name = raw["architectures"][0].replace(LANGUAGE, CLASSIFIER)
    labels = {"id2label": {"0": "SCORE"}, "label2id": {"SCORE": 0}, "num_labels": 1}
    return {**raw, "architectures": [name], **labels}


def _read_rope(keys: JsonKeys, max_position: int, family: str) -> RopeConfig:
    """Read RoPE as transformers 5 does: `rope_scaling`, `rope_parameters`, the top-level `rope_theta`."""
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.section(name)
    if any(isinstance(value, dict) for value in rope.raw.values()):
        raise keys.wrong(name, rope.raw, ": one RoPE for all layers is supported, not one a layer type")
    # The type and its required keys.
    key = "rope_type" if "rope_type" in rope.raw else "type"
    kind = rope.one_of(key, ROPE_FIELDS, "default")
    partial = rope.number(PARTIAL, None, 1e-9, 1.0) or keys.number(PARTIAL, 1.0, 1e-9, 1.0)
    if partial != 1.0 and family != "glm4_moe":
        raise keys.wrong(PARTIAL, partial, f"is not supported for {family}; supported: 1.0")
    missing = [key for key in _REQUIRED.get(kind, ()) if key not in rope.raw]
    if missing:
        raise UserError(f"{keys.file}: rope_type={kind!r} needs {missing[0]!r}; found {sorted(rope.raw)}")
    # The fields of this type; the original length may also be a top-level key.
    fields: dict[str, Any] = {"partial_rotary": partial}
    for field in set(ROPE_FIELDS[kind]) & rope.raw.keys():
        fields[field] = (
            rope.flag(field)
            if field == "truncate"
            else rope.number(field, None, low=0.0 if "mscale" in field else 1e-9)
        )
    if "original_max_position" in ROPE_FIELDS[kind]:
        longest = LARGEST["max_position_embeddings"]
        own = keys.optional(ORIGINAL, longest) or rope.optional(ORIGINAL, longest)
        fields["original_max_position"] = own or max_position
    theta = rope.number("rope_theta", None, low=1e-9) or keys.number("rope_theta", None, low=1e-9)
    return RopeConfig(theta or 10_000.0, kind, **fields)


def _write_rope(config: TransformerConfig) -> dict[str, Any]:
    rope = _canonical(config).rope
    partial = {PARTIAL: rope.partial_rotary} if config.family == "glm4_moe" else {}
    scaling = {"rope_type": rope.scaling, **partial}
    for name in ROPE_FIELDS[rope.scaling]:
        if getattr(rope, name) is not None:
            scaling[ORIGINAL if name == "original_max_position" else name] = getattr(rope, name)
    return {
        **partial,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling == "default" else {**scaling, "type": rope.scaling},
        "rope_parameters": {**scaling, "rope_theta": rope.theta},
    }


def _canonical(config: TransformerConfig) -> TransformerConfig:
    """Reset settings without effect to their defaults, since a config.json lacks them."""
    kept = {name: getattr(config.rope, name) for name in ROPE_FIELDS[config.rope.scaling]}
    if "original_max_position" in kept:
        kept["original_max_position"] = kept["original_max_position"] or config.max_position
    window, layers = config.sliding_window, config.window_layers
    if window is None or not any(layers or (True,)):
        window, layers = None, None
    if layers and all(layers):
        layers = None
    kept["partial_rotary"] = config.rope.partial_rotary
    rope = RopeConfig(theta=config.rope.theta, scaling=config.rope.scaling, **kept)
    return dataclasses.replace(config, rope=rope, sliding_window=window, window_layers=layers)


def _check_round_trip(config: TransformerConfig, raw: dict) -> None:
    """Refuse a config that this family's config.json cannot express."""
    ours, read = dataclasses.asdict(_canonical(config)), dataclasses.asdict(read_config(raw))
    lost = [
        f"{name}={ours[name]} (would read back as {read[name]})" for name in ours if ours[name] != read[name]
    ]
    if lost:
        raise UserError(f"export: a {config.family} config.json cannot express {'; '.join(lost)}")
