"""SmolLM2-135M-Instruct, where `make real` has fetched its weights: its tokenizer, and a step of GRPO."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.hf.gguf import convert_gguf
from jaxrl_llm.hf.tokenizer import load_tokenizer
from jaxrl_llm.report import jsonl

WEIGHTS = Path(__file__).parents[1] / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = Path(os.environ.get("JAXRL_SMOLLM2", WEIGHTS))
SMALL = "--steps 1 --eval.every 0 --prompts_per_step 2 --responses_per_prompt 2 --tokens_per_device 256"
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # that of tests is slow


TEXTS = (
    "Calculate 43 + 14.",
    "  Two  spaces,\ttabs\n\nand lines\n",
    "def f(x): return x**2  # 1234567890",
    "Gr\u00fc\u00dfe, \u4f60\u597d, \u043c\u0438\u0440, \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "It's they're WE'LL don't",
    "",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WEIGHTS.exists(), reason=f"no {WEIGHTS}: run make real, or set JAXRL_SMOLLM2"),
]


def test_tokens_and_chats_are_those_of_transformers():
    from transformers import AutoTokenizer

    ours = load_tokenizer(convert_gguf(WEIGHTS))
    theirs = AutoTokenizer.from_pretrained(WEIGHTS.parent, gguf_file=WEIGHTS.name)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids) == text
    tokens = ours.convert_ids_to_tokens(ours.encode("Calculate 43 + 14."))
    assert tokens == ["Calculate", "\u0120", "4", "3", "\u0120+", "\u0120", "1", "4", "."]
    question = [{"role": "user", "content": text} for text in TEXTS[:1]]
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
