"""Model families: the facts that all models of one HF `model_type` share, a row a family."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_llm.models.mixer_config import LayerKind

Windows = Literal["none", "all", "all or typed", "typed"]
"""Layers with a sliding window: none; all; all, or the layers that `layer_types` names if config.json has it;
the layers that `layer_types` names."""


@dataclass(frozen=True)
class Family:
    """Facts about one HF `model_type`."""

    architecture: str
    """Class of its language models in transformers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of keys that config.json lacks, if the config class (`CLASS_KEYS`) has other ones."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig that all models of the family have."""
    bias: str = ""
    """Key that gives attention biases; "" = none has them."""
    out_bias: bool | str = True
    """The key gives the output projection a bias, too; a string = another key does."""
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
    """Key of the base of `local_rope` as transformers 4 spells it; "" = only transformers 5 has it."""
    global_heads: bool = False
    """Layers without a window have other heads (`global_head_dim`), and the last layer is one of them."""
    sqrt_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    multipliers: bool = False
    """Keys multiply embeddings, attention scores, and additions to the residual stream, and divide logits."""
    rope_in_windows: bool = False
    """In a model with windows only the layers with a window have a rotary position embedding."""
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
    like: str = ""
    """Family whose config class has the defaults; "" = its own."""


CLASS_KEYS = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "sliding_window", "max_window_layers"),
    *("hidden_activation", "query_pre_attn_scalar", "rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "mlp_hidden_act",
    # Latent attention and its indexer.
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("index_topk", "index_n_heads", "index_head_dim"),
    # Experts.
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "n_group", "topk_group", "norm_topk_prob", "use_expert_bias"),
    *("routed_scaling_factor", "first_k_dense_replace", "num_dense_layers"),
    # Layers that are not attention.
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_allow_neg_eigval", "conv_L_cache", "conv_kernel", "use_conv_bias"),
    *("use_bias", "time_step_min", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim"),
    *("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_expand"),
    *("mamba_conv_bias", "mamba_proj_bias"),
    *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
    # Gemma 4.
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers"),
    "use_double_wide_mlp",
}
"""Keys whose defaults are read from a family's config class in transformers. Not among them are keys that
many files lack (importing transformers takes seconds), and keys of RoPE, which the classes derive."""
_TIED = {"tie_word_embeddings": True}
_GEMMA = {**_TIED, "head_dim": 256}
_AS_HEADS = {"num_key_value_heads": None}
"""Latent attention has as many key heads as query heads, whatever the class has."""
_YARN = {
    **{"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "llama_4_scaling_beta": 0.1,
}
_MINISTRAL3_ROPE = {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384, **_YARN}
_MISTRAL4_ROPE = {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192, **_YARN}
_GPT_OSS_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
_GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_HEAD_NORMS = {"qk_norm": True}
_ALL_HEADS_NORM = {"qk_norm": True, "qk_norm_over_heads": True}
_QWEN35 = {"head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4}
_QWEN35_FACTS = {
    "fields": {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True},
    "bias": "attention_bias",
    "partial_rotary": True,
    "kinds": {"linear_attention": "delta", "full_attention": "attention"},
}
_LFM2_FACTS = {
    "fields": {"qk_norm": True},
    "kinds": {"conv": "conv", "full_attention": "attention"},
    "norm_eps": "norm_eps",
}
_NEMOTRON_FIXED = {
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "residual_in_fp32": False,
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
    "qwen2": Family("Qwen2ForCausalLM", bias="qkv_bias", out_bias=False, **_SWITCHED),
    "qwen3": Family("Qwen3ForCausalLM", {"head_dim": 128}, _HEAD_NORMS, bias="attention_bias", **_SWITCHED),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", bias="qkv_bias", out_bias=False, **_SWITCHED),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        fields=_HEAD_NORMS,
        bias="attention_bias",
        windows="all",  # transformers ignores `layer_types` and `max_window_layers`
        window_switch=True,
    ),
    "mixtral": Family("MixtralForCausalLM", {"rope_theta": 1e6}, windows="all"),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _AS_HEADS, bias="attention_bias"),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {"partial_rotary_factor": 0.5},
        bias="attention_bias",
        out_bias=False,
        partial_rotary=True,
    ),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", {"first_k_dense_replace": 1}, bias="attention_bias"),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", _AS_HEADS, bias="attention_bias"),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM",
        {**_AS_HEADS, "index_topk_freq": 1, "index_skip_topk_offset": 2},
        bias="attention_bias",
    ),
    "mistral4": Family(
        "Mistral4ForCausalLM", {**_AS_HEADS, "rope_parameters": _MISTRAL4_ROPE}, bias="attention_bias"
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        {"head_dim": 128, "rope_theta": 5e6},
        _ALL_HEADS_NORM,
        partial_rotary=True,
        fixed=_MINIMAX,
    ),
    "olmoe": Family("OlmoeForCausalLM", fields=_ALL_HEADS_NORM, bias="attention_bias"),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"head_dim": 64, "attention_bias": True, "rope_theta": 150_000.0, "rope_parameters": _GPT_OSS_ROPE},
        {"attention_sinks": True},
        bias="attention_bias",
        windows="typed",
        full_every=2,
    ),
    "llama": Family("LlamaForCausalLM", bias="attention_bias", mlp_bias=True),
    "mistral": Family("MistralForCausalLM", windows="all or typed"),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {"head_dim": 128, "attention_bias": True},
        bias="attention_bias",
        out_bias="attention_out_bias",
        mlp_bias=True,
    ),
    "baichuan": Family(
        "BaichuanForCausalLM", {"vocab_size": 64_000, "max_position_embeddings": None}, like="llama"
    ),
    "qwen": Family(
        "QWenLMHeadModel",
        {"max_position_embeddings": None},
        like="qwen2",
        classifier="QWenForSequenceClassification",
        bias="qkv_bias",
        out_bias=False,
        norm_eps="layer_norm_epsilon",
        fixed={"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
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
        {**_GEMMA, "global_head_dim": 512, "rope_parameters": _GEMMA4_ROPES},
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
    "olmo2": Family("Olmo2ForCausalLM", fields={**_ALL_HEADS_NORM, "norms": "after"}, bias="attention_bias"),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"rope_theta": 5e5},
        {**_ALL_HEADS_NORM, "norms": "after"},
        bias="attention_bias",
        windows="typed",
        full_every=4,
        rope_by_layer_type=True,
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM", fields={**_HEAD_NORMS, "qk_norm_after_rope": True}, bias="attention_bias"
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        fields={**_HEAD_NORMS, "norms": "after"},
        windows="typed",
        full_every=4,
        rope_in_windows=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {**_TIED, "rope_theta": 2e6, "no_rope_layer_interval": 4},
        bias="attention_bias",
        mlp_bias=True,
        **_SWITCHED,
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", _QWEN35, **_QWEN35_FACTS),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        {**_QWEN35, "intermediate_size": 12_288, "norm_topk_prob": True},  # the first is of no layer
        **_QWEN35_FACTS,
    ),
    "qwen3_next": Family("Qwen3NextForCausalLM", _QWEN35, **_QWEN35_FACTS, recurrent={"projections": "qkvz"}),
    "phi3": Family(
        "Phi3ForCausalLM", {"original_max_position_embeddings": 4096}, windows="all", partial_rotary=True
    ),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        {"full_attention_interval": 4},
        {**_ALL_HEADS_NORM, "norms": "after"},
        bias="attention_bias",
        null_theta=True,
        kinds={"linear_attention": "delta", "full_attention": "attention"},
        recurrent={"projections": "separate", "norms": "before", "norm_eps": 1e-5},
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM", {"head_dim": 128, "rope_parameters": _MINISTRAL3_ROPE}, windows="all"
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        {"head_dim": 128},
        {"one_branch": True, "mlp_gate": False},
        mlp_bias=True,
        kinds={"linear_attention": "mamba", "full_attention": "attention", "moe": "experts", "mlp": "mlp"},
        has_rope=False,
        activation="mlp_hidden_act",
        fixed=_NEMOTRON_FIXED,
        norm_eps="layer_norm_epsilon",
    ),
    "granite": Family("GraniteForCausalLM", bias="attention_bias", mlp_bias=True, multipliers=True),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        bias="attention_bias",
        kinds={"mamba": "mamba", "attention": "attention"},
        recurrent={"dt_min": 0.0},
        multipliers=True,
        rope_switch="position_embedding_type",
        fixed={"hidden_act": "silu"},
    ),
    "lfm2": Family("Lfm2ForCausalLM", {**_TIED, "rope_theta": 1e6}, **_LFM2_FACTS),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", {**_TIED, "rope_theta": 1e6}, **_LFM2_FACTS),
}
"""The supported families by `model_type`."""


class Defaults:
    """Values of the keys that a family's config.json lacks."""

    def __init__(self, family: str):
        self.family = family

    def get(self, key: str) -> Any:
        """Return the value; None = the key has no default."""
        facts = FAMILIES[self.family]
        if key in facts.defaults or key not in CLASS_KEYS:
            return facts.defaults.get(key)
        return _class_defaults(facts.like or self.family).get(key)


@functools.cache
def _class_defaults(family: str) -> dict[str, Any]:
    """Return the defaults of a config class of transformers, before it derives some from other keys."""
    from transformers import CONFIG_MAPPING  # slow, and most files have all keys

    if family not in CONFIG_MAPPING:  # an older transformers; the keys that a file lacks are then named
        return {}
    parameters = inspect.signature(CONFIG_MAPPING[family].__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
