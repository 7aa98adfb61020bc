"""HF config.json <-> TransformerConfig, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import dataclasses
import difflib
import math
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.expert_config import (
    read_experts,
    read_indexer,
    read_latent_attention,
    write_experts,
    write_indexer,
    write_latent_attention,
)
from jaxrl_llm.hf.families import FAMILIES, Defaults
from jaxrl_llm.hf.global_heads import OVERRIDES, read_global_heads, write_global_heads
from jaxrl_llm.hf.hybrids import (
    read_layer_kinds,
    read_mlp_size,
    with_layer_types,
    write_layer_kinds,
    write_mlp_size,
)
from jaxrl_llm.hf.json_file import LARGEST, JsonKeys, read_json
from jaxrl_llm.hf.quantization import read_quantization
from jaxrl_llm.hf.ropes import canonical_rope, read_ropes, write_ropes
from jaxrl_llm.hf.windows import read_rope_layers, read_windows, write_rope_layers, write_windows
from jaxrl_llm.models.config import TransformerConfig, check_model_config
from jaxrl_llm.models.mixer_config import MLAConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
CODE = {"baichuan": "BaichuanConfig", "qwen": "QWenConfig"}
"""Families that other programs run with the code of their published folders -> class of the config in
configuration_<family>.py. Each head has its own keys, and config.json no num_key_value_heads."""
POSITIONS = "max_position_embeddings"
ALIBI_KEYS = {POSITIONS: "model_max_length"}
QWEN1_KEYS = {POSITIONS: "seq_length", "rope_theta": "rotary_emb_base", "head_dim": "kv_channels"}
"""Usual keys -> keys of a model with ALiBi, Baichuan 13B, and of Qwen 1."""
Z_LOSS, BAICHUAN2_VOCABULARY = "z_loss_weight", 125_696
SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "mlp_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position": "max_position_embeddings",
}
"""Our field -> HF key, for the sizes that every config has."""
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
"""Numbers of families with `Family.multipliers`, fields and keys."""

_FIXED = {"clip_qkv": None, "is_causal": True}
"""Keys of every family that have one supported value."""
WITHOUT_EFFECT = {
    *("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path", "dtype"),
    *("torch_dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Keys of every family that do not describe its decoder."""
WRAPPERS = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "mistral3": ("mistral", "ministral3", "mistral4"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
"""Model types of a language model with a vision tower, which `text_config` describes -> its families."""
WHOLE = ("gemma3", "gemma4", "mistral3")
"""Types that transformers loads only as a whole: their classes of language models find no weights."""
LANGUAGE, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def read_config(folder: Path | str | dict) -> TransformerConfig:
    """Return the TransformerConfig of an HF folder, or of the content of its config.json.

    An absent key has the default of transformers for the `model_type`.

    Raises:
        UserError: config.json is missing or broken; a key has a wrong type or is out of range; the decoder
            does not support a model type, activation, RoPE type or quantization. The message names the file,
            the key, its value and the supported values.
    """
    raw = language_config(folder if isinstance(folder, dict) else read_json(Path(folder) / "config.json"))
    file = "config.json" if isinstance(folder, dict) else str(Path(folder) / "config.json")
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise _unknown_family(raw, file)
    return _read_family(_family_keys(raw, file), family)


def _family_keys(raw: dict[str, Any], file: str) -> JsonKeys:
    """Return the keys of a config.json of a supported family, with its defaults."""
    family = raw["model_type"]
    return JsonKeys(with_layer_types(raw), file, Defaults(family), _key_names(family, _is_alibi(raw)))


def _key_names(family: str, has_alibi: bool) -> dict[str, str]:
    """Return usual key -> the family's key, for keys that differ."""
    return ALIBI_KEYS if has_alibi else QWEN1_KEYS if family == "qwen" else {}


def _is_alibi(raw: dict[str, Any]) -> bool:
    """Return whether a model has ALiBi: Baichuan 13B, whose config.json has no max_position_embeddings."""
    return raw.get("model_type") == "baichuan" and raw.get(POSITIONS) is None


def _read_family(keys: JsonKeys, family: str) -> TransformerConfig:
    """Return the TransformerConfig of a config.json of a supported family."""
    _check_supported(keys, family)
    facts = FAMILIES[family]
    # Sizes and heads; keys that only some families have.
    sizes = {ours: keys.integer(hf) for ours, hf in SAME.items() if ours != "mlp_size"}
    sizes["mlp_size"] = read_mlp_size(keys, family)
    heads = sizes["num_heads"]
    biased = bool(facts.bias) and keys.flag(facts.bias, facts.bias == "qkv_bias")
    out_biased = keys.flag(facts.out_bias) if isinstance(facts.out_bias, str) else biased and facts.out_bias
    window, window_layers = read_windows(keys, family, sizes["num_layers"])
    rope, local_rope = read_ropes(keys, family, sizes["max_position"])
    has_head = _has_value_head(keys)
    mla = read_latent_attention(keys, family, heads)
    # Family switches, then keys with a default.
    fields = {
        **_read_heads(keys, family, sizes, mla),
        **_read_multipliers(keys, family, sizes["hidden_size"]),
        **{"qk_norm": family == "glm4_moe" and keys.flag("use_qk_norm"), **facts.fields},
        **{"alibi": _is_alibi(keys.raw), "normalize_head": _normalizes_head(keys, family) and not has_head},
        **read_global_heads(keys, family, window_layers, has_window=window is not None),
    }
    # The architecture: parts with several keys, then single keys.
    config = TransformerConfig(
        family=family,
        **sizes,
        mla=mla,
        moe=read_experts(keys, family),
        **read_layer_kinds(keys, family, sizes["num_layers"]),
        **read_indexer(keys, family, sizes["num_layers"]),
        **fields,
        qkv_bias=biased,
        out_bias=out_biased,
        mlp_bias=facts.mlp_bias and keys.flag("mlp_bias"),
        activation=ACTIVATIONS[keys.one_of(facts.activation, ACTIVATIONS, "silu")],
        norm_eps=keys.number(facts.norm_eps, 1e-6, high=1.0),
        tie_embeddings=keys.flag(_tied_key(keys, family)) or has_head,  # a classifier has no other head
        value_head=has_head,
        # Positions and windows; constants.
        rope=rope,
        local_rope=local_rope if window else None,
        rope_layers=read_rope_layers(keys, family, sizes["num_layers"]),
        sliding_window=window,
        window_layers=window_layers,
        attention_softcap=keys.number("attn_logit_softcapping", None, low=1e-6),
        logit_softcap=keys.number("final_logit_softcapping", None, low=1e-6),
        initializer_range=keys.number("initializer_range", 0.02, high=1e3),
    )
    check_model_config(config, keys.file)
    return _with_default_multiplier(config)


def _unknown_family(raw: dict[str, Any], file: str) -> UserError:
    """Return the error for another `model_type`: the nearest family, what it lacks, and how to add one."""
    name, keys = raw.get("model_type"), JsonKeys(raw, file, {})
    problem = f"is not supported; supported: {', '.join(FAMILIES)}"
    known = [family for family in FAMILIES if family not in CODE]
    near = difflib.get_close_matches(name, known, 1, cutoff=0.1) if isinstance(name, str) else []
    page = 'To add one: "A model family" in CONTRIBUTING.md'
    if not near:
        return keys.wrong("model_type", name, f"{problem}. {page}" if name else problem)
    (nearest,) = near
    same = _family_keys({**raw, "model_type": nearest}, file)
    try:
        _read_family(same, nearest)
        unread = [key for key, value in raw.items() if value and key not in same.seen | WITHOUT_EFFECT]
        lacks = f"does not read {', '.join(unread)}" if unread else "reads all its keys"
    except UserError as error:
        lacks = f"refuses this file: {str(error).removeprefix(f'{file}: ')}"
    return keys.wrong("model_type", name, f"{problem}. The nearest is {nearest}, which {lacks}. {page}")


def language_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model if `raw` is of a model that also sees images, else `raw`.

    Keys that both have count as they are outside, as in transformers.
    """
    text = raw.get("text_config")
    if str(raw.get("model_type")) not in WRAPPERS or not isinstance(text, dict):
        return raw
    outer = {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}
    return {**text, **outer}


def to_hf_config(config: TransformerConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the content of a config.json that transformers 4 and 5 read the same way.

    RoPE and dtype are written in both spellings. Soft-caps get Gemma's names: this project reads them back,
    transformers ignores them for these families.

    Raises:
        UserError: the family cannot express a field (such as Mistral with biases).
    """
    family = config.family
    if family not in FAMILIES:
        raise UserError(f"export: family={family!r} is not supported; supported: {', '.join(FAMILIES)}")
    facts = FAMILIES[family]
    raw = {
        "architectures": [facts.architecture],
        "model_type": family,
        **{hf: getattr(config, ours) for ours, hf in SAME.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        facts.activation: {ours: hf for hf, ours in reversed(ACTIVATIONS.items())}[config.activation],
        facts.norm_eps: config.norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        **(write_ropes(_canonical(config)) if facts.has_rope else {}),
        **write_windows(config),
        **write_rope_layers(config),
        **write_layer_kinds(config),
        **write_global_heads(config),
    }
    # Keys of some families only: transformers would warn of others.
    raw |= facts.fixed
    raw |= {facts.bias: config.qkv_bias} if facts.bias and family != "qwen2" else {}
    raw |= {facts.out_bias: config.out_bias} if isinstance(facts.out_bias, str) else {}
    raw |= {"use_qk_norm": config.qk_norm} if family == "glm4_moe" else {}
    raw |= write_mlp_size(config) | write_experts(config)
    raw |= write_latent_attention(config) | write_indexer(config)
    raw |= {"mlp_bias": config.mlp_bias} if facts.mlp_bias else {}
    if family == "gemma3_text":
        raw["query_pre_attn_scalar"] = round((config.attention_multiplier or config.head_dim**-0.5) ** -2)
    if facts.multipliers:
        raw |= {key: getattr(config, key) for key in MULTIPLIERS}
        raw["attention_multiplier"] = config.attention_multiplier or config.head_dim**-0.5
    raw |= _write_code(config)
    if config.attention_softcap is not None:
        raw["attn_logit_softcapping"] = config.attention_softcap
    if config.logit_softcap is not None:
        raw["final_logit_softcapping"] = config.logit_softcap
    names = _key_names(family, config.alibi)
    raw = {names.get(key, key): value for key, value in raw.items()}
    raw = _as_classifier(raw) if config.value_head else raw
    check_round_trip(config, raw, f"a {config.family} config.json")
    return raw


def _write_code(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of a family that other programs run with the code of its published folders."""
    family = config.family
    if family not in CODE:
        return {}
    names = {"AutoConfig": f"configuration_{family}.{CODE[family]}"}
    if not config.value_head:  # the published folders have no code of classifiers
        names["AutoModelForCausalLM"] = f"modeling_{family}.{FAMILIES[family].architecture}"
    return {"auto_map": names} | ({Z_LOSS: 0} if config.normalize_head else {})


def _check_supported(keys: JsonKeys, family: str) -> None:
    """Refuse a model that would load but compute other results."""
    read_quantization(keys)
    fixed = _FIXED | FAMILIES[family].fixed
    fixed |= {} if FAMILIES[family].global_heads else {OVERRIDES: None}
    keys.require(fixed)


def _normalizes_head(keys: JsonKeys, family: str) -> bool:
    """Return whether the rows of the head are normalised: in Baichuan 2, whose config.json has another
    vocabulary than Baichuan 1, and a key for the loss of its training."""
    is_second = Z_LOSS in keys.raw or keys.get("vocab_size") == BAICHUAN2_VOCABULARY
    return family == "baichuan" and is_second


def _tied_key(keys: JsonKeys, family: str) -> str:
    """Return the key that ties the head to the embedding; older folders of LFM2 have another key."""
    old = "tie_embedding"
    return old if family.startswith("lfm2") and old in keys.raw else "tie_word_embeddings"


def _read_heads(keys: JsonKeys, family: str, sizes: dict[str, int], mla: MLAConfig | None) -> dict[str, int]:
    """Return num_kv_heads and head_dim of TransformerConfig."""
    largest = LARGEST["num_attention_heads"]
    own_kv = None if family in CODE else keys.optional("num_key_value_heads", largest)
    head_dim = keys.optional("head_dim", 1 << 16) or sizes["hidden_size"] // sizes["num_heads"]
    head_dim = mla.nope_dim + mla.rope_dim if mla else head_dim
    if not head_dim:
        few = f"is less than num_attention_heads={sizes['num_heads']}"
        raise keys.wrong("hidden_size", sizes["hidden_size"], few)
    if family == "qwen" and head_dim * sizes["num_heads"] != sizes["hidden_size"]:
        raise keys.wrong("head_dim", head_dim, "must be hidden_size / num_attention_heads")
    return {"num_kv_heads": own_kv or sizes["num_heads"], "head_dim": head_dim}


def _read_multipliers(keys: JsonKeys, family: str, hidden_size: int) -> dict[str, float]:
    """Return the fields MULTIPLIERS of TransformerConfig that the family has."""
    if FAMILIES[family].multipliers:
        return {key: keys.number(key, 1.0, low=1e-6, high=1e6) for key in MULTIPLIERS}
    fields = {"embedding_multiplier": math.sqrt(hidden_size)} if FAMILIES[family].sqrt_embeddings else {}
    if family == "gemma3_text":
        fields["attention_multiplier"] = keys.number("query_pre_attn_scalar", None, low=1e-6) ** -0.5
    return fields


def _with_default_multiplier(config: TransformerConfig) -> TransformerConfig:
    """Return None for the multiplier of attention scores if it is that of the size of heads."""
    is_default = config.attention_multiplier == config.head_dim**-0.5
    return dataclasses.replace(config, attention_multiplier=None) if is_default else config


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
    usual = raw["architectures"][0].replace(LANGUAGE, CLASSIFIER)
    name = FAMILIES[raw["model_type"]].classifier or usual
    labels = {"id2label": {"0": "SCORE"}, "label2id": {"SCORE": 0}, "num_labels": 1}
    return {**raw, "architectures": [name], **labels}


def _canonical(config: TransformerConfig) -> TransformerConfig:
    """Reset settings without effect to their defaults, since a config.json lacks them."""
    window, layers = config.sliding_window, config.window_layers
    if window is None or not any(layers or (True,)):
        window, layers = None, None
    if layers and all(layers):
        layers = None
    local = config.local_rope if window else None
    return dataclasses.replace(
        _with_default_multiplier(config),
        rope=canonical_rope(config.rope, config.max_position),
        local_rope=local and canonical_rope(local, config.max_position),
        rope_layers=None if all(config.rope_layers or (True,)) else config.rope_layers,
        sliding_window=window,
        window_layers=layers,
    )


def check_round_trip(config: TransformerConfig, raw: dict[str, Any], where: str) -> None:
    """Refuse a config that a file cannot express.

    Args:
        raw: keys of config.json that the file has.
        where: the kind of file, for the message.
    """
    ours, read = dataclasses.asdict(_canonical(config)), dataclasses.asdict(read_config(raw))
    lost = [
        f"{name}={ours[name]} (would read back as {read[name]})" for name in ours if ours[name] != read[name]
    ]
    if lost:
        raise UserError(f"export: {where} cannot express {'; '.join(lost)}")
