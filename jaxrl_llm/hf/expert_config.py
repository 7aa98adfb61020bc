"""Keys of config.json that describe a mixture of experts, and latent attention."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.hf.json_file import JsonKeys
from jaxrl_llm.models.config import MoEConfig, TransformerConfig
from jaxrl_llm.models.mixer_config import IndexConfig, MLAConfig

SHARED = ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next")
"""Families with a shared expert behind a gate."""
INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Families whose latent attention has an indexer."""
GROUPED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "mistral4", *INDEXED)
"""Families whose routers have groups, and, except for Mistral 4, sigmoid scores and a selection bias."""
LOCAL = ("mixtral", "gpt_oss", "minimax_m2", "granitemoehybrid")
"""Families whose keys are `num_local_experts` and `intermediate_size`."""
LATENT = ("deepseek_v3", "glm4_moe_lite", "mistral4", *INDEXED)
"""Families with latent attention."""
TYPED = ("glm4_moe_lite", *INDEXED)
"""Families that name the kind of each layer's feed-forward."""
FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Keys of such families that have one supported value."""


def read_experts(keys: JsonKeys, family: str) -> MoEConfig | None:
    """Return the experts of a family that has them.

    Raises:
        UserError: some layers are dense, or the router has noise.
    """
    if family in ("mixtral", "minimax_m2") and (noise := keys.number("router_jitter_noise", 0.0)):
        fix = "is not supported: noise in training changes the choice of experts; set it to 0.0"
        raise keys.wrong("router_jitter_noise", noise, fix)
    # Families with keys unlike Qwen's.
    if family in GROUPED:
        return _read_grouped(keys, family)
    if family in LOCAL:
        has_none = family == "granitemoehybrid" and keys.get("num_local_experts") == 0
        return None if has_none else _read_local(keys, family)
    if family == "gemma4_text":
        return _read_gemma4(keys) if keys.flag("enable_moe_block") else None
    if family == "lfm2_moe":
        return _read_lfm2(keys)
    if family == "nemotron_h":
        types = keys.get("layer_types")
        return _read_nemotron(keys) if isinstance(types, list) and "moe" in types else None
    if family not in (*SHARED, "qwen3_moe", "olmoe"):
        return None
    keys.require({"decoder_sparse_step": 1, "mlp_only_layers": []})  # every layer is sparse
    count = "num_local_experts" if "num_local_experts" in keys.raw else "num_experts"  # transformers 5
    shared = keys.integer("shared_expert_intermediate_size") if family in SHARED else 0
    return MoEConfig(
        keys.integer(count),
        keys.integer("num_experts_per_tok"),
        keys.integer("intermediate_size" if family == "olmoe" else "moe_intermediate_size"),
        shared,
        normalize=keys.flag("norm_topk_prob"),
    )


def _read_local(keys: JsonKeys, family: str) -> MoEConfig:
    """Return the experts of Mixtral, gpt-oss, MiniMax-M2 or Granite 4."""
    names = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
    sizes = [*map(keys.integer, names)]
    if family == "granitemoehybrid":
        shared = keys.integer("shared_intermediate_size")
        return MoEConfig(*sizes, shared, shared_gate=False, score="softmax_of_chosen")
    if family == "minimax_m2":
        return MoEConfig(*sizes, score="sigmoid", selection_bias=True, added_to_sum=0.0)
    return MoEConfig(*sizes, **_clamped(keys)) if family == "gpt_oss" else MoEConfig(*sizes)


def _read_gemma4(keys: JsonKeys) -> MoEConfig:
    """Return the experts of Gemma 4, beside which each layer has a dense feed-forward."""
    sizes = ("num_experts", "top_k_experts", "moe_intermediate_size", "intermediate_size")
    return MoEConfig(
        *map(keys.integer, sizes),
        added_to_sum=0.0,
        shared_gate=False,
        branches=True,
    )


def _read_lfm2(keys: JsonKeys) -> MoEConfig:
    """Return the experts of LFM2, which are chosen as DeepSeek-V3's are, without groups."""
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return MoEConfig(
        *map(keys.integer, sizes),
        normalize=keys.flag("norm_topk_prob"),
        added_to_sum=1e-6,
        score="sigmoid",
        scale=keys.number("routed_scaling_factor", 1.0, low=1e-6, high=1e6),
        selection_bias=keys.flag("use_expert_bias"),
        dense_layers=keys.integer("num_dense_layers", low=0),
    )


def _read_nemotron(keys: JsonKeys) -> MoEConfig:
    """Return the experts of Nemotron-H, which are chosen as DeepSeek-V3's are."""
    sizes = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    groups = keys.integer("n_group")
    return MoEConfig(
        *map(keys.integer, sizes),
        shared_size=keys.integer("moe_shared_expert_intermediate_size"),
        normalize=keys.flag("norm_topk_prob"),
        shared_gate=False,
        score="sigmoid",
        scale=keys.number("routed_scaling_factor", 1.0, low=1e-6, high=1e6),
        groups=groups,
        groups_kept=keys.integer("topk_group") if groups > 1 else 1,
        selection_bias=True,
        latent_size=keys.optional("moe_latent_size") or 0,
    )


def _read_grouped(keys: JsonKeys, family: str) -> MoEConfig:
    """Return the experts of DeepSeek-V3 and its relatives. The scores of Mistral 4 are a softmax.

    Raises:
        UserError: experts are chosen in another way, or dense layers follow sparse ones.
    """
    keys.require({} if family == "mistral4" else FIXED)
    size, groups = keys.integer("moe_intermediate_size"), keys.integer("n_group")
    return MoEConfig(
        keys.integer("n_routed_experts"),
        keys.integer("num_experts_per_tok"),
        size,
        shared_size=size * keys.integer("n_shared_experts"),
        normalize=keys.flag("norm_topk_prob"),
        shared_gate=False,
        score="softmax" if family == "mistral4" else "sigmoid",
        scale=keys.number("routed_scaling_factor", 1.0, low=1e-6, high=1e6),
        groups=groups,
        groups_kept=keys.integer("topk_group") if groups > 1 else 1,
        selection_bias=family != "mistral4",
        dense_layers=_read_dense_layers(keys, family),
    )


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


def _clamped(keys: JsonKeys) -> dict[str, Any]:
    """Return the MoEConfig fields that only gpt-oss sets."""
    defaults = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    limits = {key: keys.number(key, value, low=1e-6, high=1e6) for key, value in defaults.items()}
    return {"score": "softmax_of_chosen", "bias": True, **limits}


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


def _write_grouped(config: TransformerConfig, moe: MoEConfig) -> dict[str, Any]:
    """Return the keys of experts that are chosen as DeepSeek-V3's are."""
    common = {
        "n_routed_experts": moe.num_experts,
        "moe_intermediate_size": moe.expert_size,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "n_group": moe.groups,
        "topk_group": moe.groups_kept,
    }
    if config.family == "nemotron_h":
        sizes = {"moe_latent_size": moe.latent_size or None}
        return {**common, **sizes, "moe_shared_expert_intermediate_size": moe.shared_size}
    types = {"mlp_layer_types": _mlp_layer_types(moe.dense_layers, config.num_layers)}
    return {
        **common,
        **(types if config.family in TYPED else {}),
        "n_shared_experts": moe.shared_size // moe.expert_size,
        "first_k_dense_replace": moe.dense_layers,
    }


def write_experts(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of the experts, none for a dense model."""
    moe = config.moe
    if config.family == "gemma4_text":
        sizes = ("num_experts", "top_k_experts", "moe_intermediate_size")
        found = (moe.num_experts, moe.experts_per_token, moe.expert_size) if moe else (None,) * 3
        return {"enable_moe_block": moe is not None, **dict(zip(sizes, found, strict=True))}
    if moe is None:
        return {}
    # The keys differ by family.
    common = {"num_experts_per_tok": moe.experts_per_token, "output_router_logits": False}
    if config.family in (*GROUPED, "nemotron_h"):
        return common | _write_grouped(config, moe)
    if config.family in LOCAL:
        sizes = {"num_local_experts": moe.num_experts, "intermediate_size": moe.expert_size}
        clamps = {"swiglu_limit": moe.swiglu_limit, "swiglu_alpha": moe.swiglu_alpha}
        return {**common, **sizes, **(clamps if config.family == "gpt_oss" else {})}
    common |= {"num_experts": moe.num_experts, "norm_topk_prob": moe.normalize}
    if config.family == "olmoe":
        return {**common, "intermediate_size": moe.expert_size, "clip_qkv": None}
    if config.family == "lfm2_moe":
        return {
            **common,
            "moe_intermediate_size": moe.expert_size,
            "num_dense_layers": moe.dense_layers,
            "routed_scaling_factor": moe.scale,
            "use_expert_bias": moe.selection_bias,
        }
    shared = {"shared_expert_intermediate_size": moe.shared_size} if config.family in SHARED else {}
    return {
        **common,
        **shared,
        "moe_intermediate_size": moe.expert_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
