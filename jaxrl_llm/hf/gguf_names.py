"""Names and keys of GGUF files (llama.cpp), beside Hugging Face's."""

from __future__ import annotations

import functools
import re
from typing import Any

from jaxrl_llm.hf.names import HFTensor
from jaxrl_llm.hf.ropes import ORIGINAL
from jaxrl_llm.models import TransformerConfig

FAMILIES = {**{name: name for name in ("llama", "qwen2", "qwen3")}, "qwen3moe": "qwen3_moe"}
"""Values of `general.architecture` that are read -> `model_type`; files of Mistral models say "llama"."""
GGUF_KEYS = {
    # config.json             GGUF, after "<architecture>."
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Keys of qwen3moe, besides GGUF_KEYS. llama.cpp always divides the weights of its experts by their sum."""
EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""Part of the name of an HF tensor, which GGUF files have for all experts of a layer."""
GGUF_YARN = {
    ORIGINAL: "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
ROPE_FACTORS = "rope_freqs.weight"


def gguf_name(architecture: str, layers: int, name: str) -> str:
    """Return the name of an HF tensor in a file of the architecture with so many layers.

    The experts of a layer are one tensor in the file.
    """
    name = EXPERT.sub(".experts.", name)
    found = _names(architecture, layers).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def gguf_shape(tensor: HFTensor, config: TransformerConfig) -> tuple[int, ...]:
    """Return the shape in a file of the tensor that an HF tensor is, or an expert's part of which it is."""
    return (config.moe.num_experts, *tensor.shape) if EXPERT.search(tensor.name) else tensor.shape


def gguf_keys(architecture: str) -> dict[str, str]:
    """Return the keys of config.json -> keys of the architecture in a file."""
    return GGUF_KEYS | (EXPERT_KEYS if architecture == "qwen3moe" else {})


@functools.cache
def _names(architecture: str, layers: int) -> Any:
    """Return the gguf library's table of names."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture)
    return get_tensor_name_map(arch, layers)
