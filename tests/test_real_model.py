"""A step of GRPO on SmolLM2-135M-Instruct, where `make real` has fetched its weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.report import jsonl

WEIGHTS = Path(__file__).parents[1] / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = Path(os.environ.get("JAXRL_SMOLLM2", WEIGHTS))
SMALL = "--steps 1 --eval.every 0 --prompts_per_step 2 --responses_per_prompt 2 --tokens_per_device 256"
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # that of tests is slow


@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS.exists(), reason=f"no {WEIGHTS}: run make real, or set JAXRL_SMOLLM2")
def test_a_step_on_a_pretrained_model_agrees_with_its_rollout(tmp_path):
    settings = f"--config grpo_smollm2.py --model.path {WEIGHTS} {SMALL} --checkpoint.every 0"
    command = [sys.executable, "-m", "jaxrl_llm.train", *settings.split(), "--run_dir", str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (step,) = [row for row in jsonl.read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    assert step["mismatch/max_abs"] < 1e-3 and step["nonfinite"] == 0 and step["response_tokens/max"] <= 16
    assert (tmp_path / "hf/model.safetensors").exists()
