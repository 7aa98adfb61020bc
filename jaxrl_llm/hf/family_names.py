"""Names of the weights of families that differ from `names.TABLE`."""

from __future__ import annotations

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
