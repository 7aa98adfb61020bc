"""A run with adapters: what it saves, how it continues, what it exports, and which base it accepts."""

import json
import shutil

import jax
import numpy as np
import pytest
from run_files import DIGITS, untimed_metrics
from safetensors.numpy import load_file

from jaxrl_llm import models
from jaxrl_llm.checkpoint.manifest import read_manifest
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.quantize import dequantize_weight
from jaxrl_llm.tools import export
from jaxrl_llm.train import main

pytestmark = pytest.mark.slow
TOKENIZER = make_tokenizer()
FROZEN = ("frozen", "frozen_critic")
MODEL = TransformerConfig(
    vocab_size=len(TOKENIZER),
    hidden_size=32,
    mlp_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
ARGS = [
    *(
        "--config",
        "grpo_tiny.py",
        "--lora.rank",
        "4",
        "--optim.learning_rate",
        "1e-2",
        "--algo.kl_coef",
        "0.1",
    ),
    *(
        "--prompts_per_step",
        "4",
        "--responses_per_prompt",
        "4",
        "--warm_start.steps",
        "0",
        "--eval.every",
        "0",
    ),
    *(
        "--log.progress",
        "none",
        "--log.tensorboard",
        "false",
        "--rollout.slots",
        "8",
        "--reward.workers",
        "1",
    ),
    *(
        "--mesh.fsdp",
        "2",
        "--mesh.tensor",
        "2",
        "--mesh.data",
        "2",
        "--optim.schedule",
        "constant",
        "--reward.name",
        "",
    ),
]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The command line of a run on a pretrained folder: `command(run_dir, *more)`."""
    folder = tmp_path_factory.mktemp("lora")
    params = jax.jit(models.init, static_argnums=0)(MODEL, jax.random.key(0))
    save_model(params, MODEL, folder / "base", TOKENIZER, dtype="float32")
    (folder / "reward.py").write_text(DIGITS)
    given = [*ARGS[:-1], f"{folder / 'reward.py'}:digits", "--model.path", str(folder / "base")]
    return lambda run_dir, *more: [*given, "--run_dir", str(run_dir), *more]


@pytest.fixture(scope="module")
def finished(command, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert main(command(run_dir, "--steps", "3", "--checkpoint.every", "2")) == 0
    return run_dir


def test_checkpoints_hold_adapters_and_their_moments_alone(finished):
    names = set(read_manifest(finished / "checkpoints/3").arrays)
    assert names and not [name for name in names if "layers." in name and "_lora_" not in name]
    assert not [name for name in names if "embed" in name]
    assert untimed_metrics(finished)[-1]["kl"] > 0  # the reference is the base without its adapters
    assert untimed_metrics(finished)[0]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_stopped_run_continues_bit_for_bit(command, finished, tmp_path):
    run_dir = tmp_path / "run"
    assert main(command(run_dir, "--steps", "2", "--checkpoint.every", "2")) == 0
    assert main(command(run_dir, "--steps", "3", "--checkpoint.every", "2")) == 0
    for ours, theirs in zip(untimed_metrics(run_dir), untimed_metrics(finished), strict=True):
        assert {k: (v, theirs[k]) for k, v in ours.items() if v != theirs[k]} == {}
    ours, theirs = (load_file(folder / "hf/model.safetensors") for folder in (run_dir, finished))
    for name, weight in theirs.items():
        np.testing.assert_array_equal(ours[name], weight)


def test_the_export_is_the_base_with_its_adapters_merged(command, finished, tmp_path, capsys):
    base = load_file(command("x")[command("x").index("--model.path") + 1] + "/model.safetensors")
    exported = load_file(finished / "hf/model.safetensors")
    assert exported.keys() == base.keys()
    changed = {name for name in base if np.abs(exported[name].astype(np.float32) - base[name]).max() > 1e-4}
    assert changed == {name for name in base if "_proj" in name}
    arguments = ["--checkpoint", str(finished), "--out", str(tmp_path / "out"), "--dtype", "float32"]
    assert export.main(arguments) == 0
    again = load_file(tmp_path / "out/model.safetensors")
    for name, weight in exported.items():
        np.testing.assert_allclose(again[name], weight.astype(np.float32), atol=1e-6)


def test_the_adapter_of_a_run_is_peft_s_and_another_run_starts_from_it(command, finished, tmp_path, capsys):
    config = json.loads((finished / "adapter/adapter_config.json").read_text())
    words = command(tmp_path / "run", "--steps", "1", "--model.adapter", str(finished / "adapter"))
    assert config["base_model_name_or_path"] == words[words.index("--model.path") + 1]
    assert (config["r"], config["lora_alpha"]) == (4, 32.0)
    assert main(words) == 0
    continued, new = untimed_metrics(tmp_path / "run")[0], untimed_metrics(finished)[0]
    assert continued["param_norm"] > new["param_norm"]
    assert continued["kl"] == pytest.approx(0.0, abs=1e-6)  # the reference is the adapter at the start
    capsys.readouterr()
    assert main([*words[:-2], "--model.adapter", str(tmp_path), "--run_dir", str(tmp_path / "other")]) == 2
    assert "adapter_config.json" in capsys.readouterr().err


def test_another_base_is_refused(command, finished, tmp_path, capsys):
    words = command(finished, "--steps", "4", "--checkpoint.every", "2")
    folder = words[words.index("--model.path") + 1]
    other = jax.jit(models.init, static_argnums=0)(MODEL, jax.random.key(7))
    kept = jax.jit(models.init, static_argnums=0)(MODEL, jax.random.key(0))
    save_model(other, MODEL, folder, TOKENIZER, dtype="float32")
    try:
        assert main(words) == 2
    finally:
        save_model(kept, MODEL, folder, TOKENIZER, dtype="float32")
    assert "not the weights that the adapters of" in capsys.readouterr().err


def test_another_base_of_the_critic_is_refused(command, tmp_path, capsys):
    """Its adapters, too, were trained on the base that is not in the checkpoint."""
    folder = tmp_path / "critic"
    save = lambda seed: save_model(models.init(MODEL, jax.random.key(seed)), MODEL, folder, TOKENIZER)
    save(1)
    run_dir = tmp_path / "run"
    words = command(run_dir, "--algo", "ppo", "--critic.path", str(folder), "--checkpoint.every", "1")
    words += ["--critic.warmup_steps", "1"]
    assert main([*words, "--steps", "1"]) == 0
    warning = "warning: --critic.warmup_steps 1 is all 1 steps: the policy is not trained"
    assert warning in capsys.readouterr().out
    fingerprints = {
        name: json.loads((run_dir / "checkpoints/1/meta.json").read_text())[name] for name in FROZEN
    }
    assert all(fingerprints.values()) and len(set(fingerprints.values())) == len(FROZEN)
    save(2)
    capsys.readouterr()
    assert main([*words, "--steps", "2"]) == 2
    assert f"{folder}: not the weights that the adapters of" in capsys.readouterr().err
    save(1)
    assert main([*words, "--steps", "2"]) == 0
    words[words.index("--critic.path") + 1] = words[words.index("--model.path") + 1]
    assert main([*words, "--steps", "3"]) == 2
    assert "critic.path: was " in capsys.readouterr().err


def test_the_export_of_another_base_is_refused(command, finished, tmp_path, capsys):
    folder = command("x")[command("x").index("--model.path") + 1]
    arguments = ["--checkpoint", str(finished), "--out", str(tmp_path / "out")]
    kept = jax.jit(models.init, static_argnums=0)(MODEL, jax.random.key(0))
    other = jax.tree.map(lambda x: x + 0.01, kept)
    save_model(other, MODEL, folder, TOKENIZER, dtype="float32")
    try:
        with pytest.raises(UserError, match="not the weights that the adapters of"):
            export.main(arguments)
    finally:
        save_model(kept, MODEL, folder, TOKENIZER, dtype="float32")
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_computes_the_fingerprint_once(command, finished, tmp_path, monkeypatch):
    calls, original = [], lora.frozen_fingerprint
    monkeypatch.setattr(lora, "frozen_fingerprint", lambda params: calls.append(1) or original(params))
    run_dir = shutil.copytree(finished, tmp_path / "run")
    assert main(command(run_dir, "--steps", "3", "--checkpoint.every", "2")) == 0  # nothing is left to do
    assert calls == [1]


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_run_on_a_quantized_base_continues_bit_for_bit(command, kind, tmp_path, capsys):
    """It checkpoints adapters alone, refuses another quantization, and exports the dequantized model."""
    words = lambda run_dir: command(run_dir, "--lora.quantize", kind, "--checkpoint.every", "1")
    run_dir = tmp_path / "run"
    assert main([*words(run_dir), "--steps", "2"]) == 0
    assert f"linear layers frozen in {kind}" in capsys.readouterr().out
    names = set(read_manifest(run_dir / "checkpoints/2").arrays)
    assert not [name for name in names if "layers." in name and "_lora_" not in name]
    rows, exported = untimed_metrics(run_dir), load_file(run_dir / "hf/model.safetensors")
    adapters = load_file(run_dir / "adapter/adapter_model.safetensors")
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6) and rows[1]["kl"] > 0

    stopped = shutil.copytree(run_dir, tmp_path / "stopped")
    shutil.rmtree(stopped / "checkpoints/2")
    assert main([*words(stopped), "--steps", "2"]) == 0
    assert untimed_metrics(stopped) == rows
    for name, weight in load_file(stopped / "hf/model.safetensors").items():
        np.testing.assert_array_equal(weight, exported[name])
    assert main([*words(stopped)[:-4], "--lora.quantize", "none", "--steps", "3"]) == 2
    assert f'lora.quantize: was "{kind}", now "none"' in capsys.readouterr().err

    base = load_params(command("x")[command("x").index("--model.path") + 1], lora.frozen_config(MODEL, kind))
    prefix, up = "layers.1.mlp.up_proj", base.layers
    plain = dequantize_weight(up.up[...], up.up_scale[...], np.float32)[1].T  # [F, D]
    a, b = (adapters[f"base_model.model.model.{prefix}.lora_{part}.weight"] for part in "AB")
    expected = np.asarray(plain) + 8.0 * b @ a
    np.testing.assert_allclose(exported[f"model.{prefix}.weight"], expected, atol=1e-7)
    arguments = ["--checkpoint", str(stopped), "--out", str(tmp_path / "out"), "--dtype", "float32"]
    assert export.main(arguments) == 0
    again = load_file(tmp_path / "out/model.safetensors")
    np.testing.assert_allclose(again[f"model.{prefix}.weight"], expected, atol=1e-7)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lora.rank", "0", "--model.adapter", "x"], "--model.adapter x needs --lora.rank R"),
        (["--lora.rank", "0", "--lora.quantize", "nf4"], "only frozen weights can be quantized"),
        (["--lora.rank", "5"], "lora.rank: was 4, now 5"),
        (
            ["--rollout.engine", "sglang", "--rollout.launch", "1", "--rollout.weight_noise", "0.1"],
            "--rollout.weight_noise changes all weights, and with --lora.rank servers get adapters",
        ),
    ],
)
def test_what_adapters_cannot_do(command, finished, more, message, *, capsys):
    assert main(command(finished, "--steps", "4", *more)) == 2
    assert message in capsys.readouterr().err


def test_a_rate_of_full_training_is_warned_of(command, tmp_path, capsys):
    assert main(command(tmp_path / "run", "--steps", "1", "--optim.learning_rate", "1e-6")) == 0
    out = capsys.readouterr().out
    assert "LoRA: rank 4, scale 8," in out and "--optim.learning_rate 1e-06 is small for LoRA" in out
