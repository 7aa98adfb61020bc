"""Vocabularies of GGUF files whose ids by llama.cpp are known.

`llama_cpp_ids.json` has the ids that llama.cpp gives (`model.tokenize(text, true)` of node-llama-cpp 3.22.1)
with the vocabularies below: merges that pass every cut, so that each cut shows in the ids, and SentencePiece.
"""

import json
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

GOLDEN = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text())
WORDS = [*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in GOLDEN["merges"])]
TOKENS = [*WORDS, "\u0120unmerged", "<s>", "<|im_end|>", "<think>", "[PAD]"]
BYTE_LEVEL = {
    "ggml.model": "gpt2",
    "ggml.tokens": TOKENS,
    "ggml.token_type": [1] * (len(TOKENS) - 4) + [3, 1, 4, 1],  # <|im_end|> and [PAD] have the wrong type
    "ggml.merges": GOLDEN["merges"],
    "ggml.bos_token_id": TOKENS.index("<s>"),
    "ggml.eos_token_id": TOKENS.index("<|im_end|>"),
}
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += [*GOLDEN["words"], "\u2581", *map(chr, range(33, 127))]
SENTENCEPIECE = {
    "ggml.model": "llama",
    "ggml.tokens": PIECES,
    "ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259),
    "ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(PIECES) - 259)],
}


def reader(metadata):
    return lambda key, default=None: metadata.get(key, default)
