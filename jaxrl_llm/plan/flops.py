"""FLOPs of the model's matrix products, counted analytically."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.transformer import window_sizes


def layer_weights(c: TransformerConfig) -> int:
    """Return the number of weights in the matrix products of all layers that a token passes."""
    attention = c.head_dim * c.hidden_size * 2 * (c.num_heads + c.num_kv_heads)
    width, router = c.mlp_size, 0
    if c.moe:
        width, router = c.moe.experts_per_token * c.moe.expert_size + c.moe.shared_size, c.moe.num_experts
    return c.num_layers * (attention + c.hidden_size * (3 * width + router))


def head_flops(c: TransformerConfig, tokens: float) -> float:
    """Return the FLOPs from hidden states to logits."""
    return 2.0 * tokens * c.hidden_size * c.vocab_size


def attention_flops(c: TransformerConfig, tokens: float, context: float) -> float:
    """Return the FLOPs of scores and weighted values.

    Args:
        context: keys of each query; a layer's window may be less.
    """
    keys = sum(min(context, window) for window in window_sizes(c))
    return 4.0 * tokens * c.num_heads * c.head_dim * keys


def forward_flops(c: TransformerConfig, tokens: float, context: float) -> float:
    """Return the FLOPs of the layers, without the head."""
    return 2.0 * tokens * layer_weights(c) + attention_flops(c, tokens, context)


RECOMPUTED: dict[str, Callable[[TransformerConfig, float, float], float]] = {
    "none": lambda c, tokens, context: 0.0,
    "dots": lambda c, tokens, context: 0.0,
    "attention": lambda c, tokens, context: 2.0 * tokens * layer_weights(c),
    "full": forward_flops,
    "offload": forward_flops,
}
"""`--model.remat` -> FLOPs of matrix products that the backward pass recomputes: none for "dots", which
recomputes elementwise operations only; all but attention for "attention"."""


def update_flops(c: TransformerConfig, tokens: float, context: float, remat: str, with_logits: bool) -> float:
    """Return the FLOPs of forward, backward (twice the forward) and recomputation.

    Args:
        remat: key of RECOMPUTED.
        with_logits: True where the loss needs log-probs, whose logits are recomputed too.
    """
    layers = 3 * forward_flops(c, tokens, context) + RECOMPUTED[remat](c, tokens, context)
    return layers + 4 * head_flops(c, tokens) * with_logits
