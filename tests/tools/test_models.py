"""Models of the commands: runs, steps and adapters, in `generate`, `score` and `export` alike."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora_models import merged, with_random_adapters
from random_weights import random_params

from jaxrl_llm import models
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.peft import save_adapter
from jaxrl_llm.models import LoraConfig, lora
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.sharding.placement import make_mesh
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.tools import export, generate, score
from jaxrl_llm.tools.config import ModelChoice, ScoreArguments
from jaxrl_llm.tools.models import open_model

CONFIG = models.TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, max_position=256,
)  # fmt: skip
ADAPTERS = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))
TOKENS = [5, 17, 99, 3, 64]


def save_run(run_dir, steps, base="", algo="grpo"):
    """Write a run directory with a checkpoint of each step: {step: params}."""
    config = {"model": {"path": base, "tokenizer": "tiny", "dtype": "float32"}, "algo": {"name": algo}}
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"config": config}))
    saver = Checkpointer(CheckpointConfig(keep=len(steps)), run_dir)
    for step, params in steps.items():
        params = jax.tree.map(jnp.asarray, params)
        meta = {"model": dataclasses.asdict(params.config), "config": config}
        meta["frozen"] = lora.frozen_fingerprint(params)
        assert saver.save(step, {"params": lora.split_params(params)[0]}, meta, {})
    saver.close()
    return str(run_dir)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base model, a run of adapters on it with steps 1 and 2, and those of step 1 as folders."""
    root = tmp_path_factory.mktemp("runs")
    base = jax.tree.map(jnp.asarray, random_params(CONFIG))
    save_model(base, CONFIG, root / "base", make_tokenizer(), dtype="float32")
    (root / "base/generation_config.json").write_text('{"eos_token_id": [2, 100]}')
    steps = {step: with_random_adapters(base, ADAPTERS, seed=step) for step in (1, 2)}
    save_run(root / "run", steps, str(root / "base"))
    save_adapter(steps[1], root / "adapter", str(root / "base"))
    save_model(merged(steps[1]), CONFIG, root / "merged", make_tokenizer(), dtype="float32")
    return root


def logprobs(tmp_path, *arguments):
    data, out = tmp_path / "t.jsonl", tmp_path / "o.jsonl"
    data.write_text(json.dumps({"tokens": TOKENS}) + "\n")
    files = ["--data", str(data), "--out", str(out), "--resume", "False"]
    assert score.main([*files, *map(str, arguments)]) == 0
    return json.loads(out.read_text())["logprobs"]


@pytest.mark.slow
def test_a_step_of_a_run_and_an_adapter_score_as_the_merged_model(runs, tmp_path, capsys):
    expected = logprobs(tmp_path, "--model", runs / "merged")
    adapter = logprobs(tmp_path, "--model", runs / "base", "--adapter", runs / "adapter")
    first = logprobs(tmp_path, "--model", runs / "run", "--step", "1")
    newest = logprobs(tmp_path, "--model", runs / "run")
    np.testing.assert_allclose(first, expected, atol=2e-5)
    np.testing.assert_allclose(adapter, expected, atol=2e-5)
    assert np.abs(np.subtract(newest, expected)).max() > 0.1
    messages = capsys.readouterr().err
    assert f"step 1 of {runs / 'run'}" in messages and f"step 2 of {runs / 'run'}" in messages


@pytest.mark.slow
def test_a_step_of_a_run_generates_as_the_merged_model(runs, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text('{"prompt": "1 + 1 ="}\n')
    common = ["--prompts", str(prompts), "--out", str(out), "--max_tokens", "4", "--slots", "8"]
    common += ["--temperature", "0", "--ignore_eos", "True", "--resume", "False"]
    responses = []
    for model in (["merged"], ["run", "--step", "1"], ["base", "--adapter", str(runs / "adapter")]):
        assert generate.main(["--model", str(runs / model[0]), *model[1:], *common]) == 0
        responses.append(json.loads(out.read_text())["responses"][0])
    for response in responses[1:]:
        assert response["tokens"] == responses[0]["tokens"]
        np.testing.assert_allclose(response["logprobs"], responses[0]["logprobs"], atol=2e-5)


@pytest.mark.slow
def test_a_partial_file_of_one_step_is_not_continued_with_another(runs, tmp_path, monkeypatch):
    """The newest step, which no flag names, is another one after a save."""
    args = ScoreArguments(model=str(runs / "run"), data=tmp_path / "t.jsonl", out=tmp_path / "o.jsonl")
    args.data.write_text('{"tokens": [1, 2]}\n{"tokens": [3, 4]}\n')
    from jaxrl_llm.tools import scoring

    monkeypatch.setattr(scoring.ResumableOutput, "finish", lambda self: None)  # as if it were killed
    scoring.write_scores(dataclasses.replace(args, step=1))
    scoring.write_scores(dataclasses.replace(args, step=1))
    with pytest.raises(UserError, match=r"partial output of a command with another step"):
        scoring.write_scores(args)


def test_a_run_ends_its_responses_as_its_base_model(runs):
    assert open_model(str(runs / "run"), ModelChoice()).end_ids == (2, 100)
    assert open_model(str(runs / "base"), ModelChoice()).end_ids == (2, 100)


def test_an_adapter_is_added_to_the_model(runs):
    model = open_model(str(runs / "base"), ModelChoice(adapter=str(runs / "adapter")))
    assert model.config.lora == ADAPTERS
    params = model.load(make_mesh(MeshConfig(fsdp=4, tensor=2, data=1)), TRAIN, "float32")
    expected = dict(models.named_leaves(with_random_adapters(random_params(CONFIG), ADAPTERS, seed=1)))
    for name, leaf in models.named_leaves(params):
        np.testing.assert_allclose(np.asarray(leaf), expected[name], atol=1e-6)


def test_models_that_cannot_be_used_are_refused(runs, tmp_path):
    scorer = dataclasses.replace(CONFIG, value_head=True, tie_embeddings=True)
    save_model(random_params(scorer), scorer, tmp_path / "scorer", make_tokenizer(), dtype="float32")
    save_run(tmp_path / "run", {1: random_params(scorer)}, algo="reward_model")
    for name in ("scorer", "run"):
        with pytest.raises(UserError, match="a model with a score head, such as a reward model, has no text"):
            open_model(str(tmp_path / name), ModelChoice())
    with pytest.raises(UserError, match=r"--step 3: .* is not a run directory"):
        open_model(str(runs / "base"), ModelChoice(step=3))
    with pytest.raises(UserError, match=r"no checkpoint of step 3; there are \[1, 2\]"):
        open_model(str(runs / "run"), ModelChoice(step=3))
    with pytest.raises(UserError, match=r"--adapter .*: the run already has adapters"):
        open_model(str(runs / "run"), ModelChoice(adapter=str(runs / "adapter")))
    rewards = ["--reward.name", "exact", "--data", str(tmp_path / "d"), "--out", str(tmp_path / "o")]
    for flag in (["--step", "1"], ["--adapter", "a"]):
        with pytest.raises(UserError, match=rf"{' '.join(flag)} is of the model whose log-probs are written"):
            score.main([*flag, *rewards])


def test_a_run_whose_config_is_lost_is_named(runs, tmp_path):
    run_dir = save_run(tmp_path / "run", {1: random_params(CONFIG)})
    (tmp_path / "run/config.json").write_text("{}")
    with pytest.raises(UserError, match=r'run/config\.json: has no "config"'):
        open_model(run_dir, ModelChoice())


def test_a_chat_for_a_model_without_a_template_is_refused_with_flags_of_the_command(tmp_path, capsys):
    tokenizer, out = make_tokenizer(), tmp_path / "o.jsonl"
    tokenizer.chat_template = None
    save_model(random_params(CONFIG), CONFIG, tmp_path / "base", tokenizer, dtype="float32")
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    flags = ["--model", str(tmp_path / "base"), "--prompts", str(tmp_path / "p.jsonl"), "--out", str(out)]
    with pytest.raises(UserError, match=r"--chat.chat_template FILE, .* --chat.render plain"):
        generate.main(flags)
    assert generate.main([*flags, "--chat.render", "plain", "--max_tokens", "2"]) == 0
    assert json.loads(out.read_text())["responses"]


def test_the_export_of_a_policy_that_shares_its_critic_has_no_value_head(tmp_path, capsys):
    """As the run exports it: `transformers` would read a folder with one as a classifier."""
    shared = dataclasses.replace(CONFIG, value_head=True)
    run_dir = save_run(tmp_path / "run", {1: random_params(shared)}, algo="ppo")
    assert export.main(["--checkpoint", run_dir, "--out", str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    assert not read_config(tmp_path / "hf").value_head
