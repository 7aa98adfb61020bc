"""Keys of config.json that describe a mixture of experts, and latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_llm.hf.json_file import JsonKeys
from jaxrl_llm.models.config import MoEConfig, TransformerConfig
from jaxrl_llm.models.mixer_config import IndexConfig, MLAConfig

SHARED = ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next")
"""Families with a shared expert behind a gate."""
INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Families whose latent attention has an indexer."""
GROUPED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "mistral4", *INDEXED)
"""Families whose routers have groups, and, except for Mistral 4, sigmoid scores and a selection bias."""
LATENT = ("deepseek_v3", "glm4_moe_lite", "mistral4", *INDEXED)
"""Families with latent attention."""
TYPED = ("glm4_moe_lite", *INDEXED)
"""Families that name the kind of each layer's feed-forward."""
FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Keys of such families that have one supported value."""
EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""Keys of Qwen's families, and of OLMoE, that say which layers are sparse: every one."""


class ExpertKeys(NamedTuple):
    """Experts of a family: the keys of their sizes and switches, and facts that no key tells."""

    keys: Mapping[str, str]
    """Fields of MoEConfig -> HF keys."""
    fields: Mapping[str, Any] = MappingProxyType({})
    """Fields of MoEConfig that all models of the family have."""


_QWEN = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "normalize": "norm_topk_prob",
}
_LOCAL = {
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "intermediate_size",
}
_GROUPED = {**_QWEN, "num_experts": "n_routed_experts", "scale": "routed_scaling_factor", "groups": "n_group"}
_NEMOTRON = {"shared_size": "moe_shared_expert_intermediate_size", "latent_size": "moe_latent_size"}
_GEMMA4 = {
    "num_experts": "num_experts",
    "experts_per_token": "top_k_experts",
    "expert_size": "moe_intermediate_size",
}
_LFM2 = {
    "scale": "routed_scaling_factor",
    "selection_bias": "use_expert_bias",
    "dense_layers": "num_dense_layers",
}
_SIGMOID = {"score": "sigmoid", "selection_bias": True, "shared_gate": False}
EXPERTS = {
    "qwen3_moe": ExpertKeys(_QWEN),
    "olmoe": ExpertKeys({**_QWEN, "expert_size": "intermediate_size"}),
    **dict.fromkeys(SHARED, ExpertKeys({**_QWEN, "shared_size": "shared_expert_intermediate_size"})),
    **dict.fromkeys(GROUPED, ExpertKeys(_GROUPED, _SIGMOID)),
    "mistral4": ExpertKeys(_GROUPED, {"shared_gate": False}),
    "nemotron_h": ExpertKeys(_GROUPED | _NEMOTRON, _SIGMOID),
    "lfm2_moe": ExpertKeys(_QWEN | _LFM2, {"score": "sigmoid", "added_to_sum": 1e-6}),
    "mixtral": ExpertKeys(_LOCAL),
    "minimax_m2": ExpertKeys(_LOCAL, {"score": "sigmoid", "selection_bias": True, "added_to_sum": 0.0}),
    "granitemoehybrid": ExpertKeys(
        {**_LOCAL, "shared_size": "shared_intermediate_size"},
        {"score": "softmax_of_chosen", "shared_gate": False},
    ),
    "gpt_oss": ExpertKeys(
        {**_LOCAL, "swiglu_limit": "swiglu_limit", "swiglu_alpha": "swiglu_alpha"},
        {"score": "softmax_of_chosen", "bias": True},
    ),
    "gemma4_text": ExpertKeys(_GEMMA4, {"added_to_sum": 0.0, "shared_gate": False, "branches": True}),
}
"""Families with experts; of some, models without experts, too."""
_FACTORS = {"scale": 1.0, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""Fields that are factors -> values if the key is absent."""


def read_experts(keys: JsonKeys, family: str) -> MoEConfig | None:
    """Return the experts of a model that has them.

    Raises:
        UserError: some layers are dense, experts are chosen in another way, or the router has noise.
    """
    if family in ("mixtral", "minimax_m2") and (noise := keys.number("router_jitter_noise", 0.0)):
        fix = "is not supported: noise in training changes the choice of experts; set it to 0.0"
        raise keys.wrong("router_jitter_noise", noise, fix)
    if family not in EXPERTS or not _has_experts(keys, family):
        return None
    names, fields = EXPERTS[family]
    if family in (*SHARED, "qwen3_moe", "olmoe"):
        keys.require(EVERY_LAYER)
        if "num_local_experts" in keys.raw:  # transformers 5
            names = {**names, "num_experts": "num_local_experts"}
    if family in GROUPED and family != "mistral4":
        keys.require(FIXED)
    # The keys of the table, then sizes that follow from others.
    found = {field: _read_field(keys, field, key) for field, key in names.items()}
    if found.get("groups", 1) > 1:
        found["groups_kept"] = keys.integer("topk_group")
    if family in GROUPED:
        found["shared_size"] = found["expert_size"] * keys.integer("n_shared_experts")
        found["dense_layers"] = _read_dense_layers(keys, family)
    if family == "gemma4_text":  # each layer has a dense feed-forward beside the experts
        found["shared_size"] = keys.integer("intermediate_size")
    return MoEConfig(**found, **fields)


def _has_experts(keys: JsonKeys, family: str) -> bool:
    """Return whether a model of a family with experts has them."""
    if family == "granitemoehybrid":
        return keys.get("num_local_experts") != 0
    if family == "nemotron_h":
        types = keys.get("layer_types")
        return isinstance(types, list) and "moe" in types
    return family != "gemma4_text" or keys.flag("enable_moe_block")


def _read_field(keys: JsonKeys, field: str, key: str) -> Any:
    if field in ("normalize", "selection_bias"):
        return keys.flag(key)
    if field in _FACTORS:
        return keys.number(key, _FACTORS[field], low=1e-6, high=1e6)
    if field == "latent_size":
        return keys.optional(key) or 0
    return keys.integer(key, low=0 if field == "dense_layers" else 1)


def _read_dense_layers(keys: JsonKeys, family: str) -> int:
    """Return the number of leading layers without experts. Families of TYPED name the kind of each layer.

    Raises:
        UserError: dense layers follow sparse ones.
    """
    types = keys.get("mlp_layer_types") if family in TYPED else None
    if types is None:
        return keys.integer("first_k_dense_replace", low=0)
    layers = keys.integer("num_hidden_layers")
    dense = types.count("dense") if isinstance(types, list) else 0
    if types != _mlp_layer_types(dense, layers):
        order = f"a list of {layers} entries, dense ones before sparse ones"
        raise keys.wrong("mlp_layer_types", types, f"is not supported; supported: {order}")
    return dense


def _mlp_layer_types(dense: int, layers: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (layers - dense)


def read_latent_attention(keys: JsonKeys, family: str, heads: int) -> MLAConfig | None:
    """Return the latent attention of a family that has it.

    Raises:
        UserError: the model has fewer key heads than query heads.
    """
    if family not in LATENT:
        return None
    if keys.get("num_key_value_heads") not in (None, heads):
        requirement = f"is not supported; supported: num_attention_heads, {heads}"
        raise keys.wrong("num_key_value_heads", keys.get("num_key_value_heads"), requirement)
    return MLAConfig(
        keys.integer("kv_lora_rank"),
        keys.optional("q_lora_rank") or 0,
        keys.integer("qk_nope_head_dim"),
        keys.integer("qk_rope_head_dim"),
        value_dim=keys.integer("v_head_dim"),
        interleaved=keys.flag("rope_interleave", True),
    )


def read_indexer(keys: JsonKeys, family: str, num_layers: int) -> dict[str, Any]:
    """Return the fields index and index_layers of TransformerConfig, none for a family without an indexer.

    Raises:
        UserError: a kind of RoPE that transformers does not compute, layers of other kinds, or a first layer
            without an indexer.
    """
    if family not in INDEXED:
        return {}
    is_glm = family == "glm_moe_dsa"
    fixed = {"indexer_rope_interleave": is_glm, "rope_interleave": True, "index_kpool": None}
    fixed |= {"layer_types": ["indexed_attention"] * num_layers, "mla_use_nope": False}
    keys.require(fixed)
    sizes = map(keys.integer, ("index_topk", "index_n_heads", "index_head_dim"))
    found = {"index": IndexConfig(*sizes, interleaved=is_glm)}
    types = _indexer_types(keys, num_layers) if is_glm else []
    return {**found, "index_layers": tuple(kind == "full" for kind in types)} if "shared" in types else found


def _indexer_types(keys: JsonKeys, num_layers: int) -> list[str]:
    """Return the kind of each layer's indexer of GLM-5: "full", or "shared" for the choice of an earlier one.

    Raises:
        UserError: other kinds, another number of layers, or no indexer in the first layer.
    """
    types, pattern = keys.get("indexer_types"), keys.get("index_topk_pattern")
    if types is None and pattern is not None:
        letters = {"F": "full", "S": "shared"}
        types = (
            [letters.get(letter, letter) for letter in pattern]
            if isinstance(pattern, (str, list))
            else pattern
        )
    elif types is None:
        period = keys.integer("index_topk_freq", low=0) or 1
        first = keys.integer("index_skip_topk_offset", low=0)
        types = ["shared" if max(i - first + 1, 0) % period else "full" for i in range(num_layers)]
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or {*map(str, types)} - {"full", "shared"} or types[0] != "full":
        needed = f"must be a list of {num_layers} full or shared, the first full"
        raise keys.wrong("indexer_types", types, needed)
    return types


def write_indexer(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of the indexer, none for a model without."""
    if (index := config.index) is None:
        return {}
    sizes = {"index_topk": index.topk, "index_n_heads": index.heads, "index_head_dim": index.head_dim}
    if config.family != "glm_moe_dsa":
        return sizes
    layers = config.index_layers or (True,) * config.num_layers
    types = {"indexer_types": ["full" if own else "shared" for own in layers]}
    return {**sizes, **types, "indexer_rope_interleave": index.interleaved}


def write_latent_attention(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of latent attention, none for a model without."""
    mla = config.mla
    if mla is None:
        return {}
    return {
        "head_dim": mla.rope_dim,  # as in transformers
        "kv_lora_rank": mla.kv_rank,
        "q_lora_rank": mla.q_rank or None,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        **({} if config.index else {"rope_interleave": mla.interleaved}),
    }


def write_experts(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of the experts, none for a dense model."""
    moe, family = config.moe, config.family
    names = EXPERTS[family].keys if family in EXPERTS else {}
    sizes = {key: getattr(moe, field, None) for field, key in names.items()}
    if family == "gemma4_text":
        return {"enable_moe_block": moe is not None, **sizes}
    if moe is None:
        return {}
    # Keys of some families only: transformers would warn of others.
    keys = {**sizes, "output_router_logits": False}
    if family in (*SHARED, "qwen3_moe"):
        keys |= EVERY_LAYER
    if family == "olmoe":
        keys["clip_qkv"] = None
    if "groups" in names:
        keys["topk_group"] = moe.groups_kept
    if family == "nemotron_h":
        keys["moe_latent_size"] = moe.latent_size or None
    if family in TYPED:
        keys["mlp_layer_types"] = _mlp_layer_types(moe.dense_layers, config.num_layers)
    if family in GROUPED:
        keys["n_shared_experts"] = moe.shared_size // moe.expert_size
        keys["first_k_dense_replace"] = moe.dense_layers
    return keys
