"""Runs of a tiny mixture of experts: strict over many steps, replay, resume with a selection bias."""

import json

import pytest
from safetensors.numpy import load_file

from jaxrl_llm.train import main

RECIPE = """
import dataclasses
from jaxrl_llm.config import MoEConfig
from jaxrl_llm.configs import grpo_moe_tiny

def get_config():
    config = grpo_moe_tiny.get_config()
    moe = MoEConfig(8, 2, 16, score="sigmoid", shared_size=16, shared_gate=False, selection_bias=True)
    sizes = dict(hidden_size=32, num_heads=2, num_kv_heads=1)
    architecture = dataclasses.replace(config.model.architecture, family="glm4_moe", moe=moe, **sizes)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=architecture))
"""
LATENTS = {
    "num_kv_heads=1": "num_kv_heads=2, head_dim=12, qk_norm=False, mla=MLAConfig(16, 12, 8, 4, 6)",
    "selection_bias=True": "selection_bias=True, dense_layers=1",
    "import MoEConfig": "import MLAConfig, MoEConfig",
    "glm4_moe": "deepseek_v3",
}
HYBRID = {
    'score="sigmoid", shared_size=16, shared_gate=False, selection_bias=True': "shared_size=16",
    "num_kv_heads=1": "num_kv_heads=1, attention_gate=True, norm_offset=1.0, **DELTA",
    "import MoEConfig": """import DeltaConfig, MoEConfig
DELTA = {"layer_kinds": ("delta", "attention"), "delta": DeltaConfig(2, 4, 8, 8)}""",
    "glm4_moe": "qwen3_5_moe_text",
}
TINY = (
    *("--prompts_per_step", "4", "--responses_per_prompt", "4", "--rollout.slots", "16", "--seed", "1"),
    *("--eval.every", "0", "--reward.workers", "1", "--tokens_per_device", "144", "--devices", "0:1"),
    *("--warm_start.steps", "2", "--routing.bias_rate", "0.01", "--optim.schedule", "constant"),
    *("--log.progress", "none", "--log.tensorboard", "false"),
)
pytestmark = pytest.mark.slow


def train(folder, *words, base="grpo_moe_tiny", changes=()):
    """Return the lines of the RL steps."""
    folder.mkdir(exist_ok=True)
    recipe = RECIPE.replace("grpo_moe_tiny", base)
    for old, new in dict(changes).items():
        recipe = recipe.replace(old, new)
    (folder / "moe.py").write_text(recipe)
    assert main(["--config", str(folder / "moe.py"), "--run_dir", str(folder / "run"), *TINY, *words]) == 0
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def test_rollout_and_trainer_are_bit_equal_over_20_steps(tmp_path):
    """Log-probs and routes; a selection bias that moves, several micro-batches and two updates a step."""
    words = ("--strict", "true", "--steps", "20", "--minibatches_per_step", "2")
    steps = train(tmp_path, *words, "--routing.replay", "rollout")
    assert len(steps) == 20 and [step["mismatch/max_abs"] for step in steps] == [0.0] * 20
    assert all(
        0.8 < step["moe/route_agreement"] <= 1 for step in steps
    )  # of the second update, other weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hybrid_is_bit_equal_over_20_steps(tmp_path, dtype):
    """Log-probs and routes of delta rule and attention layers, over two updates a step."""
    words = ("--strict", "true", "--steps", "20", "--minibatches_per_step", "2", "--routing.bias_rate", "0")
    for name in ("model.dtype", "rollout.dtype", "rollout.cache_dtype"):
        words += (f"--{name}", dtype)
    steps = train(tmp_path, *words, "--routing.replay", "rollout", changes=HYBRID)
    assert len(steps) == 20 and [step["mismatch/max_abs"] for step in steps] == [0.0] * 20
    assert all(0.8 < step["moe/route_agreement"] <= 1 for step in steps)


def test_adapters_of_latent_attention_are_strict(tmp_path):
    """Of all linear layers: 5 of attention in each of two layers, 3 of the dense layer, 3 of each of 8
    experts and of the shared one, with two factors each; the warm-up has moved them."""
    words = ("--lora.rank", "4", "--routing.bias_rate", "0", "--steps", "2", "--strict", "true")
    steps = train(tmp_path, *words, changes=LATENTS)
    assert [step["mismatch/max_abs"] for step in steps] == [0.0, 0.0]
    raw = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert "kv_b_proj" in raw["target_modules"] and "mlp.up_proj.weight" in raw["target_parameters"]
    adapters = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert all(x.any() for x in adapters.values()) and len(adapters) == 2 * (2 * 5 + 3 + 9 * 3)


def test_routes_of_noised_weights_are_replayed(tmp_path):
    """One update a step, before which the trainer's routers agree with a part of the rollout's."""
    words = ("--steps", "1", "--routing.replay", "rollout")
    [exact] = train(tmp_path / "a", *words, "--strict", "true")
    assert exact["moe/route_agreement"] == 1 and exact["mismatch/max_abs"] == 0
    [noised] = train(tmp_path / "b", *words, "--rollout.weight_noise", "0.3")
    assert noised["moe/route_agreement"] < 0.99


def test_a_run_with_a_selection_bias_continues_bit_for_bit(tmp_path):
    """And with the routes of the policy before the first of two updates."""
    words = ("--routing.replay", "old", "--routing.balance_coef", "0.01", "--minibatches_per_step", "2")
    whole = train(tmp_path / "a", *words, "--steps", "4")
    train(tmp_path / "b", *words, "--steps", "2")
    parts = train(tmp_path / "b", *words, "--steps", "4")
    names = ("loss", "grad_norm", "param_norm", "moe/load_max", "moe/balance", "moe/route_agreement")
    assert [[x[name] for name in names] for x in parts] == [[x[name] for name in names] for x in whole]
    assert all(0.5 < x["moe/route_agreement"] < 1 for x in whole)


def test_a_critic_with_experts(tmp_path):
    """At first its weights and routes are the policy's, and its value head is zero; then it learns that every
    response costs something."""
    words = ("--critic.warmup_steps", "0", "--routing.replay", "rollout", "--minibatches_per_step", "1")
    words += ("--reward.shaping", "overlong", "1.0", "--steps", "2")
    words += ("--reward.overlong_from", "1", "--reward.overlong_to", "8")
    first, second = train(tmp_path, *words, base="ppo_tiny")
    loads = [[step[f"{of}moe/load_max"] for of in ("", "critic/")] for step in (first, second)]
    assert loads[0][0] == loads[0][1] and loads[1][0] != loads[1][1]
    assert first["critic/value"] == 0 > second["critic/value"] and first["critic/return"] < 0
    assert first["moe/route_agreement"] == 1
