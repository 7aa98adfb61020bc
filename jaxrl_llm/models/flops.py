"""FLOPs of the model's matrix products, counted analytically."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable

from jaxrl_llm.models.attention import attention_windows
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.lora import MARK
from jaxrl_llm.models.params import abstract, named_leaves
from jaxrl_llm.models.recurrent import RECURRENT
from jaxrl_llm.models.stacks import layer_stacks

Number = int | float


def layer_weights(c: TransformerConfig) -> int:
    """Return the number of weights that a token is multiplied with in all layers."""
    return sum(stack.num_layers * _one_layer(stack) for stack in layer_stacks(c).values())


def _one_layer(c: TransformerConfig) -> int:
    queries = c.num_heads * (2 if c.attention_gate else 1)
    matrices = 3 if c.mlp_gate else 2
    keys = (2 - c.keys_as_values) * c.num_kv_heads if c.has_kv else 0
    attention = c.head_dim * c.hidden_size * (queries + c.num_heads + keys)
    if c.kind in RECURRENT:  # in place of attention
        attention = RECURRENT[c.kind].mixer_weights(c)
    elif mla := c.mla:
        queries = c.num_heads * c.head_dim
        attention = mla.q_rank * (c.hidden_size + queries) if mla.q_rank else c.hidden_size * queries
        attention += c.hidden_size * (mla.kv_rank + mla.rope_dim + c.num_heads * mla.value_dim)
        attention += mla.kv_rank * c.num_heads * (mla.nope_dim + mla.value_dim)
    width, experts = c.mlp_size, 0
    if moe := c.moe:
        width = moe.shared_size
        experts = matrices * moe.experts_per_token * moe.expert_size * c.expert_width
        experts += c.hidden_size * (moe.num_experts + 2 * moe.latent_size)
    inputs = 3 * c.per_layer_inputs  # their gate, their projection, and the one that makes them
    mlp = (c.hidden_size * matrices * width + experts) * c.has_mlp
    return attention * c.mixes + mlp + c.hidden_size * inputs


def head_flops(c: TransformerConfig, tokens: Number) -> float:
    """Return the FLOPs from hidden states to logits."""
    return 2.0 * tokens * c.hidden_size * c.vocab_size


def attention_flops(c: TransformerConfig, tokens: Number, context: Number) -> float:
    """Return the FLOPs of scores and weighted values.

    Args:
        context: keys of each query; a layer's window may be less.
    """
    keys = lambda stack: sum(min(context, window) for window in attention_windows(stack))
    return 2.0 * tokens * _sum_of_stacks(c, keys) + state_flops(c, tokens)


def _sum_of_stacks(c: TransformerConfig, keys: Callable[[TransformerConfig], Number]) -> Number:
    """Return the sum over stacks of keys that are read, times the dims of a key and its value."""
    return sum(_key_and_value_dims(stack) * keys(stack) for stack in layer_stacks(c).values())


def state_flops(c: TransformerConfig, tokens: Number) -> float:
    """Return the FLOPs of the states of recurrent layers, token by token."""
    if not c.recurrent_kind:
        return 0.0
    return tokens * RECURRENT[c.recurrent_kind].state_flops(c) * c.num_recurrent_layers


def _key_and_value_dims(c: TransformerConfig) -> int:
    """Return the dims of all heads of a token's key and value."""
    return c.num_heads * (c.head_dim + (c.mla.value_dim if c.mla else c.head_dim))


def matrix_flops(c: TransformerConfig, tokens: Number) -> float:
    """Return the FLOPs of the layers' matrix products with weights, including adapters."""
    return 2.0 * tokens * (layer_weights(c) + adapter_weights(c))


def index_flops(
    c: TransformerConfig, tokens: Number, context: Number, longest: Number | None = None
) -> float:
    """Return the FLOPs of indexers, which have no backward pass; 0 if each query reads all its keys.

    Args:
        context: keys of each query, on average.
        longest: keys of the last query; None = `context`.
    """
    if not c.index or (longest or context) <= c.index.topk:
        return 0.0
    index, layers = c.index, sum(c.index_layers or (True,) * c.num_layers)
    weights = c.mla.q_rank * index.heads * index.head_dim + c.hidden_size * (index.head_dim + index.heads)
    return 2.0 * tokens * layers * (weights + index.heads * index.head_dim * context)


def forward_flops(c: TransformerConfig, tokens: Number, context: Number) -> float:
    """Return the FLOPs of the layers, without the head."""
    return matrix_flops(c, tokens) + attention_flops(c, tokens, context) + index_flops(c, tokens, context)


def frozen_flops(c: TransformerConfig, tokens: Number, logits: bool) -> float:
    """Return the FLOPs of weight gradients, which a backward pass saves if only adapters are trained."""
    if c.lora is None:
        return 0.0
    return 2.0 * tokens * layer_weights(c) + head_flops(c, tokens) * logits


RECOMPUTED: dict[str, Callable[[TransformerConfig, Number, Number], float]] = {
    "none": lambda c, tokens, context: 0.0,
    "dots": lambda c, tokens, context: 0.0,
    "attention": lambda c, tokens, context: matrix_flops(c, tokens),
    "full": forward_flops,
    "offload": forward_flops,
}
"""`--model.remat` -> FLOPs of matrix products that the backward pass recomputes: none for "dots", which
recomputes elementwise operations only; all except attention for "attention"."""


def update_flops(
    c: TransformerConfig, tokens: Number, context: Number, remat: str, *, with_logits: bool
) -> float:
    """Return the FLOPs of forward, backward (twice the forward) and recomputation.

    With adapters, frozen weights have no gradients (`frozen_flops`).

    Args:
        remat: key of RECOMPUTED.
        with_logits: True if the loss needs log-probs, whose logits are recomputed too.
    """
    layers = 3 * forward_flops(c, tokens, context) - 2 * index_flops(c, tokens, context)
    layers += RECOMPUTED[remat](c, tokens, context)
    return layers + 4 * head_flops(c, tokens) * with_logits - frozen_flops(c, tokens, with_logits)


@functools.lru_cache
def adapter_weights(c: TransformerConfig) -> int:
    """Return the number of adapter weights that a token is multiplied with; 0 without adapters."""
    if c.lora is None:
        return 0
    sizes = {name: math.prod(leaf.shape) for name, leaf in named_leaves(abstract(c)) if MARK in name}
    experts = sum(size for name, size in sizes.items() if ".expert_" in name)
    passed = experts * c.moe.experts_per_token // c.moe.num_experts if experts else 0
    return sum(sizes.values()) - experts + passed


def sequence_flops(c: TransformerConfig, lengths: Iterable[int], logits: bool = True) -> float:
    """Return the model FLOPs of a forward pass over causal sequences of these lengths.

    A token counts 2 (W + A) for W weights of layers and A of adapters, 4 heads x head_dim for each key that a
    query of a layer attends to, and 2 hidden x vocab for the logits, as in arXiv 2204.02311, appendix B,
    except that queries attend to earlier positions only.

    Args:
        lengths: tokens of each sequence.
        logits: False if no logits are computed.
    """
    lengths = list(lengths)

    def keys(stack):
        layers = Counter(attention_windows(stack))
        return sum(count * _causal_keys(n, window) for window, count in layers.items() for n in lengths)

    matrices = matrix_flops(c, sum(lengths)) + state_flops(c, sum(lengths)) + _index_flops(c, lengths)
    return matrices + 2.0 * _sum_of_stacks(c, keys) + head_flops(c, sum(lengths)) * logits


def training_flops(c: TransformerConfig, lengths: Iterable[int], logits: bool = True) -> float:
    """Return the model FLOPs of forward and backward pass: three times the forward pass; no recomputation.

    With adapters, frozen weights have no gradients (`frozen_flops`).
    """
    lengths = list(lengths)
    forward = 3 * sequence_flops(c, lengths, logits) - 2 * _index_flops(c, lengths)
    return forward - frozen_flops(c, sum(lengths), logits)


def _index_flops(c: TransformerConfig, lengths: list[int]) -> float:
    """Return `index_flops` of causal sequences."""
    return sum((index_flops(c, n, (n + 1) / 2, longest=n) for n in lengths), start=0.0)


def _causal_keys(length: int, window: int) -> float:
    """Return the number of (query, key) pairs of a causal sequence, at most `window` keys a query."""
    near = min(length, window)
    return near * (near + 1) / 2 + (length - near) * near
