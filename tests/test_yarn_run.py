"""A run beyond the positions of its model: rollout, reference, export, the next run and another factor."""

import json

import jax
import pytest
from run_files import untimed_metrics

from jaxrl_llm import models
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.attention import with_yarn
from jaxrl_llm.tools import export
from jaxrl_llm.train import main

pytestmark = pytest.mark.slow
MODEL = TransformerConfig(
    vocab_size=len(make_tokenizer()), hidden_size=32, mlp_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=16,
)  # fmt: skip
ARGS = [
    *("--config", "grpo_tiny.py", "--prompts_per_step", "4", "--responses_per_prompt", "4", "--steps", "1"),
    *("--eval.every", "0", "--warm_start.steps", "0", "--log.progress", "none", "--log.tensorboard", "false"),
    *("--devices", "0:1", "--mesh.data", "1", "--mesh.fsdp", "1", "--reward.workers", "1"),
    *("--algo.kl_coef", "0.1", "--lora.rank", "4"),
]


def test_a_run_beyond_the_positions_of_its_folder(tmp_path, capsys):
    params = jax.jit(models.init, static_argnums=0)(MODEL, jax.random.key(0))
    folder = str(save_model(params, MODEL, tmp_path / "base", make_tokenizer(), dtype="float32"))
    words = [*ARGS, "--model.path", folder, "--reference.path", folder, "--run_dir", str(tmp_path / "run")]
    assert main(words) == 2
    assert "is more than the model's 16 positions. Set" in (error := capsys.readouterr().err)
    assert "or --model.yarn_factor 2." in error
    assert main([*words, "--model.yarn_factor", "2"]) == 0
    assert "adapter: trained with YaRN" in (said := "".join(capsys.readouterr()))
    assert "yarn: factor 2 over 16 positions, 32 in all" in said
    # Rollout, training and reference computed with one RoPE.
    row = untimed_metrics(tmp_path / "run")[-1]
    assert row["mismatch/max_abs"] < 1e-4 and row["kl"] == pytest.approx(0.0, abs=1e-6)
    written = read_config(tmp_path / "run/hf")
    assert written == with_yarn(MODEL, 2.0)
    assert json.loads((tmp_path / "run/hf/config.json").read_text())["rope_scaling"]["factor"] == 2.0
    out = ["--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "float32"]
    assert export.main(out) == 0 and read_config(tmp_path / "out") == written
    # It goes on with its factor only, and its export needs none.
    capsys.readouterr()
    assert main([*words, "--model.yarn_factor", "4", "--steps", "2"]) == 2
    assert "model.yarn_factor: was 2.0, now 4.0" in capsys.readouterr().err
    words = [*ARGS, "--model.path", str(tmp_path / "run/hf"), "--run_dir", str(tmp_path / "next")]
    assert main(words) == 0
