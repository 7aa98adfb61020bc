"""Architectures of well-known models by hub name, for plans without a download."""

from __future__ import annotations

from dataclasses import replace

from jaxrl_llm.models.config import MLAConfig, MoEConfig, RopeConfig, TransformerConfig


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> TransformerConfig:
    return TransformerConfig(
        hidden_size=hidden, mlp_size=mlp, num_layers=layers, num_heads=heads, tie_embeddings=tied
    )


def _qwen3_moe(hidden: int, layers: int, heads: int, expert: int) -> TransformerConfig:
    dense = replace(_qwen3(hidden, 3 * hidden, layers, heads, False), family="qwen3_moe", num_kv_heads=4)
    return replace(dense, moe=MoEConfig(num_experts=128, experts_per_token=8, expert_size=expert))


def _llama3(hidden: int, mlp: int, layers: int, heads: int) -> TransformerConfig:
    return TransformerConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        mlp_size=mlp,
        num_layers=layers,
        num_heads=heads,
        qk_norm=False,
        norm_eps=1e-5,
        tie_embeddings=False,
        rope=RopeConfig(theta=500_000.0),
        max_position=8192,
    )


_SMOLLM2_135M = TransformerConfig(
    family="llama",
    vocab_size=49_152,
    hidden_size=576,
    mlp_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    qk_norm=False,
    norm_eps=1e-5,
    rope=RopeConfig(theta=100_000.0),
    max_position=8192,
)
_DEEPSEEK_V3 = TransformerConfig(
    family="deepseek_v3",
    vocab_size=129_280,
    hidden_size=7168,
    mlp_size=18_432,
    moe=MoEConfig(
        num_experts=256,
        experts_per_token=8,
        expert_size=2048,
        shared_size=2048,
        shared_gate=False,
        score="sigmoid",
        scale=2.5,
        groups=8,
        groups_kept=4,
        selection_bias=True,
        dense_layers=3,
    ),
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    mla=MLAConfig(),
    qk_norm=False,
    tie_embeddings=False,
    rope=RopeConfig(10_000.0, "yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    max_position=163_840,
)
_LLAMA_8B, _LLAMA_70B = _llama3(4096, 14_336, 32, 32), _llama3(8192, 28_672, 80, 64)
_LONG = {
    "rope": RopeConfig(500_000.0, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    "max_position": 131_072,
}
PRESETS: dict[str, TransformerConfig] = {
    "HuggingFaceTB/SmolLM2-135M": _SMOLLM2_135M,
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32, False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17_408, 40, 40, False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25_600, 64, 64, False),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 1536),
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK_V3,
    "meta-llama/Meta-Llama-3-8B": _LLAMA_8B,
    "meta-llama/Meta-Llama-3-70B": _LLAMA_70B,
    "meta-llama/Llama-3.1-8B": replace(_LLAMA_8B, **_LONG),
    "meta-llama/Llama-3.1-70B": replace(_LLAMA_70B, **_LONG),
}
"""Hub name -> architecture, from config.json. A suffix such as -Instruct or -Base does not matter, except for
QWEN3_BASE."""
QWEN3_BASE = 32_768
"""`max_position` of Qwen3's base models: with the others' value `plan` would accept rows that `train`
refuses."""


def preset(name: str) -> TransformerConfig | None:
    """Return the architecture of a known model, or None."""
    known = PRESETS.get(name.removesuffix("-Instruct").removesuffix("-Base"))
    if known and known.family.startswith("qwen3") and name.endswith("-Base"):
        return replace(known, max_position=QWEN3_BASE)
    return known
