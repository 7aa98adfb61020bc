"""Model families: the facts that all models of one HF `model_type` share, a row a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_llm.hf.expert_defaults import EXPERT_DEFAULTS
from jaxrl_llm.models.mixer_config import LayerKind

Windows = Literal["none", "all", "all or typed", "typed"]
"""Layers with a sliding window: none; all; all, or the layers that `layer_types` names if config.json has it;
the layers that `layer_types` names."""


@dataclass(frozen=True)
class Family:
    """Facts about one HF `model_type`."""

    architecture: str
    """Class of its language models in transformers."""
    defaults: Mapping[str, Any]
    """Values of keys that config.json lacks."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig that all models of the family have."""
    bias: str = ""
    """Key that gives attention biases; "" = none has them."""
    out_bias: bool = True
    """The key gives the output projection a bias, too."""
    mlp_bias: bool = False
    """The key `mlp_bias` gives the feed-forward biases."""
    windows: Windows = "none"
    """Layers with a sliding window."""
    window_switch: bool = False
    """Windows need `use_sliding_window`."""
    full_every: int = 0
    """Period of layers without a window in the default `layer_types`; 0 = another default."""
    partial_rotary: bool = False
    """RoPE may rotate a part of each head (`partial_rotary_factor`)."""
    kinds: Mapping[str, LayerKind] = field(default_factory=dict)
    """Kinds of layers that `layer_types` names, if they are not all attention."""
    recurrent: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Config of the recurrent kind (such as DeltaConfig) that all models of the family have."""
    rope_by_layer_type: bool = False
    """Layers with a window have a rotary position embedding of a different kind: `local_rope`."""
    null_theta: bool = False
    """No layer has a rotary position embedding if `rope_theta` is null."""
    local_theta: str = "rope_theta"
    """Key of the base of `local_rope` in the spelling of transformers 4; "" = RoPE has only that of 5."""
    global_heads: bool = False
    """Layers without a window have other heads (`global_head_dim`), and the last layer is one of them."""
    sqrt_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    multipliers: bool = False
    """Keys multiply embeddings, attention scores, and additions to the residual stream, and divide logits."""
    rope_switch: str = ""
    """Key that is "rope" if layers have a rotary position embedding."""
    activation: str = "hidden_act"
    """Key of the activation."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys with one supported value, which exports have, too: other programs read them."""
    has_rope: bool = True
    """Attention has a rotary position embedding."""
    norm_eps: str = "rms_norm_eps"
    """Key of the number added to the mean square in norms."""
    classifier: str = ""
    """Class of its sequence classifiers; "" = the usual name."""


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
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    **_GEMMA,
    "vocab_size": 262_208,
    "num_hidden_layers": 26,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_GEMMA4 = {
    **_GEMMA,
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "global_head_dim": 512,
    **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144},
    **{"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
_SMOLLM3 = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2e6,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}
_MINISTRAL3 = {
    **_LLAMA,
    **_MISTRAL,
    "vocab_size": 131_072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_PHI3 = {
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_OLMO3 = {**_LLAMA, "vocab_size": 50_304, "rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5}
_HEAD_NORMS = {"qk_norm": True}
_ALL_HEADS_NORM = {"qk_norm": True, "qk_norm_over_heads": True}
_QWEN35 = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN35_FACTS = {
    "fields": {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True},
    "bias": "attention_bias",
    "partial_rotary": True,
    "kinds": {"linear_attention": "delta", "full_attention": "attention"},
}
_QWEN3_NEXT = {
    **_QWEN35,
    **{"vocab_size": 151_936, "num_key_value_heads": 2, "intermediate_size": 5632},
    **EXPERT_DEFAULTS["qwen3_next"],
}
_LFM2 = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    **{"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256},
}
_LFM2_FACTS = {
    "fields": {"qk_norm": True},
    "kinds": {"conv": "conv", "full_attention": "attention"},
    "norm_eps": "norm_eps",
}
_OLMO_HYBRID = {
    **{"vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008, "num_hidden_layers": 32},
    **{"num_attention_heads": 30, "max_position_embeddings": 65_536, "full_attention_interval": 4},
    **{"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
}
_NEMOTRON_FIXED = {
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "residual_in_fp32": False,
    "moe_latent_size": None,
    "sliding_window": None,
}
_MINIMAX = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
}
_SWITCHED = {"windows": "typed", "window_switch": True}

FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", _QWEN, bias="qkv_bias", out_bias=False, **_SWITCHED),
    "qwen3": Family(
        "Qwen3ForCausalLM", {**_QWEN, "head_dim": 128}, _HEAD_NORMS, bias="attention_bias", **_SWITCHED
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {**_QWEN, **EXPERT_DEFAULTS["qwen2_moe"]},
        bias="qkv_bias",
        out_bias=False,
        **_SWITCHED,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_QWEN, **EXPERT_DEFAULTS["qwen3_moe"]},
        _HEAD_NORMS,
        bias="attention_bias",
        windows="all",  # transformers ignores `layer_types` and `max_window_layers`
        window_switch=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM", {**_LLAMA, **_MISTRAL, **EXPERT_DEFAULTS["mixtral"]}, windows="all"
    ),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", EXPERT_DEFAULTS["deepseek_v3"], bias="attention_bias"),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        EXPERT_DEFAULTS["glm4_moe"],
        bias="attention_bias",
        out_bias=False,
        partial_rotary=True,
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM", EXPERT_DEFAULTS["glm4_moe_lite"], bias="attention_bias"
    ),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", EXPERT_DEFAULTS["deepseek_v32"], bias="attention_bias"),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", EXPERT_DEFAULTS["glm_moe_dsa"], bias="attention_bias"),
    "mistral4": Family("Mistral4ForCausalLM", EXPERT_DEFAULTS["mistral4"], bias="attention_bias"),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        EXPERT_DEFAULTS["minimax_m2"],
        _ALL_HEADS_NORM,
        partial_rotary=True,
        fixed=_MINIMAX,
    ),
    "olmoe": Family("OlmoeForCausalLM", EXPERT_DEFAULTS["olmoe"], _ALL_HEADS_NORM, bias="attention_bias"),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        EXPERT_DEFAULTS["gpt_oss"],
        {"attention_sinks": True},
        bias="attention_bias",
        windows="typed",
        full_every=2,
    ),
    "llama": Family("LlamaForCausalLM", _LLAMA, bias="attention_bias", mlp_bias=True),
    "mistral": Family("MistralForCausalLM", {**_LLAMA, **_MISTRAL}, windows="all or typed"),
    "baichuan": Family(
        "BaichuanForCausalLM", {**_LLAMA, "vocab_size": 64_000, "max_position_embeddings": None}
    ),
    "qwen": Family(
        "QWenLMHeadModel",
        {**_QWEN, "max_position_embeddings": None},
        classifier="QWenForSequenceClassification",
        bias="qkv_bias",
        out_bias=False,
        norm_eps="layer_norm_epsilon",
        fixed={"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA3,
        {**_HEAD_NORMS, "norms": "both", "norm_offset": 1.0},
        bias="attention_bias",
        windows="typed",
        full_every=6,
        rope_by_layer_type=True,
        local_theta="rope_local_base_freq",
        sqrt_embeddings=True,
        activation="hidden_activation",
        fixed={"use_bidirectional_attention": False},
        classifier="Gemma3TextForSequenceClassification",
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        _GEMMA4,
        {
            **{**_HEAD_NORMS, "norms": "both", "attention_multiplier": 1.0},
            **{"value_norm": True, "layer_scalar": True},
        },
        bias="attention_bias",
        windows="typed",
        full_every=6,
        rope_by_layer_type=True,
        local_theta="",
        global_heads=True,
        sqrt_embeddings=True,
        activation="hidden_activation",
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _OLMO3,
        {**_ALL_HEADS_NORM, "norms": "after"},
        bias="attention_bias",
        windows="typed",
        full_every=4,
        rope_by_layer_type=True,
    ),
    "smollm3": Family("SmolLM3ForCausalLM", _SMOLLM3, bias="attention_bias", mlp_bias=True, **_SWITCHED),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", _QWEN35, **_QWEN35_FACTS),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM", {**_QWEN35, **EXPERT_DEFAULTS["qwen3_5_moe_text"]}, **_QWEN35_FACTS
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", _QWEN3_NEXT, **_QWEN35_FACTS, recurrent={"projections": "qkvz"}
    ),
    "phi3": Family("Phi3ForCausalLM", _PHI3, windows="all", partial_rotary=True),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        _OLMO_HYBRID,
        {**_ALL_HEADS_NORM, "norms": "after"},
        bias="attention_bias",
        null_theta=True,
        kinds={"linear_attention": "delta", "full_attention": "attention"},
        recurrent={"projections": "separate", "norms": "before", "norm_eps": 1e-5},
    ),
    "ministral3": Family("Ministral3ForCausalLM", _MINISTRAL3, windows="all"),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        EXPERT_DEFAULTS["nemotron_h"],
        {"one_branch": True, "mlp_gate": False},
        mlp_bias=True,
        kinds={
            "linear_attention": "mamba",
            "full_attention": "attention",
            "moe": "experts",
            "mlp": "mlp",
        },
        has_rope=False,
        activation="mlp_hidden_act",
        fixed=_NEMOTRON_FIXED,
        norm_eps="layer_norm_epsilon",
    ),
    "granite": Family("GraniteForCausalLM", _LLAMA, bias="attention_bias", mlp_bias=True, multipliers=True),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {**_LLAMA, **EXPERT_DEFAULTS["granitemoehybrid"]},
        bias="attention_bias",
        kinds={"mamba": "mamba", "attention": "attention"},
        recurrent={"dt_min": 0.0},
        multipliers=True,
        rope_switch="position_embedding_type",
        fixed={"hidden_act": "silu"},
    ),
    "lfm2": Family("Lfm2ForCausalLM", _LFM2, **_LFM2_FACTS),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", {**_LFM2, **EXPERT_DEFAULTS["lfm2_moe"]}, **_LFM2_FACTS),
}
"""The supported families by `model_type`."""
