"""Names of the weights of families that differ from `names.TABLE`."""

from __future__ import annotations

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
