"""Models that exchange token ids have one vocabulary; what has another is refused before a weight is read."""

import json
from dataclasses import replace

import pytest

from jaxrl_llm import algos
from jaxrl_llm.builders.models import check_frozen_models, load_model_config
from jaxrl_llm.config import CriticConfig, ModelConfig, ReferenceConfig, TrainConfig, TransformerConfig
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.hf.export import save_description
from jaxrl_llm.recipe.checks import architectures, check_models, read_local
from jaxrl_llm.recipe.load import from_command_line

MODEL = TransformerConfig(
    vocab_size=160, hidden_size=16, mlp_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders without weights: with the tiny tokenizer, and with one in which a and b are swapped."""
    root = tmp_path_factory.mktemp("models")
    same = save_description(MODEL, root / "same", make_tokenizer())
    other = save_description(replace(MODEL, vocab_size=128), root / "other", make_tokenizer())
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    return same, other


def test_a_folder_comes_with_its_own_tokenizer(folders):
    same, other = folders
    _, tokenizer, folder = load_model_config(ModelConfig(path=str(other)))
    ids = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert folder == other and ids == make_tokenizer().convert_tokens_to_ids(["b", "a"])
    assert load_model_config(ModelConfig(path=str(same), tokenizer="tiny"))[1].is_fast
    assert load_model_config(ModelConfig(architecture=MODEL, tokenizer=str(other)))[2] is None


@pytest.mark.parametrize("tokenizer", ["tiny", "same"])
def test_another_tokenizer_of_the_same_size_is_refused(folders, tokenizer):
    same, other = folders
    name = tokenizer if tokenizer == "tiny" else str(same)
    with pytest.raises(ConfigError) as error:
        load_model_config(ModelConfig(path=str(other), tokenizer=name))
    assert str(error.value).startswith(
        f"--model.tokenizer {name} is not the tokenizer of --model.path {other}: 2 tokens differ: 'a' has id "
    )
    assert str(error.value).endswith("Set --model.tokenizer '' to use the model's own.")


def test_a_model_on_the_command_line_brings_its_tokenizer(folders, tmp_path):
    """The tiny recipes name the tiny tokenizer, which is not that of another model."""
    same, other = folders
    argv = ["--config", "grpo_tiny.py", "--run_dir", str(tmp_path)]
    model = lambda *more: from_command_line([*argv, *more]).config.model
    assert model().tokenizer == model("--model.path", "").tokenizer == "tiny"
    assert model("--model.path", str(other)).tokenizer == model(f"--model.path={other}").tokenizer == ""
    given = model("--model.path", str(other), "--model.tokenizer", str(same))
    assert given.tokenizer == str(same)
    with pytest.raises(ConfigError, match=r"is not the tokenizer of --model\.path"):
        load_model_config(given)


def test_teachers_and_critics_read_the_tokens_of_the_policy(folders):
    """Vocabularies of 128 and 160 rows: the difference is padding; the same 128 rows may be other tokens."""
    same, other = map(str, folders)
    config = replace(TrainConfig(), algo=replace(algos.ALGOS["gkd"].Config(), teachers=(same,)))
    check_frozen_models(config, make_tokenizer())
    config = replace(config, algo=replace(config.algo, teachers=(same, other)))
    with pytest.raises(
        ConfigError, match=rf"the teacher {other} has another tokenizer than the policy, .*: 2 tok"
    ):
        check_frozen_models(config, make_tokenizer())
    config = replace(TrainConfig(), algo=algos.ALGOS["ppo"].Config(), critic=CriticConfig(path=other))
    assert algos.requirements(config.algo).critic
    with pytest.raises(ConfigError, match=f"the critic {other} has another tokenizer"):
        check_frozen_models(config, make_tokenizer())
    check_frozen_models(replace(config, critic=CriticConfig(path=same)), make_tokenizer())
    grpo, reference = algos.ALGOS["grpo"], ReferenceConfig(path=other)
    config = replace(TrainConfig(), algo=grpo.Config(kl_coef=0.1), reference=reference)
    with pytest.raises(ConfigError, match=f"the reference {other} has another tokenizer"):
        check_frozen_models(config, make_tokenizer())
    check_frozen_models(replace(config, reference=ReferenceConfig(path=same)), make_tokenizer())
    check_frozen_models(replace(config, algo=grpo.Config(kl_coef=0.0)), make_tokenizer())  # has no reference


def test_a_reward_model_is_no_teacher_reference_or_policy(tmp_path):
    """Its files have no head of a language model, in whose place the embedding would be read."""
    folder = str(save_description(replace(MODEL, value_head=True), tmp_path / "scores"))
    make_tokenizer().save_pretrained(folder)
    gkd, grpo, ppo = (algos.ALGOS[name].Config() for name in ("gkd", "grpo", "ppo"))
    own = dict(reference=ReferenceConfig(path=folder))
    model = ModelConfig(architecture=MODEL, tokenizer="tiny")
    for key, config in (
        ("algo.teachers", TrainConfig(model=model, algo=replace(gkd, teachers=(folder,)))),
        ("reference.path", TrainConfig(model=model, algo=replace(grpo, kl_coef=0.1), **own)),
    ):
        with pytest.raises(ConfigError, match=rf"--{key} {folder}: a model with a score head"):
            check_models(config, architectures(config, read_local))
    config = TrainConfig(model=model, algo=ppo, critic=CriticConfig(path=folder))
    check_models(config, architectures(config, read_local))
    words = ["--config", "grpo_tiny.py", "--run_dir", str(tmp_path / "run"), "--model.path", folder]
    with pytest.raises(ConfigError, match=rf"--model\.path {folder}: a model with a score head"):
        from_command_line(words)
    assert from_command_line([*words, "--algo", "reward_model"]).config.model.path == folder
