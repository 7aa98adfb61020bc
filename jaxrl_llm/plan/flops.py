"""Floating-point operations of the model's matrix products, counted on paper."""

from __future__ import annotations

from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.transformer import window_sizes


def layer_weights(c: TransformerConfig) -> int:
    """Weights of all layers that a token is multiplied with."""
    attention = c.head_dim * c.hidden_size * 2 * (c.num_heads + c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.mlp_size)


def head(c: TransformerConfig, tokens: float) -> float:
    """Hidden states to logits."""
    return 2.0 * tokens * c.hidden_size * c.vocab_size


def attention(c: TransformerConfig, tokens: float, context: float) -> float:
    """Scores and weighted values, each token looking at `context` tokens or its layer's window of them."""
    seen = sum(min(context, window) for window in window_sizes(c))
    return 4.0 * tokens * c.num_heads * c.head_dim * seen


def forward(c: TransformerConfig, tokens: float, context: float) -> float:
    """The layers, without the head."""
    return 2.0 * tokens * layer_weights(c) + attention(c, tokens, context)


def update(c: TransformerConfig, tokens: float, context: float, remat: str, speaks: bool) -> float:
    """Forward, backward (twice a forward), and what the backward pass computes again.

    Args:
        remat: "full" computes the layers again, "dots" their attention.
        speaks: that log-probs are needed, whose logits are made again.
    """
    again = {"none": 0.0, "dots": attention(c, tokens, context), "full": forward(c, tokens, context)}[remat]
    return 3 * forward(c, tokens, context) + again + 4 * head(c, tokens) * speaks
