"""The work that every system does, in the standard library only: each runs in its own environment."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Work:
    """A model, and how much it generates and trains on in a step."""

    vocab: int
    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: int
    norm_eps: float
    prompts: int
    prompt_tokens: int
    new_tokens: int
    group: int = 8

    @property
    def batch(self) -> int:
        return self.prompts * self.group


SMALL = Work(
    vocab=2048,
    layers=4,
    width=256,
    mlp=768,
    heads=8,
    kv_heads=4,
    head_dim=32,
    rope_theta=1_000_000,
    norm_eps=1e-6,
    prompts=4,
    prompt_tokens=64,
    new_tokens=128,
)
"""A small Qwen3."""
LONG = replace(SMALL, prompts=1, prompt_tokens=1024, new_tokens=64)
"""The same model with a long prompt."""
SMOLLM2 = Work(
    vocab=49152,
    layers=30,
    width=576,
    mlp=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    rope_theta=100_000,
    norm_eps=1e-5,
    prompts=8,
    prompt_tokens=38,
    new_tokens=11,
)
"""SmolLM2-135M, a Llama, at the lengths of configs/grpo_smollm2.py."""
RAGGED_MEAN, RAGGED_MAX, RAGGED_SETS = 40, 256, 3
LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY = 1e-5, 0.9, 0.999, 1e-8, 0.1
CLIP = 0.2


def hf_config(size: Work) -> dict[str, Any]:
    """Return what Hugging Face configs of a model without biases, the embedding tied, have in common."""
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.width,
        "intermediate_size": size.mlp,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "rms_norm_eps": size.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(size.rope_theta)},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


DELTA = hf_config(SMALL) | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "linear_num_key_heads": SMALL.heads // 2,
    "linear_num_value_heads": SMALL.heads,
    "linear_key_head_dim": SMALL.head_dim,
    "linear_value_head_dim": SMALL.head_dim,
    "layer_types": ["linear_attention"] * (SMALL.layers - 1) + ["full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": float(SMALL.rope_theta),
        "partial_rotary_factor": 0.25,
    },
}
"""A small Qwen3.5: three layers with the gated delta rule, one with attention."""
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_SIZE = 8, 2, SMALL.mlp // 2  # as many active weights as without experts
LORA_RANK, LORA_ALPHA = 8, 32.0
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SPECIAL = ("<pad>", "<eos>", "<unk>")  # ids 0, 1, 2; id i >= 3 is the word w{i - 3}


def prompts(work: Work, repetition: int) -> list[list[int]]:
    """Return prompts of random token ids."""
    draw = random.Random(f"prompts {repetition}")
    return [[draw.randrange(3, SMALL.vocab) for _ in range(work.prompt_tokens)] for _ in range(work.prompts)]


def ragged_lengths(repetition: int) -> list[int]:
    """Return response lengths of the samples: geometric with mean 40, at most 256; three sets in turn."""
    draw = random.Random(f"lengths {repetition % RAGGED_SETS}")
    return [_geometric(draw) for _ in range(SMALL.batch)]


def training_ids(work: Work, repetition: int) -> list[list[int]]:
    """Return the token ids of prompts and responses, no two with the same prompt."""
    draw = random.Random(f"training {repetition}")
    length = work.prompt_tokens + work.new_tokens
    return [[draw.randrange(3, SMALL.vocab) for _ in range(length)] for _ in range(work.batch)]


def grouped_ids(work: Work, repetition: int) -> list[list[int]]:
    """Return the token ids of prompts and responses, each prompt with all responses to it."""
    draw = random.Random(f"groups {repetition}")
    ids = lambda length: [draw.randrange(3, SMALL.vocab) for _ in range(length)]
    prompts = [ids(work.prompt_tokens) for _ in range(work.prompts)]
    return [prompt + ids(work.new_tokens) for prompt in prompts for _ in range(work.group)]


def training_advantages(work: Work, repetition: int) -> list[float]:
    draw = random.Random(f"advantages {repetition}")
    return [draw.gauss(0.0, 1.0) for _ in range(work.batch)]


def text(ids: list[int]) -> str:
    return " ".join(f"w{i - 3}" for i in ids)


def reward(response: str) -> float:
    """Return the trivial reward of all systems; it differs between samples."""
    return response.count("1") / (1 + len(response))


def tokenizer():
    """Return a word-level tokenizer of the first words of any vocabulary above."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{i}" for i in range(SMALL.vocab - len(SPECIAL)))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _geometric(draw: random.Random) -> int:
    length = 1
    while length < RAGGED_MAX and draw.random() > 1 / RAGGED_MEAN:
        length += 1
    return length
