"""The work that every system does, in the standard library only: each runs in its own environment."""

from __future__ import annotations

import random

VOCAB, LAYERS, WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM = 2048, 4, 256, 768, 8, 4, 32
ROPE_THETA, NORM_EPS = 1_000_000, 1e-6
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 64, 128
BATCH = PROMPTS * GROUP
RAGGED_MEAN, RAGGED_MAX, RAGGED_SETS = 40, 256, 3
LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY = 1e-5, 0.9, 0.999, 1e-8, 0.1
CLIP = 0.2
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_SIZE = 8, 2, MLP // 2  # as many active weights as without experts
LORA_RANK, LORA_ALPHA = 8, 32.0
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SPECIAL = ("<pad>", "<eos>", "<unk>")  # ids 0, 1, 2; id i >= 3 is the word w{i - 3}


def prompts(repetition: int) -> list[list[int]]:
    """Return four prompts of 64 random token ids."""
    draw = random.Random(f"prompts {repetition}")
    return [[draw.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def ragged_lengths(repetition: int) -> list[int]:
    """Return response lengths of the 32 samples: geometric with mean 40, at most 256; three sets in turn."""
    draw = random.Random(f"lengths {repetition % RAGGED_SETS}")
    return [_geometric(draw) for _ in range(BATCH)]


def training_ids(repetition: int) -> list[list[int]]:
    """Return 32 sequences of 64 prompt and 128 response token ids."""
    draw = random.Random(f"training {repetition}")
    return [[draw.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS + NEW_TOKENS)] for _ in range(BATCH)]


def training_advantages(repetition: int) -> list[float]:
    draw = random.Random(f"advantages {repetition}")
    return [draw.gauss(0.0, 1.0) for _ in range(BATCH)]


def text(ids: list[int]) -> str:
    return " ".join(f"w{i - 3}" for i in ids)


def reward(response: str) -> float:
    """Return the trivial reward of all systems; it differs between samples."""
    return response.count("1") / (1 + len(response))


def tokenizer():
    """Return a word-level tokenizer of the vocabulary above."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{i}" for i in range(VOCAB - len(SPECIAL)))]
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
