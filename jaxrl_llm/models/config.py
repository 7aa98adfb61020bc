"""TransformerConfig: the fields in which the dense decoder families differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.errors import UserError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and the context extensions that HF defines for it.

    HF spells these `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).
    """

    theta: float = 10_000.0
    """Base of the frequencies."""
    scaling: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    """How the frequencies are stretched beyond the length of pretraining."""
    factor: float = 1.0
    """How many times longer the context becomes (every scaling but "default")."""
    original_max_position: int | None = None
    """Length of pretraining (yarn, llama3); None = `max_position` of the model."""
    attention_factor: float | None = None
    """Multiplies cos and sin (yarn); None = from factor, mscale and mscale_all_dim."""
    beta_fast: float = 32.0
    """Pairs that turn more often than this over the original length keep their frequency (yarn)."""
    beta_slow: float = 1.0
    """Pairs that turn less often than this are divided by `factor` (yarn)."""
    mscale: float | None = None
    """Weight of log(factor) in the numerator of the attention factor (yarn; DeepSeek checkpoints)."""
    mscale_all_dim: float | None = None
    """The same in the denominator; both must be set to count."""
    truncate: bool = True
    """Round the borders between kept and divided pairs outwards to whole pairs (yarn)."""
    low_freq_factor: float = 1.0
    """Wavelengths above original length / this are divided by `factor` (llama3)."""
    high_freq_factor: float = 4.0
    """Wavelengths below original length / this stay as they are (llama3)."""


@dataclass(frozen=True)
class TransformerConfig:
    """A dense decoder. Families (Qwen, Llama, Mistral, Baichuan) are settings of it, not code."""

    family: str = "qwen3"
    """HF `model_type`; names the weights on import and export."""
    vocab_size: int = 151_936
    """Rows of the embedding and of the head."""
    hidden_size: int = 1024
    """Width of the residual stream."""
    mlp_size: int = 3072
    """Width inside the gated feed-forward."""
    num_layers: int = 28
    """Decoder layers."""
    num_heads: int = 16
    """Query heads."""
    num_kv_heads: int = 8
    """Key and value heads; each serves num_heads / num_kv_heads query heads."""
    head_dim: int = 128
    """Size of one head; need not be hidden_size / num_heads."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    out_bias: bool = False
    """Bias on the attention output projection (Llama with `attention_bias`)."""
    mlp_bias: bool = False
    """Biases on the three feed-forward projections."""
    qk_norm: bool = True
    """RMSNorm over head_dim of queries and keys before RoPE (Qwen3)."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """Of the feed-forward gate."""
    norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    tie_embeddings: bool = True
    """The head is the embedding."""
    rope: RopeConfig = RopeConfig(theta=1_000_000.0)
    """Rotary position embedding."""
    max_position: int = 40_960
    """Longest trajectory the model is made for."""
    sliding_window: int | None = None
    """A token sees this many tokens, itself included; None = all before it."""
    window_layers: tuple[bool, ...] | None = None
    """Which layers use the sliding window; None = all of them."""
    attention_softcap: float | None = None
    """c: attention scores become c tanh(score / c) (Gemma 2)."""
    logit_softcap: float | None = None
    """c: logits become c tanh(logit / c). Applied where log-probs are made, not in the decoder."""
    value_head: bool = False
    """A number for each token: critics, reward models, a policy that is its own critic."""
    initializer_range: float = 0.02
    """Standard deviation of random weights."""

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model: num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"model: head_dim={self.head_dim} is odd, but RoPE rotates pairs")
        if self.window_layers is not None and len(self.window_layers) != self.num_layers:
            raise UserError(
                f"model: window_layers has {len(self.window_layers)} entries for num_layers={self.num_layers}"
            )
