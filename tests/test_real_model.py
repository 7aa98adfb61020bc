"""A step of GRPO on SmolLM2-135M-Instruct, where `make real` has fetched its weights."""

import os
from pathlib import Path

import pytest

import jaxrl_llm

WEIGHTS = Path(__file__).parents[1] / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = Path(os.environ.get("JAXRL_SMOLLM2", WEIGHTS))


@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS.exists(), reason=f"no {WEIGHTS}: run make real, or set JAXRL_SMOLLM2")
def test_grpo_steps_on_a_pretrained_model_agree_with_its_rollout(tmp_path):
    settings = {"model.path": str(WEIGHTS), "eval.prompts": 4, "eval.every": 1, "checkpoint.every": 0}
    sizes = {"prompts_per_step": 2, "responses_per_prompt": 4, "tokens_per_device": 512}
    options = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 300}'
    settings |= {"data.train.0.options": options, "data.eval.0.options": options}
    result = jaxrl_llm.run("grpo_smollm2.py", steps=2, run_dir=str(tmp_path), **sizes, **settings)
    steps = [row for row in result.metrics if row["kind"] == "train"]
    assert len(steps) == 2 and all(row["mismatch/max_abs"] < 1e-3 for row in steps)
    assert all(row["response_tokens/max"] <= 16 and row["nonfinite"] == 0 for row in steps)
    assert (result.model / "model.safetensors").exists()
