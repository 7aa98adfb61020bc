"""Tiny models of families, as keys of config.json: a plain one, and one in which every size is odd."""

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SPECIAL = {
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}  # transformers gives a padding row no gradient
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.3, 2.0], "long_factor": [1.1, 6.0, 30.0]}
DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "shared_expert_intermediate_size": 16,
}
GLM = {
    **{"num_key_value_heads": 4, "num_hidden_layers": 3, "moe_intermediate_size": 16, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8},
    **{"qk_rope_head_dim": 4, "v_head_dim": 12},
}
INDEXED = {
    **{**GLM, "num_hidden_layers": 4, "first_k_dense_replace": 1, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"n_group": 1, "topk_group": 1, "index_topk": 7, "index_n_heads": 24, "index_head_dim": 16},
}
"""Of 24 index heads some are above 0 for all pairs of tokens here: no two scores are equal."""
LFM2 = {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 8}
LFM2_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1}
GEMMA4 = {
    **{"head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "hidden_size_per_layer_input": 0},
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0},
    **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 3},
}
GEMMA4_SMALL = {
    **{**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    **{"attention_k_eq_v": False, "num_hidden_layers": 8, "num_kv_shared_layers": 4},
    **{"layer_types": ["sliding_attention", "full_attention"] * 4, "use_double_wide_mlp": True},
}
GEMMA4_MOE = {
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "final_logit_softcapping": None,
}
NEMOTRON = {
    **{"layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp", "moe"], "head_dim": 16},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "moe_shared_expert_intermediate_size": 24,
}
GRANITE = {
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2},
    "logits_scaling": 0.7,
}
GRANITE_HYBRID = {
    **GRANITE,
    **{"mamba_n_heads": 8, "mamba_d_state": 8, "shared_intermediate_size": 24, "num_local_experts": 4},
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
}
MINIMAX = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 3, "rotary_dim": 8}
CASES = {
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7}),
    "gemma3, odd": (
        "gemma3_text",
        {
            **{"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 24, "tie_word_embeddings": False},
            **{"layer_types": ["full_attention", "sliding_attention"] * 2, "hidden_activation": "gelu"},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4, odd": (
        "gemma4_text",
        {
            **{
                **GEMMA4,
                "attention_k_eq_v": False,
                "head_dim": 12,
                "global_head_dim": 20,
                "sliding_window": 5,
            },
            **{"attention_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 5},
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "proportional", "partial_rotary_factor": 0.7, "factor": 2.0},
                    "rope_theta": 1e4,
                },
                "sliding_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e3},
            },
        },
    ),
    "gemma4 small": ("gemma4_text", GEMMA4_SMALL),
    "gemma4 small, odd": (
        "gemma4_text",
        {
            **{**GEMMA4_SMALL, "hidden_size_per_layer_input": 5, "num_kv_shared_layers": 3, "head_dim": 12},
            **{"num_hidden_layers": 7, "attention_bias": True, "tie_word_embeddings": False},
            **{"use_double_wide_mlp": False, "final_logit_softcapping": None, "sliding_window": 5},
            **{"attention_k_eq_v": True, "rms_norm_eps": 1e-3, "hidden_activation": "gelu"},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
            + ["sliding_attention"] * 2
            + ["full_attention"],
        },
    ),
    "gemma4 small, no windows": (
        "gemma4_text",
        {
            **{**GEMMA4_SMALL, "layer_types": ["full_attention"] * 5, "num_hidden_layers": 5},
            **{"num_kv_shared_layers": 2},
        },
    ),
    "gemma4 small, inputs alone": (
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    ),
    "gemma4 small, moe": (
        "gemma4_text",
        {
            **{**GEMMA4_SMALL, **GEMMA4_MOE, "attention_k_eq_v": True, "num_hidden_layers": 4},
            **{"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
        },
    ),
    "gemma4 moe": ("gemma4_text", {**GEMMA4, **GEMMA4_MOE}),
    "gemma4 moe, odd": (
        "gemma4_text",
        {
            **{**GEMMA4, **GEMMA4_MOE, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 20},
            **{"head_dim": 12, "num_hidden_layers": 5, "rms_norm_eps": 1e-3, "hidden_activation": "gelu"},
            **{"attention_bias": True, "tie_word_embeddings": False, "attention_k_eq_v": False},
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2, odd": (
        "olmo2",
        {
            **{"attention_bias": True, "num_key_value_heads": 1, "num_hidden_layers": 5, "head_dim": 12},
            **{"rope_parameters": YARN, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
        },
    ),
    "olmo3": ("olmo3", {"sliding_window": 8}),
    "olmo3, yarn": (
        "olmo3",
        {
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "seed-oss": ("seed_oss", {"head_dim": 16}),
    "seed-oss, odd": (
        "seed_oss",
        {
            **{"head_dim": 12, "num_key_value_heads": 1, "rope_parameters": YARN, "hidden_act": "gelu"},
            **{"attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "rms_norm_eps": 1e-3,
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 8}),
    "exaone4, odd": (
        "exaone4",
        {
            **{"sliding_window": 5, "num_hidden_layers": 5, "head_dim": 12, "num_key_value_heads": 1},
            **{"rope_parameters": YARN, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
        },
    ),
    "exaone4, no windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True},
    ),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16}),
    "hunyuan, odd": (
        "hunyuan_v1_dense",
        {
            **{"head_dim": 12, "num_key_value_heads": 1, "attention_bias": True, "num_hidden_layers": 5},
            **{"tie_word_embeddings": True, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1e3, "factor": 1.0},
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3, odd": (
        "smollm3",
        {
            **{"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 8},
            **{"attention_bias": True, "mlp_bias": True},
        },
    ),
    "qwen3.5": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True}),
    "qwen3.5, odd": (
        "qwen3_5_text",
        {
            **{**DELTA, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3, "num_hidden_layers": 5},
            **{"linear_value_head_dim": 12, "attention_bias": True},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"]
            + ["full_attention"] * 2,
        },
    ),
    "qwen3.5 moe": ("qwen3_5_moe_text", {**DELTA, **EXPERTS}),
    "qwen3.5 moe, odd": (
        "qwen3_5_moe_text",
        {
            **{**DELTA, **EXPERTS, "linear_num_value_heads": 6, "linear_value_head_dim": 12},
            **{"linear_conv_kernel_dim": 3, "num_hidden_layers": 5, "attention_bias": True},
            **{"num_experts": 5, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 12},
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] + ["linear_attention", "full_attention"] * 2,
        },
    ),
    "qwen3-next": ("qwen3_next", {**DELTA, **EXPERTS}),
    "qwen3-next, odd": (
        "qwen3_next",
        {
            **{**DELTA, **EXPERTS, "linear_num_value_heads": 6, "linear_value_head_dim": 12},
            **{"linear_conv_kernel_dim": 3, "num_hidden_layers": 5, "num_experts_per_tok": 1},
            **{"attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False},
            "layer_types": ["full_attention"] + ["linear_attention", "full_attention"] * 2,
        },
    ),
    "lfm2": ("lfm2", LFM2),
    "lfm2, odd": (
        "lfm2",
        {
            **{"conv_L_cache": 4, "conv_bias": True, "block_auto_adjust_ff_dim": False, "head_dim": 12},
            **{"layer_types": ["full_attention", "conv", "conv", "full_attention", "conv"]},
            **{"num_hidden_layers": 5, "tie_word_embeddings": False, "rope_parameters": YARN},
        },
    ),
    "lfm2 moe": ("lfm2_moe", {**LFM2, **LFM2_MOE}),
    "lfm2 moe, odd": (
        "lfm2_moe",
        {
            **{**LFM2_MOE, "num_experts": 5, "num_experts_per_tok": 3, "num_dense_layers": 2},
            **{"layer_types": ["conv", "full_attention"] * 3, "num_hidden_layers": 6, "norm_eps": 1e-3},
            **{"norm_topk_prob": False, "routed_scaling_factor": 1.7, "use_expert_bias": False},
        },
    ),
    "olmo-hybrid": (
        "olmo_hybrid",
        {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "olmo-hybrid, odd": (
        "olmo_hybrid",
        {
            **{**DELTA, "linear_num_value_heads": 6, "linear_value_head_dim": 12, "linear_key_head_dim": 10},
            **{"linear_conv_kernel_dim": 3, "linear_allow_neg_eigval": False, "rms_norm_eps": 1e-3},
            **{"attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 5},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "layer_types": ["full_attention"] + ["linear_attention", "full_attention"] * 2,
        },
    ),
    "nemotron": ("nemotron_h", NEMOTRON),
    "nemotron, odd": (
        "nemotron_h",
        {
            **{**NEMOTRON, "layers_block_type": None, "hybrid_override_pattern": "M*-M-", "conv_kernel": 3},
            **{"mamba_num_heads": 6, "n_groups": 3, "ssm_state_size": 5, "use_conv_bias": False},
            **{"mlp_bias": True, "use_bias": True, "num_key_value_heads": 1},
            **{"time_step_min": 1e-5, "layer_norm_epsilon": 1e-3, "mlp_hidden_act": "gelu"},
        },
    ),
    "nemotron, latent": (
        "nemotron_h",
        {
            **{**NEMOTRON, "moe_latent_size": 12, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5},
            **{"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "norm_topk_prob": False},
        },
    ),
    "granite": ("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "granite, odd": (
        "granite",
        {
            **{
                "embedding_multiplier": 7.0,
                "head_dim": 12,
                "num_key_value_heads": 1,
                "rope_parameters": YARN,
            },
            **{"tie_word_embeddings": True, "rms_norm_eps": 1e-3, "hidden_act": "gelu"},
        },
    ),
    "granite-4": ("granitemoehybrid", GRANITE_HYBRID),
    "granite-4, dense": (
        "granitemoehybrid",
        {
            **{**GRANITE_HYBRID, "num_local_experts": 0, "mamba_n_groups": 3, "mamba_d_conv": 3},
            **{"mamba_n_heads": 6, "mamba_expand": 3, "mamba_conv_bias": False, "mamba_proj_bias": True},
            **{"mamba_d_state": 5, "attention_bias": True, "tie_word_embeddings": True},
            **{"position_embedding_type": "rope", "rope_parameters": YARN, "num_key_value_heads": 1},
            **{"layer_types": ["attention", "mamba", "mamba", "attention", "mamba"], "num_hidden_layers": 5},
        },
    ),
    "granite-4, attention": (
        "granitemoehybrid",
        {
            **{**GRANITE_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 3},
            **{"layer_types": ["attention"] * 4, "position_embedding_type": "rope", "head_dim": 12},
        },
    ),
    "glm-4.7": ("glm4_moe_lite", GLM),
    "glm-4.7, odd": (
        "glm4_moe_lite",
        {
            **{**GLM, "q_lora_rank": None, "qk_rope_head_dim": 6, "v_head_dim": 14, "rope_interleave": False},
            **{"n_shared_experts": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
            **{"attention_bias": True, "mlp_layer_types": ["dense", "dense", "sparse"]},
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek-v3.2": ("deepseek_v32", INDEXED),
    "deepseek-v3.2, odd": (
        "deepseek_v32",
        {
            **{**INDEXED, "qk_rope_head_dim": 6, "v_head_dim": 11, "index_head_dim": 10, "index_topk": 3},
            **{"n_shared_experts": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
            **{"attention_bias": True, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
            **{"rms_norm_eps": 1e-3, "tie_word_embeddings": True, "routed_scaling_factor": 1.7},
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek-v3.2, short": ("deepseek_v32", {**INDEXED, "index_topk": 64, "index_n_heads": 2}),
    "glm-5": ("glm_moe_dsa", INDEXED),
    "glm-5, shared": (
        "glm_moe_dsa",
        {
            **{**INDEXED, "indexer_types": ["full", "shared", "shared", "full", "shared"], "index_topk": 5},
            **{"num_hidden_layers": 5, "n_group": 2, "topk_group": 1, "attention_bias": True},
        },
    ),
    "glm-5, odd": (
        "glm_moe_dsa",
        {
            **{**INDEXED, "index_topk_freq": 2, "index_skip_topk_offset": 1, "num_hidden_layers": 6},
            **{"qk_rope_head_dim": 6, "v_head_dim": 11, "index_head_dim": 6, "index_n_heads": 31},
            **{"first_k_dense_replace": 2, "norm_topk_prob": False, "rms_norm_eps": 1e-3},
            "rope_parameters": YARN,
        },
    ),
    "mistral4": (
        "mistral4",
        {
            **{**GLM, "first_k_dense_replace": 1},
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
    "mistral4, odd": (
        "mistral4",
        {
            **{**GLM, "q_lora_rank": None, "qk_rope_head_dim": 6, "v_head_dim": 14, "rope_interleave": False},
            **{"n_shared_experts": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
            **{"attention_bias": True, "routed_scaling_factor": 1.7, "max_position_embeddings": 64},
        },
    ),
    "minimax-m2": ("minimax_m2", MINIMAX),
    "minimax-m2, odd": (
        "minimax_m2",
        {
            **{**MINIMAX, "head_dim": 12, "rotary_dim": 6, "num_local_experts": 5, "num_experts_per_tok": 3},
            **{"num_key_value_heads": 1, "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
            "rope_parameters": YARN,
        },
    ),
    "phi-4": ("phi3", {"num_key_value_heads": 2}),
    "phi-4, odd": (
        "phi3",
        {
            **{"sliding_window": 9, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
            **{"num_key_value_heads": 1, "intermediate_size": 40},
        },
    ),
    "phi-4-mini": (
        "phi3",
        {
            **{"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "max_position_embeddings": 256},
            **{"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
        },
    ),
    "phi-4-mini, long": (
        "phi3",
        {
            **{"partial_rotary_factor": 0.75, "max_position_embeddings": 128, "sliding_window": 9},
            **{"original_max_position_embeddings": 8, "rope_parameters": LONGROPE},
        },
    ),
    "ministral3": ("ministral3", {"head_dim": 16, "max_position_embeddings": 64}),
    "ministral3, grown queries": (
        "ministral3",
        {
            **{"head_dim": 8, "sliding_window": 9, "max_position_embeddings": 64},
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
}
