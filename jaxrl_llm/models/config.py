"""TransformerConfig: the fields in which the dense decoder families differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and the context extensions that HF defines for it."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    scaling: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    """How the frequencies are stretched beyond the length of pretraining."""
    factor: float = 1.0
    original_max_position: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class TransformerConfig:
    """A dense decoder. Families (Qwen, Llama, Mistral, Baichuan) are settings of it, not code."""

    family: str = "qwen3"
    """HF `model_type`; names the weights on import and export."""
    vocab_size: int = 151_936
    hidden_size: int = 1024
    mlp_size: int = 3072
    num_layers: int = 28
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = True
    """RMSNorm over head_dim of queries and keys before RoPE (Qwen3)."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    rope: RopeConfig = RopeConfig(theta=1_000_000.0)
    max_position: int = 40_960
    sliding_window: int | None = None
    """A token sees this many tokens, itself included; None = all before it."""
    window_layers: tuple[bool, ...] | None = None
    """Which layers use the sliding window; None = all of them."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    initializer_range: float = 0.02
