"""SmolLM2-135M-Instruct, where `make real` has fetched its weights: its tokenizer, and a step of GRPO."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.hf.gguf import convert_gguf
from jaxrl_llm.hf.tokenizer import generation_end_ids, load_tokenizer
from jaxrl_llm.report import jsonl

WEIGHTS = Path(__file__).parents[1] / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = Path(os.environ.get("JAXRL_SMOLLM2", WEIGHTS))
SMALL = "--steps 1 --eval.every 0 --prompts_per_step 2 --responses_per_prompt 2 --tokens_per_device 256"
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # that of tests is slow


IDS_OF_LLAMA_CPP = {
    "Calculate 43 + 14.": [44345, 216, 36, 35, 1232, 216, 33, 36, 30],
    "\n\n1": [1116, 33],
    "a\n\n1 22\n 333": [81, 1116, 33, 216, 34, 34, 3805, 35, 35, 35],
    "  Two  spaces,\ttabs\n\nlines": [216, 5713, 216, 5600, 28, 197, 100, 7366, 198, 198, 5110],
    "x**2  # 12345678": [104, 828, 34, 216, 907, 216, 33, 34, 35, 36, 37, 38, 39, 40],
    "Gr\u00fc\u00dfe, \u4f60\u597d": [27302, 7170, 34878, 85, 28, 216, 18645, 250, 48392, 138],
    "\U0001f642\U0001f469": [10813, 38887, 10813, 235, 119],
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>": [1, 4093, 198, 6004, 2, 198, 0],
    "It's they're WE'LL don't": [1589, 506, 502, 2316, 26587, 23, 16421, 1326, 982],
    "": [],
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WEIGHTS.exists(), reason=f"no {WEIGHTS}: run make real, or set JAXRL_SMOLLM2"),
]


def test_tokens_are_those_of_llama_cpp_and_chats_those_of_transformers():
    """Token ids and ends of generation: node-llama-cpp 3.22.1."""
    from transformers import AutoTokenizer

    folder = convert_gguf(WEIGHTS)
    ours = load_tokenizer(folder)
    for text, ids in IDS_OF_LLAMA_CPP.items():
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == text
    assert generation_end_ids(folder) == (0, 2, 4)  # <|endoftext|>, <|im_end|>, <reponame>
    theirs = AutoTokenizer.from_pretrained(WEIGHTS.parent, gguf_file=WEIGHTS.name)
    question = [{"role": "user", "content": "Calculate 43 + 14."}]
    answered = [*question, {"role": "assistant", "content": "57"}, *question]
    for messages in (question, answered, [{"role": "system", "content": "Be brief."}, *question]):
        for tokenize in (False, True):
            settings = {"tokenize": tokenize, "add_generation_prompt": True}
            chat = ours.apply_chat_template(messages, **settings)
            assert chat == theirs.apply_chat_template(messages, **settings)


def test_a_step_on_a_pretrained_model_agrees_with_its_rollout(tmp_path):
    settings = f"--config grpo_smollm2.py --model.path {WEIGHTS} {SMALL} --checkpoint.every 0"
    command = [sys.executable, "-m", "jaxrl_llm.train", *settings.split(), "--run_dir", str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (step,) = [row for row in jsonl.read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    assert step["mismatch/max_abs"] < 1e-3 and step["nonfinite"] == 0 and step["response_tokens/max"] <= 16
    assert (tmp_path / "hf/model.safetensors").exists()
