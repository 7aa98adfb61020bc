"""YaRN as keys of the recipe: the model that they make, beside transformers, and every reader of it."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import transformers
from hf_oracle import TOLERANCE, hf_logits, hf_model, our_logits, random_tokens, raw_config, state_dict
from hf_tensors import params_from_tensors
from slow_cases import with_slow

from jaxrl_llm import models
from jaxrl_llm.builders.describe import frequencies_line
from jaxrl_llm.builders.engines import _check_names
from jaxrl_llm.builders.models import load_model_config
from jaxrl_llm.builders.weights import read_architecture
from jaxrl_llm.checkpoint.resume import check_resume
from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.models import RopeConfig, TransformerConfig
from jaxrl_llm.models.attention import with_yarn
from jaxrl_llm.plan.models import planned_model
from jaxrl_llm.recipe.checks import check_models
from jaxrl_llm.sharding.config import POLICY

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LENGTH = 60
STRETCHED = {"max_position_embeddings": 64, "rope_scaling": YARN}
OTHER_YARN = {**YARN, "factor": 2.0, "attention_factor": 1.5}
MODEL = TransformerConfig(
    vocab_size=len(make_tokenizer()), hidden_size=16, mlp_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, max_position=20,
)  # fmt: skip


@pytest.mark.parametrize("family", with_slow(["llama", "qwen2", "qwen3"], {"llama", "qwen2"}))
@pytest.mark.parametrize(
    ("stored", "original"),
    [
        ({"max_position_embeddings": 16}, None),
        ({"max_position_embeddings": 20}, 16),
        ({"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, None),
        ({"max_position_embeddings": 32, "rope_scaling": OTHER_YARN}, None),
    ],
    ids=["config.json's length", "original", "dynamic", "another yarn"],
)
def test_the_keys_are_rope_scaling_of_transformers(family, stored, original):
    """The same model, config and logits, on rows of almost four times the original length."""
    ours = with_yarn(read_config(raw_config(family, **stored)), 4.0, original)
    raw = raw_config(family, **STRETCHED)
    assert ours == read_config(raw) == with_yarn(ours, 4.0)
    if "rope_scaling" in stored:  # the logits are those of the first case
        return
    theirs, tokens = hf_model(raw), random_tokens(length=LENGTH)
    logits = np.asarray(our_logits(params_from_tensors(ours, state_dict(theirs)), tokens))
    np.testing.assert_allclose(logits, hf_logits(theirs, tokens), atol=TOLERANCE, rtol=0)
    plain = params_from_tensors(read_config(raw_config(family, **stored)), state_dict(theirs))
    assert np.abs(logits - our_logits(plain, tokens)).max() > 0.1


def test_exports_state_it_for_transformers_4_and_5():
    model = with_yarn(read_config(raw_config("qwen3", max_position_embeddings=20)), 4.0, 16)
    written = to_hf_config(model)
    assert read_config(json.loads(json.dumps(written))) == model
    assert written["max_position_embeddings"] == 64
    assert YARN.items() <= written["rope_scaling"].items() and written["rope_scaling"]["type"] == "yarn"
    assert YARN.items() <= transformers.Qwen3Config(**written).rope_parameters.items()


def test_only_factors_that_mean_something_stretch():
    linear = dataclasses.replace(MODEL, rope=RopeConfig(scaling="linear", factor=2.0))
    assert with_yarn(MODEL, None) is MODEL and with_yarn(linear, 4.0) is linear
    assert with_yarn(MODEL, 1.5).max_position == 30
    own = read_config({"model_type": "olmo3", "rope_scaling": {**YARN, "attention_factor": 1.2}})
    assert with_yarn(own, 4.0) == dataclasses.replace(own, max_position=64)
    assert with_yarn(own, 8.0).rope.attention_factor is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            dataclasses.replace(MODEL, rope=RopeConfig(scaling="linear", factor=2.0)),
            "the model's RoPE has rope_type linear, beside",
        ),
        (dataclasses.replace(MODEL, rope_layers=(False,)), "the model has no RoPE. Leave"),
    ],
)
def test_models_that_yarn_cannot_stretch_are_refused(model, reason):
    config = TrainConfig(
        max_prompt_tokens=8, max_response_tokens=12, tokens_per_device=20, model=ModelConfig(yarn_factor=2.0)
    )
    with pytest.raises(ConfigError, match=f"--model.yarn_factor 2: {reason}"):
        check_models(config, {POLICY: model})
    longer = dataclasses.replace(config, max_response_tokens=13, model=ModelConfig())
    with pytest.raises(
        ConfigError, match=r"the model's 20 positions\. Set --max_response_tokens 12 or less\.$"
    ):
        check_models(longer, {POLICY: model})
    with pytest.raises(ConfigError, match=r"12 or less, or --model\.yarn_factor 2\.$"):
        check_models(longer, {POLICY: MODEL})


def test_plans_and_runs_read_the_same_model(tmp_path, capsys):
    planned = planned_model(ModelConfig(path="Qwen/Qwen3-8B", yarn_factor=32.0, yarn_original=32_768))
    assert (planned.max_position, planned.rope.original_max_position) == (2**20, 32_768)
    params = jax.jit(models.init, static_argnums=0)(MODEL, jax.random.key(0))
    folder = save_model(params, MODEL, tmp_path / "plain", make_tokenizer(), dtype="float32")
    config = ModelConfig(path=str(folder), yarn_factor=4.0)
    stretched, _, _ = load_model_config(config)
    assert stretched == planned_model(config) == with_yarn(MODEL, 4.0)
    assert not capsys.readouterr().err
    assert frequencies_line(stretched, 80) == "yarn: factor 4 over 20 positions, 80 in all"
    # A folder with YaRN: the same factor changes nothing, another one is said.
    params = models.with_heads(params, stretched)
    again = save_model(params, stretched, tmp_path / "yarn", make_tokenizer(), dtype="float32")
    assert load_model_config(dataclasses.replace(config, path=str(again)))[0] == stretched
    assert not capsys.readouterr().err
    load_model_config(dataclasses.replace(config, path=str(again), yarn_factor=8.0))
    note = "--model.yarn_factor 8 over 20 positions replaces the YaRN of"
    assert note in (printed := capsys.readouterr().err) and printed.endswith(": 4 over 20\n")


def test_other_models_of_the_same_files_have_it(tmp_path):
    class Stored:
        def config(self, path):
            return MODEL

    config = TrainConfig(model=ModelConfig(path="a", yarn_factor=4.0))
    assert read_architecture(config, "a", Stored()) == with_yarn(MODEL, 4.0)
    assert read_architecture(config, "b", Stored()) == MODEL


def test_names_for_servers_are_compared_beside_it(tmp_path):
    params = jax.jit(models.init, static_argnums=0)(MODEL, jax.random.key(0))
    folder = save_model(params, MODEL, tmp_path / "m", make_tokenizer(), dtype="float32")
    compared = []

    class Source:
        def check_names(self, shapes, where):
            compared.append(where)

    _check_names(Source(), with_yarn(MODEL, 4.0), folder)
    assert compared == [str(folder)]
    _check_names(Source(), dataclasses.replace(MODEL, tie_embeddings=False), folder)
    assert len(compared) == 1


@pytest.mark.parametrize("key", ["yarn_factor", "yarn_original"])
def test_a_run_keeps_it(key):
    old, new = ({"model": {"path": "a", key: value}} for value in (4.0, None))
    assert check_resume(old, old, 1) == []
    with pytest.raises(ValueError, match=rf"model\.{key}: was 4.0, now null"):
        check_resume(old, new, 1)
