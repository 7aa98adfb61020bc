"""Names of the weights of families that differ from `names.TABLE`."""

from __future__ import annotations

INDEX_ROWS: dict[str, tuple[str, str]] = {
    "layers.index_q": ("model.layers.{}.self_attn.indexer.wq_b.weight", "c i e -> (i e) c"),
    "layers.index_k": ("model.layers.{}.self_attn.indexer.wk.weight", "d e -> e d"),
    "layers.index_k_norm": ("model.layers.{}.self_attn.indexer.k_norm.weight", "e -> e"),
    "layers.index_k_norm_bias": ("model.layers.{}.self_attn.indexer.k_norm.bias", "e -> e"),
    "layers.index_weights": ("model.layers.{}.self_attn.indexer.weights_proj.weight", "d i -> i d"),
}
DELTA_ROWS = {
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
}
INPUT_ROWS = {
    "layers.input_gate": ("model.layers.{}.per_layer_input_gate.weight", "d p -> p d"),
    "layers.input_proj": ("model.layers.{}.per_layer_projection.weight", "p d -> d p"),
    "layers.input_out_norm": ("model.layers.{}.post_per_layer_input_norm.weight", "d -> d"),
}
CONV_ROWS = {
    "layers.conv_in": ("model.layers.{}.conv.in_proj.weight", "d c -> c d"),
    "layers.conv_in_bias": ("model.layers.{}.conv.in_proj.bias", "c -> c"),
    "layers.conv_kernel": ("model.layers.{}.conv.conv.weight", "c n w -> c n w"),
    "layers.conv_kernel_bias": ("model.layers.{}.conv.conv.bias", "c -> c"),
    "layers.conv_out": ("model.layers.{}.conv.out_proj.weight", "c d -> d c"),
    "layers.conv_out_bias": ("model.layers.{}.conv.out_proj.bias", "d -> d"),
}
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
"""Rows of `names.TABLE`."""
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
