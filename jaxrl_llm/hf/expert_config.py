"""Keys of config.json that describe a mixture of experts."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.hf.json_file import JsonKeys
from jaxrl_llm.models.config import MoEConfig, TransformerConfig

EXPERT_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "mixtral": {
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "olmoe": {
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "gpt_oss": {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
"""HF's defaults of families with experts, beside those of their dense relatives."""
LARGEST = {
    **dict.fromkeys(("num_experts", "num_local_experts"), 2**16),
    "num_experts_per_tok": 2**8,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size"), 10**7),
}
"""Sizes beyond those of any model."""


def read_experts(keys: JsonKeys, family: str) -> MoEConfig | None:
    """Return the experts of a family that has them.

    Raises:
        UserError: some of its layers are dense.
    """
    if family not in EXPERT_DEFAULTS:
        return None
    integer = lambda key: keys.integer(key, LARGEST[key])
    if family in ("mixtral", "gpt_oss"):
        sizes = [integer(key) for key in ("num_local_experts", "num_experts_per_tok", "intermediate_size")]
        return MoEConfig(*sizes, **_clamped(keys)) if family == "gpt_oss" else MoEConfig(*sizes)
    for key, every_layer in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if keys.get(key) not in (None, every_layer):
            raise keys.wrong(key, keys.get(key), f"is not supported; supported: {every_layer}")
    count = "num_local_experts" if "num_local_experts" in keys.raw else "num_experts"  # transformers 5
    shared = integer("shared_expert_intermediate_size") if family == "qwen2_moe" else 0
    return MoEConfig(
        integer(count),
        integer("num_experts_per_tok"),
        integer("intermediate_size" if family == "olmoe" else "moe_intermediate_size"),
        shared,
        keys.flag("norm_topk_prob"),
    )


def _clamped(keys: JsonKeys) -> dict[str, Any]:
    """Return what the experts of gpt-oss have and those of others lack."""
    defaults = {key: EXPERT_DEFAULTS["gpt_oss"][key] for key in ("swiglu_limit", "swiglu_alpha")}
    limits = {key: keys.number(key, value, low=1e-6, high=1e6) for key, value in defaults.items()}
    return {"score": "softmax_of_chosen", "bias": True, **limits}


def write_experts(config: TransformerConfig) -> dict[str, Any]:
    """Return the keys of the experts, none for a dense model."""
    moe = config.moe
    if moe is None:
        return {}
    common = {"num_experts_per_tok": moe.experts_per_token, "output_router_logits": False}
    if config.family in ("mixtral", "gpt_oss"):
        clamp = {"swiglu_limit": moe.swiglu_limit, "swiglu_alpha": moe.swiglu_alpha}
        sizes = {"num_local_experts": moe.num_experts, "intermediate_size": moe.expert_size}
        return {**common, **sizes, **(clamp if config.family == "gpt_oss" else {})}
    common |= {"num_experts": moe.num_experts, "norm_topk_prob": moe.normalize}
    if config.family == "olmoe":
        return {**common, "intermediate_size": moe.expert_size, "clip_qkv": None}
    shared = {"shared_expert_intermediate_size": moe.shared_size} if config.family == "qwen2_moe" else {}
    return {
        **common,
        **shared,
        "moe_intermediate_size": moe.expert_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
