"""Names and layouts of weights in Hugging Face folders: one table, and the families that differ from it."""

from __future__ import annotations

from jaxrl_llm.hf.expert_config import GROUPED, SHARED

MAMBA_ROWS = {
    "layers.mamba_in": ("backbone.layers.{}.mixer.in_proj.weight", "d c -> c d"),
    "layers.mamba_in_bias": ("backbone.layers.{}.mixer.in_proj.bias", "c -> c"),
    "layers.mamba_kernel": ("backbone.layers.{}.mixer.conv1d.weight", "c n w -> c n w"),
    "layers.mamba_kernel_bias": ("backbone.layers.{}.mixer.conv1d.bias", "c -> c"),
    "layers.mamba_a_log": ("backbone.layers.{}.mixer.A_log", "h -> h"),
    "layers.mamba_dt_bias": ("backbone.layers.{}.mixer.dt_bias", "h -> h"),
    "layers.mamba_skip": ("backbone.layers.{}.mixer.D", "h -> h"),
    "layers.mamba_norm": ("backbone.layers.{}.mixer.norm.weight", "c -> c"),
    "layers.mamba_out": ("backbone.layers.{}.mixer.out_proj.weight", "c d -> d c"),
    "layers.mamba_out_bias": ("backbone.layers.{}.mixer.out_proj.bias", "d -> d"),
}
"""Rows of `TABLE`."""
GRANITE_HYBRID = {
    **{
        row: name.replace("backbone", "model").replace("mixer", "mamba")
        for row, (name, _) in MAMBA_ROWS.items()
    },
    "layers.down": "model.layers.{}.shared_mlp.output_linear.weight",
    "layers.router": "model.layers.{}.block_sparse_moe.router.layer.weight",
    "layers.expert_down": "model.layers.{}.block_sparse_moe.output_linear.weight",
}
BLOCK_SPARSE = {
    "layers.router": "model.layers.{}.block_sparse_moe.gate.weight",
    "layers.router_bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias",
    "layers.expert_gate": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
    "layers.expert_up": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
    "layers.expert_down": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
}
LFM2 = {
    "norm": "model.embedding_norm.weight",
    "layers.attention_norm": "model.layers.{}.operator_norm.weight",
    "layers.mlp_norm": "model.layers.{}.ffn_norm.weight",
    "layers.o": "model.layers.{}.self_attn.out_proj.weight",
    "layers.q_norm": "model.layers.{}.self_attn.q_layernorm.weight",
    "layers.k_norm": "model.layers.{}.self_attn.k_layernorm.weight",
    "layers.gate": "model.layers.{}.feed_forward.w1.weight",
    "layers.up": "model.layers.{}.feed_forward.w3.weight",
    "layers.down": "model.layers.{}.feed_forward.w2.weight",
    "layers.router": "model.layers.{}.feed_forward.gate.weight",
    "layers.router_bias": "model.layers.{}.feed_forward.expert_bias",
    "layers.expert_gate": "model.layers.{}.feed_forward.experts.{}.w1.weight",
    "layers.expert_up": "model.layers.{}.feed_forward.experts.{}.w3.weight",
    "layers.expert_down": "model.layers.{}.feed_forward.experts.{}.w2.weight",
}
QWEN1 = {
    "embed": "transformer.wte.weight",
    "norm": "transformer.ln_f.weight",
    "layers.attention_norm": "transformer.h.{}.ln_1.weight",
    "layers.mlp_norm": "transformer.h.{}.ln_2.weight",
    "layers.o": "transformer.h.{}.attn.c_proj.weight",
    "layers.up": "transformer.h.{}.mlp.w1.weight",
    "layers.gate": "transformer.h.{}.mlp.w2.weight",
    "layers.down": "transformer.h.{}.mlp.c_proj.weight",
}
QWEN1_JOINED = {
    "transformer.h.{}.attn.c_attn.weight": ("layers.q", "layers.k", "layers.v"),
    "transformer.h.{}.attn.c_attn.bias": ("layers.q_bias", "layers.k_bias", "layers.v_bias"),
}
MIXER = "backbone.layers.{}.mixer"
NEMOTRON = {
    "embed": "backbone.embeddings.weight",
    "norm": "backbone.norm_f.weight",
    "layers.attention_norm": "backbone.layers.{}.norm.weight",
    "layers.mlp_norm": "backbone.layers.{}.norm.weight",
    **{f"layers.{x}": f"{MIXER}.{x}_proj.weight" for x in "qkvo"},
    **{f"layers.{x}_bias": f"{MIXER}.{x}_proj.bias" for x in "qkvo"},
    **{f"layers.{x}": f"{MIXER}.shared_experts.{x}_proj.weight" for x in ("up", "down")},
    **{f"mlp_layers.{x}": f"{MIXER}.{x}_proj.weight" for x in ("up", "down")},
    **{f"layers.{x}_bias": f"{MIXER}.{x}_proj.bias" for x in ("up", "down")},
    **{f"layers.expert_{x}": f"{MIXER}.experts.{{}}.{x}_proj.weight" for x in ("up", "down")},
    "layers.router": f"{MIXER}.gate.weight",
    "layers.router_bias": f"{MIXER}.gate.e_score_correction_bias",
}
SHARED_EXPERTS = {
    f"layers.{ours}": f"model.layers.{{}}.mlp.shared_experts.{ours}_proj.weight"
    for ours in ("gate", "up", "down")
}
SHARED_EXPERT = {row: name.replace("shared_experts", "shared_expert") for row, name in SHARED_EXPERTS.items()}
OLMO_HYBRID = {
    "layers.attention_norm": "model.layers.{}.attention_layer_norm.weight",
    "layers.mlp_norm": "model.layers.{}.feedforward_layer_norm.weight",
    "layers.delta_z": "model.layers.{}.linear_attn.g_proj.weight",
    "layers.delta_b": "model.layers.{}.linear_attn.b_proj.weight",
    "layers.delta_a": "model.layers.{}.linear_attn.a_proj.weight",
    "layers.delta_norm": "model.layers.{}.linear_attn.o_norm.weight",
    "layers.delta_o": "model.layers.{}.linear_attn.o_proj.weight",
}
FOUR_NORMS = {"layers.mlp_norm": "model.layers.{}.pre_feedforward_layernorm.weight"}
GEMMA4 = {
    **FOUR_NORMS,
    "layers.router": "model.layers.{}.router.proj.weight",
    "layers.expert_down": "model.layers.{}.experts.down_proj",
}
_EXPERTS = "model.layers.{}.block_sparse_moe"
MODULES = {
    f"{_EXPERTS}.input_linear.weight": f"{_EXPERTS}.experts.gate_up_proj",
    f"{_EXPERTS}.output_linear.weight": f"{_EXPERTS}.experts.down_proj",
}
"""Names of tensors of Granite 4 -> names in models of transformers 5, which adapters have."""
STACKED_ROWS = {
    "layers.expert_gate": "x d f -> x f d",
    "layers.expert_up": "x d f -> x f d",
    "layers.expert_down": "x f d -> x d f",
}
"""Layouts of tensors that hold all experts of a layer, each as rows of outputs."""
TABLE: dict[str, tuple[str, str]] = {
    # ours, without L and X  HF name ({} = layer, {} = expert)                  layout, ours -> HF
    "embed": ("model.embed_tokens.weight", "v d -> v d"),
    "norm": ("model.norm.weight", "d -> d"),
    "lm_head": ("lm_head.weight", "v d -> v d"),
    "value": ("score.weight", "n d -> n d"),
    "per_layer_embed": ("model.embed_tokens_per_layer.weight", "v c -> v c"),
    "per_layer_proj": ("model.per_layer_model_projection.weight", "d l p -> (l p) d"),
    "per_layer_norm": ("model.per_layer_projection_norm.weight", "p -> p"),
    "layers.attention_norm": ("model.layers.{}.input_layernorm.weight", "d -> d"),
    "layers.q": ("model.layers.{}.self_attn.q_proj.weight", "d h e -> (h e) d"),
    "layers.k": ("model.layers.{}.self_attn.k_proj.weight", "d k e -> (k e) d"),
    "layers.v": ("model.layers.{}.self_attn.v_proj.weight", "d k e -> (k e) d"),
    "layers.o": ("model.layers.{}.self_attn.o_proj.weight", "h e d -> d (h e)"),
    "layers.q_bias": ("model.layers.{}.self_attn.q_proj.bias", "h e -> (h e)"),
    "layers.k_bias": ("model.layers.{}.self_attn.k_proj.bias", "k e -> (k e)"),
    "layers.v_bias": ("model.layers.{}.self_attn.v_proj.bias", "k e -> (k e)"),
    "layers.o_bias": ("model.layers.{}.self_attn.o_proj.bias", "d -> d"),
    "layers.q_norm": ("model.layers.{}.self_attn.q_norm.weight", "e -> e"),
    "layers.k_norm": ("model.layers.{}.self_attn.k_norm.weight", "e -> e"),
    "layers.sinks": ("model.layers.{}.self_attn.sinks", "h -> h"),
    "layers.q_a": ("model.layers.{}.self_attn.q_a_proj.weight", "d c -> c d"),
    "layers.q_a_bias": ("model.layers.{}.self_attn.q_a_proj.bias", "c -> c"),
    "layers.q_a_norm": ("model.layers.{}.self_attn.q_a_layernorm.weight", "c -> c"),
    "layers.q_b": ("model.layers.{}.self_attn.q_b_proj.weight", "c h e -> (h e) c"),
    "layers.kv_a": ("model.layers.{}.self_attn.kv_a_proj_with_mqa.weight", "d c -> c d"),
    "layers.kv_a_bias": ("model.layers.{}.self_attn.kv_a_proj_with_mqa.bias", "c -> c"),
    "layers.kv_a_norm": ("model.layers.{}.self_attn.kv_a_layernorm.weight", "c -> c"),
    "layers.kv_b": ("model.layers.{}.self_attn.kv_b_proj.weight", "c h e -> (h e) c"),
    "layers.index_q": ("model.layers.{}.self_attn.indexer.wq_b.weight", "c i e -> (i e) c"),
    "layers.index_k": ("model.layers.{}.self_attn.indexer.wk.weight", "d e -> e d"),
    "layers.index_k_norm": ("model.layers.{}.self_attn.indexer.k_norm.weight", "e -> e"),
    "layers.index_k_norm_bias": ("model.layers.{}.self_attn.indexer.k_norm.bias", "e -> e"),
    "layers.index_weights": ("model.layers.{}.self_attn.indexer.weights_proj.weight", "d i -> i d"),
    "layers.delta_qkv": ("model.layers.{}.linear_attn.in_proj_qkv.weight", "d c -> c d"),
    "layers.delta_z": ("model.layers.{}.linear_attn.in_proj_z.weight", "d h e -> (h e) d"),
    "layers.delta_b": ("model.layers.{}.linear_attn.in_proj_b.weight", "d h -> h d"),
    "layers.delta_a": ("model.layers.{}.linear_attn.in_proj_a.weight", "d h -> h d"),
    "layers.delta_qkvz": ("model.layers.{}.linear_attn.in_proj_qkvz.weight", "d k e -> (k e) d"),
    "layers.delta_ba": ("model.layers.{}.linear_attn.in_proj_ba.weight", "d k e -> (k e) d"),
    "layers.delta_q": ("model.layers.{}.linear_attn.q_proj.weight", "d k e -> (k e) d"),
    "layers.delta_k": ("model.layers.{}.linear_attn.k_proj.weight", "d k e -> (k e) d"),
    "layers.delta_v": ("model.layers.{}.linear_attn.v_proj.weight", "d h e -> (h e) d"),
    "layers.delta_conv_q": ("model.layers.{}.linear_attn.q_conv1d.weight", "c n w -> c n w"),
    "layers.delta_conv_k": ("model.layers.{}.linear_attn.k_conv1d.weight", "c n w -> c n w"),
    "layers.delta_conv_v": ("model.layers.{}.linear_attn.v_conv1d.weight", "c n w -> c n w"),
    "layers.delta_conv": ("model.layers.{}.linear_attn.conv1d.weight", "c n w -> c n w"),
    "layers.delta_a_log": ("model.layers.{}.linear_attn.A_log", "h -> h"),
    "layers.delta_dt_bias": ("model.layers.{}.linear_attn.dt_bias", "h -> h"),
    "layers.delta_norm": ("model.layers.{}.linear_attn.norm.weight", "e -> e"),
    "layers.delta_o": ("model.layers.{}.linear_attn.out_proj.weight", "h e d -> d (h e)"),
    "layers.conv_in": ("model.layers.{}.conv.in_proj.weight", "d c -> c d"),
    "layers.conv_in_bias": ("model.layers.{}.conv.in_proj.bias", "c -> c"),
    "layers.conv_kernel": ("model.layers.{}.conv.conv.weight", "c n w -> c n w"),
    "layers.conv_kernel_bias": ("model.layers.{}.conv.conv.bias", "c -> c"),
    "layers.conv_out": ("model.layers.{}.conv.out_proj.weight", "c d -> d c"),
    "layers.conv_out_bias": ("model.layers.{}.conv.out_proj.bias", "d -> d"),
    **MAMBA_ROWS,
    "layers.mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "layers.attention_out_norm": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "layers.mlp_out_norm": ("model.layers.{}.post_feedforward_layernorm.weight", "d -> d"),
    "layers.input_gate": ("model.layers.{}.per_layer_input_gate.weight", "d p -> p d"),
    "layers.input_proj": ("model.layers.{}.per_layer_projection.weight", "p d -> d p"),
    "layers.input_out_norm": ("model.layers.{}.post_per_layer_input_norm.weight", "d -> d"),
    "layers.layer_scalar": ("model.layers.{}.layer_scalar", "n -> n"),
    "layers.gate": ("model.layers.{}.mlp.gate_proj.weight", "d f -> f d"),
    "layers.up": ("model.layers.{}.mlp.up_proj.weight", "d f -> f d"),
    "layers.down": ("model.layers.{}.mlp.down_proj.weight", "f d -> d f"),
    "layers.gate_bias": ("model.layers.{}.mlp.gate_proj.bias", "f -> f"),
    "layers.up_bias": ("model.layers.{}.mlp.up_proj.bias", "f -> f"),
    "layers.down_bias": ("model.layers.{}.mlp.down_proj.bias", "d -> d"),
    "layers.router": ("model.layers.{}.mlp.gate.weight", "d x -> x d"),
    "layers.router_bias": ("model.layers.{}.mlp.gate.e_score_correction_bias", "x -> x"),
    "layers.router_norm": ("model.layers.{}.router.scale", "d -> d"),
    "layers.router_gain": ("model.layers.{}.router.per_expert_scale", "x -> x"),
    "layers.experts_norm": ("model.layers.{}.pre_feedforward_layernorm_2.weight", "d -> d"),
    "layers.experts_out_norm": ("model.layers.{}.post_feedforward_layernorm_2.weight", "d -> d"),
    "layers.shared_out_norm": ("model.layers.{}.post_feedforward_layernorm_1.weight", "d -> d"),
    "layers.expert_gate": ("model.layers.{}.mlp.experts.{}.gate_proj.weight", "d f -> f d"),
    "layers.expert_up": ("model.layers.{}.mlp.experts.{}.up_proj.weight", "d f -> f d"),
    "layers.expert_down": ("model.layers.{}.mlp.experts.{}.down_proj.weight", "f d -> d f"),
    "layers.latent_in": (f"{MIXER}.fc1_latent_proj.weight", "d c -> c d"),
    "layers.latent_out": (f"{MIXER}.fc2_latent_proj.weight", "c d -> d c"),
    "layers.router_logit_bias": ("model.layers.{}.mlp.router.bias", "x -> x"),
    "layers.expert_gate_bias": ("model.layers.{}.mlp.experts.gate_up_proj_bias", "x f -> x f"),
    "layers.expert_up_bias": ("model.layers.{}.mlp.experts.gate_up_proj_bias", "x f -> x f"),
    "layers.expert_down_bias": ("model.layers.{}.mlp.experts.down_proj_bias", "x d -> x d"),
    "layers.shared_gate": ("model.layers.{}.mlp.shared_expert_gate.weight", "d n -> n d"),
}
FAMILY_NAMES: dict[str, dict[str, str]] = {
    "nemotron_h": NEMOTRON,
    "granitemoehybrid": GRANITE_HYBRID,
    "qwen": QWEN1,
    **dict.fromkeys(("lfm2", "lfm2_moe"), LFM2),
    "hunyuan_v1_dense": {
        "layers.q_norm": "model.layers.{}.self_attn.query_layernorm.weight",
        "layers.k_norm": "model.layers.{}.self_attn.key_layernorm.weight",
    },
    "gemma3_text": FOUR_NORMS,
    "gemma4_text": GEMMA4,
    "gpt_oss": {
        "layers.router": "model.layers.{}.mlp.router.weight",
        "layers.expert_down": "model.layers.{}.mlp.experts.down_proj",
    },
    "olmo_hybrid": OLMO_HYBRID,
    **dict.fromkeys(("mixtral", "minimax_m2"), BLOCK_SPARSE),
    **dict.fromkeys(GROUPED, SHARED_EXPERTS),
    "mistral4": {**SHARED_EXPERTS, "layers.expert_down": "model.layers.{}.mlp.experts.down_proj"},
    **dict.fromkeys(SHARED, SHARED_EXPERT),
}
"""HF names of families that differ from TABLE, of all stacks ("layers.up") or of one ("mlp_layers.up")."""
OTHER_NAMES: dict[str, dict[str, str]] = {
    "olmo_hybrid": {
        "layers.attention_norm": "model.layers.{}.input_layernorm.weight",
        "layers.mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
        "layers.attention_out_norm": "model.layers.{}.feedforward_layer_norm.weight",
    }
}
"""HF names that folders saved by transformers have, too: it renames in layers of both kinds."""
FAMILY_LAYOUTS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("gemma4_text", "mistral4", "granitemoehybrid"), STACKED_ROWS),
    "gpt_oss": {
        "layers.expert_gate": "x d f -> x d f",
        "layers.expert_up": "x d f -> x d f",
        "layers.expert_down": "x f d -> x f d",
    },
}
"""Layouts of families that differ from TABLE: a layout with x is for all experts of a layer."""
FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "baichuan": {"model.layers.{}.self_attn.W_pack.weight": ("layers.q", "layers.k", "layers.v")},
    "mistral4": {"model.layers.{}.mlp.experts.gate_up_proj": ("layers.expert_gate", "layers.expert_up")},
    "gemma4_text": {"model.layers.{}.experts.gate_up_proj": ("layers.expert_gate", "layers.expert_up")},
    "qwen": QWEN1_JOINED,
    "phi3": {
        "model.layers.{}.self_attn.qkv_proj.weight": ("layers.q", "layers.k", "layers.v"),
        "model.layers.{}.mlp.gate_up_proj.weight": ("layers.gate", "layers.up"),
    },
    "granitemoehybrid": {
        "model.layers.{}.shared_mlp.input_linear.weight": ("layers.gate", "layers.up"),
        "model.layers.{}.block_sparse_moe.input_linear.weight": ("layers.expert_gate", "layers.expert_up"),
    },
}
"""HF matrices that concatenate the rows of several of our weights: of all experts of a layer, in each one."""
INTERLEAVED: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt_oss": {
        "model.layers.{}.mlp.experts.gate_up_proj": ("layers.expert_gate", "layers.expert_up"),
        "model.layers.{}.mlp.experts.gate_up_proj_bias": ("layers.expert_gate_bias", "layers.expert_up_bias"),
    }
}
"""HF tensors that interleave several of our weights along the last dim."""

PARAMETERS = " parameters"
"""Ends the name of a family whose adapters treat the experts of a layer as one parameter, although its files
hold them one by one (`names.as_parameters`)."""
_BY_EXPERT = (  # families whose files hold experts one by one
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe", "mixtral", "minimax_m2"),
    *("nemotron_h", "lfm2_moe", *GROUPED),
)
for _family in set(_BY_EXPERT) - set(FAMILY_LAYOUTS):
    _names = FAMILY_NAMES.get(_family, {})
    _block = _names.get("layers.expert_down", TABLE["layers.expert_down"][0]).rpartition(".{}.")[0]
    # In Mixtral and MiniMax-M2 the block has another name in files.
    _block = _block.replace(".block_sparse_moe.", ".mlp.")
    _own = {f"layers.expert_{ours}": f"{_block}.{ours}_proj" for ours in ("up", "down")}
    FAMILY_NAMES[_family + PARAMETERS] = _names | _own
    FAMILY_LAYOUTS[_family + PARAMETERS] = STACKED_ROWS
    if _family != "nemotron_h":  # its experts have no gate
        FUSED[_family + PARAMETERS] = {f"{_block}.gate_up_proj": ("layers.expert_gate", "layers.expert_up")}
