"""llama.cpp reads exported GGUF files: the same prompt ids, tokens and log-probs; skipped without it."""

import json
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf_vocabularies import BYTE_LEVEL, PIECES, SENTENCEPIECE, TOKENS, reader
from random_weights import random_params

import jaxrl_llm
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.gguf_export import save_gguf
from jaxrl_llm.hf.gguf_tokenizer import make_gguf_tokenizer
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.hf.tokenizer import load_tokenizer
from jaxrl_llm.models import RopeConfig, TransformerConfig
from jaxrl_llm.models.config import MoEConfig

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients-llama/bin/python"
SMOLLM2 = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.is_file(), reason=f"no interpreter {PYTHON}")]

MAX_TOKENS = 16
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
QUESTIONS = [
    "Name a colour.",
    "12345 + 678 =",
    "  Two  spaces\n\n\tand H\u00e9llo \u4f60\u597d \U0001f642",
]
CHATS = [
    *([{"role": "user", "content": text}] for text in QUESTIONS),
    [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant", "user")],
]
LLAMA3 = RopeConfig(5e5, "llama3", 8.0, original_max_position=64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeConfig(1e4, "yarn", 4.0, original_max_position=32, beta_fast=16.0)


def of_family(family, **changes):
    sizes = {"vocab_size": len(TOKENS) + 4, "hidden_size": 64, "mlp_size": 96, "num_layers": 2}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "initializer_range": 0.3, "max_position": 512}
    fixed = {"qkv_bias": family == "qwen2", "qk_norm": "qwen3" in family, "rope": RopeConfig(5e4)}
    return TransformerConfig(family=family, **sizes | heads | fixed | changes)


MODELS = {
    "llama": (of_family("llama", rope=LLAMA3, tie_embeddings=False), "llama-bpe"),
    "llama with biases": (of_family("llama", qkv_bias=True, out_bias=True), "gpt-2"),
    "mistral": (of_family("mistral", vocab_size=len(PIECES), rope=RopeConfig(1e4, "linear", 2.0)), "llama"),
    "qwen2": (of_family("qwen2", head_dim=16, rope=YARN, tie_embeddings=False), "qwen2"),
    "qwen3": (of_family("qwen3"), "qwen2"),
    "qwen3_moe": (of_family("qwen3_moe", moe=MoEConfig(6, 2, 32), tie_embeddings=False), "qwen2"),
}


def run_llama_cpp(tmp_path, files, max_tokens=MAX_TOKENS):
    """Return llama.cpp's responses to CHATS, for each file."""
    jobs = [{"model": str(file), "adapter": "", "chats": CHATS} for file in files]
    (tmp_path / "jobs.json").write_text(json.dumps({"max_tokens": max_tokens, "jobs": jobs}))
    script = Path(__file__).with_name("client.py")
    command = [PYTHON, script, "llama_cpp", tmp_path / "jobs.json", tmp_path / "out.json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, timeout=400, env=environment, stderr=subprocess.DEVNULL)
    reply = json.loads((tmp_path / "out.json").read_text())
    print(reply["versions"])
    return reply["texts"]


def tokenizer_of(rules):
    metadata = SENTENCEPIECE if rules == "llama" else BYTE_LEVEL | {"ggml.pre": rules}
    tokenizer = make_gguf_tokenizer(reader(metadata))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ascii_params(config, rules):
    """Random weights that make ASCII alone: llama.cpp leaves out the log-probs of parts of a character."""
    params = jax.tree.map(np.array, random_params(config))
    tokens = PIECES if rules == "llama" else TOKENS
    others = [not text.isascii() or text[:2] == "<0" for text in tokens]
    head = params.embed if config.tie_embeddings else params.lm_head
    head[...] = np.where(np.array(others + [True] * (config.vocab_size - len(tokens)))[:, None], 0, head[...])
    return params


def test_llama_cpp_computes_our_tokens_and_logprobs(tmp_path):
    """Each of its tokens is the likeliest one by our logits of the same text, with the same log-prob."""
    from hf_oracle import our_logits

    models, files = [], []
    for name, (config, rules) in MODELS.items():
        models.append((name, ascii_params(config, rules), tokenizer_of(rules)))
        files.append(
            save_gguf(*(models[-1][1], config), tmp_path / f"{name}.gguf", models[-1][2], dtype="float32")
        )
    seen = set()
    for (name, params, tokenizer), responses in zip(models, run_llama_cpp(tmp_path, files), strict=True):
        for chat, response in zip(CHATS, responses, strict=True):
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            prompt, tokens = response["prompt"], response["tokens"]
            assert prompt == tokenizer.encode(text, add_special_tokens=False), (name, text)
            assert tokens
            logits = our_logits(params, np.array([prompt + tokens]))[0, len(prompt) - 1 : -1]
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            assert logprobs.argmax(-1).tolist() == tokens, (name, text)
            np.testing.assert_allclose(response["logprobs"], logprobs.max(-1), atol=1e-3, err_msg=name)
            seen.add(tuple(tokens))
    assert len(seen) > 10


@pytest.mark.skipif(not SMOLLM2.is_file(), reason="make weights")
def test_llama_cpp_generates_our_text_with_smollm2(tmp_path):
    folder = resolve_model(SMOLLM2)
    config = read_config(folder)
    params, tokenizer = load_params(folder, config), load_tokenizer(folder, config)
    files = [
        save_gguf(params, config, tmp_path / f"{t}.gguf", tokenizer, dtype=t) for t in ("float32", "q8_0")
    ]
    exact, quantized = run_llama_cpp(tmp_path, files)
    ours = jaxrl_llm.generate(folder, CHATS, temperature=0.0, max_tokens=MAX_TOKENS)
    for response, (expected,) in zip(exact, ours, strict=True):
        assert response["tokens"] == list(expected.tokens)
        np.testing.assert_allclose(response["logprobs"], expected.logprobs, atol=1e-3)
    first = [[response["logprobs"][0] for response in responses] for responses in (exact, quantized)]
    # llama.cpp rounds activations to 8 bits, too: 0.26 at most was seen, a file read wrongly is nats away.
    np.testing.assert_allclose(*first, atol=0.5)
