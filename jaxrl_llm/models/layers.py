"""The weights of decoder layers: matrices, norms and biases, with their logical axes, adapters and codes."""

from __future__ import annotations

import math

import jax
from flax import nnx

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.linear import Initializer, matrix_dims
from jaxrl_llm.models.lora_config import MLP, linear_layers
from jaxrl_llm.models.mixer_config import ATTENTION
from jaxrl_llm.models.mla import add_latent_weights
from jaxrl_llm.models.quantize import SCALE, quantize_weight
from jaxrl_llm.models.recurrent import RECURRENT


class Layers(nnx.Module):
    """Equal decoder layers, each weight stacked along a leading dim L, for a scan.

    Args:
        config: of this stack (`layer_stacks`).
        depth: layers of the whole model.
    """

    def __init__(self, config: TransformerConfig, key: jax.Array, depth: int):
        c, init = config, Initializer(key, config, depth)
        d = c.hidden_size
        # Attention, or the layer's other way to mix tokens.
        if c.mixes:
            self._add_norms("attention", init)
        if c.kind in RECURRENT:
            RECURRENT[c.kind].add_weights(self, c, init)
        elif c.kind == ATTENTION and c.mla:
            add_latent_weights(self, c, init)
        elif c.kind == ATTENTION:
            self._add_attention(c, init)
        if c.out_bias and c.kind == ATTENTION:
            self.o_bias = init.zeros((d,), ("norm",))
        if c.attention_sinks and c.kind == ATTENTION:
            self.sinks = init.zeros((c.num_heads,), ("heads",))
        # Feed-forward, dense or experts.
        if c.has_mlp:
            self._add_norms("mlp", init)
            self._add_mlp(c, init)
        if c.moe:
            self._add_experts(c, init)
        if c.per_layer_inputs:
            self.input_gate = init.normal((d, c.per_layer_inputs), ("embed", "mlp"))
            self.input_proj = init.normal((c.per_layer_inputs, d), ("mlp", "embed"), residual=True)
            self.input_out_norm = init.norm(d)
        if c.layer_scalar:
            self.layer_scalar = init.ones((1,), ("norm",))
        # Adapters and codes come last, beside the weights that they belong to.
        if c.quantize != "none":
            for name in (*linear_layers(c), *(f"expert_{name}" for name in MLP)):
                if hasattr(self, name):
                    self._quantize(name, c.quantize)
        if c.lora:
            for name, (rank, _) in c.adapters.items():
                if hasattr(self, name):
                    self._add_adapter(name, rank, init)

    def _add_norms(self, name: str, init: Initializer) -> None:
        """Add the norms before and after attention or feed-forward."""
        if init.config.norms != "after":
            setattr(self, f"{name}_norm", init.norm(init.config.hidden_size))
        if init.config.norms != "before":
            setattr(self, f"{name}_out_norm", init.norm(init.config.hidden_size))

    def _add_attention(self, c: TransformerConfig, init: Initializer) -> None:
        d, e = c.hidden_size, c.head_dim
        gated = 2 * e if c.attention_gate else e  # dims of the query, then dims of the gate
        self.q = init.normal((d, c.num_heads, gated), ("embed", "heads", "head_dim"))
        keys = "kv"[: c.has_kv * (2 - c.keys_as_values)]
        for name in keys:
            setattr(self, name, init.normal((d, c.num_kv_heads, e), ("embed", "kv_heads", "head_dim")))
        self.o = init.normal((c.num_heads, e, d), ("heads", "head_dim", "embed"), residual=True)
        if c.qkv_bias:
            self.q_bias = init.zeros((c.num_heads, gated), ("heads", "head_dim"))
            for name in keys:
                setattr(self, f"{name}_bias", init.zeros((c.num_kv_heads, e), ("kv_heads", "head_dim")))
        if c.qk_norm:
            q_width, k_width = (c.num_heads * e, c.num_kv_heads * e) if c.qk_norm_over_heads else (e, e)
            self.q_norm = init.norm(q_width, "head_dim")
            if c.has_kv:
                self.k_norm = init.norm(k_width, "head_dim")

    def _add_mlp(self, c: TransformerConfig, init: Initializer) -> None:
        d = c.hidden_size
        if size := c.moe.shared_size if c.moe else c.mlp_size:
            if c.mlp_gate:
                self.gate = init.normal((d, size), ("embed", "mlp"))
            self.up = init.normal((d, size), ("embed", "mlp"))
            self.down = init.normal((size, d), ("mlp", "embed"), residual=True)
        if c.mlp_bias:
            if c.mlp_gate:
                self.gate_bias = init.zeros((c.mlp_size,), ("mlp",))
            self.up_bias = init.zeros((c.mlp_size,), ("mlp",))
            self.down_bias = init.zeros((d,), ("norm",))

    def _add_experts(self, c: TransformerConfig, init: Initializer) -> None:
        moe, d, width = c.moe, c.hidden_size, c.expert_width
        shape, axes = (moe.num_experts, width, moe.expert_size), ("experts", "expert_embed", "expert_mlp")
        self.router = init.normal((d, moe.num_experts), ("router", "router"))
        if c.mlp_gate:
            self.expert_gate = init.normal(shape, axes)
        self.expert_up = init.normal(shape, axes)
        shape, axes = (moe.num_experts, moe.expert_size, width), ("experts", "expert_mlp", "expert_embed")
        self.expert_down = init.normal(shape, axes, residual=True)
        if moe.latent_size:
            self.latent_in = init.normal((d, width), ("embed", "compressed"))
            self.latent_out = init.normal((width, d), ("compressed", "embed"))
        if moe.bias:
            self.router_logit_bias = init.zeros((moe.num_experts,), ("router",))
            self.expert_gate_bias = init.zeros((moe.num_experts, moe.expert_size), ("experts", "expert_mlp"))
            self.expert_up_bias = init.zeros((moe.num_experts, moe.expert_size), ("experts", "expert_mlp"))
            self.expert_down_bias = init.zeros((moe.num_experts, width), ("experts", "expert_embed"))
        if moe.selection_bias:
            self.router_bias = init.zeros((moe.num_experts,), ("router",))
        if moe.shared_size and moe.shared_gate:
            self.shared_gate = init.normal((d, 1), ("router", "router"))
        if moe.branches:
            for name in ("router_norm", "experts_norm", "experts_out_norm", "shared_out_norm"):
                setattr(self, name, init.norm(d))
            self.router_gain = init.ones((moe.num_experts,), ("router",))

    def _quantize(self, name: str, kind: str) -> None:
        """Replace a weight by its codes, and add their scales."""
        weight = getattr(self, name)
        axes = weight.get_metadata("axes")
        codes, scale = quantize_weight(weight[...], kind, matrix_dims(axes)[0][-1])
        setattr(self, name, nnx.Param(codes, axes=axes))
        setattr(self, name + SCALE, nnx.Param(scale, axes=axes))

    def _add_adapter(self, name: str, rank: int, init: Initializer) -> None:
        """Add A, uniform as in PEFT, and B, zero, for a weight, so that outputs are unchanged at first."""
        weight = getattr(self, name)
        axes, shape = weight.get_metadata("axes")[1:], weight.shape[1:]
        inner = matrix_dims(weight.get_metadata("axes"))[0]
        first, end = inner[0] - 1, inner[-1]  # after the dim of experts, if any
        bound = 1 / math.sqrt(math.prod(shape[first:end]))
        a = init.uniform((*shape[:end], rank), (*axes[:end], "rank"), bound)
        shape, axes = (*shape[:first], rank, *shape[end:]), (*axes[:first], "rank", *axes[end:])
        setattr(self, f"{name}_lora_a", a)
        setattr(self, f"{name}_lora_b", init.zeros(shape, axes))
