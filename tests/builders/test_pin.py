"""Hub names with a commit, which a run keeps."""

import datetime
import json
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from jaxrl_llm import algos
from jaxrl_llm.builders.pin import pin_date, pin_models, read_pins
from jaxrl_llm.config import (
    ChatConfig,
    CriticConfig,
    DataConfig,
    ModelConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    TrainConfig,
)
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.hub import HubName, parse_hub_name
from jaxrl_llm.hf.resolve import pin_revision, resolve_model
from jaxrl_llm.recipe.dump import describe_run

OLD, NEW = "a" * 40, "b" * 40


@pytest.mark.parametrize(
    "name, parts",
    [
        ("org/model", ("org/model", None, None)),
        ("gpt2", ("gpt2", None, None)),
        ("hf://org/model@main", ("org/model", "main", None)),
        ("org/model@refs/pr/3", ("org/model", "refs/pr/3", None)),
        ("org/model/sub/m-q4_0.gguf", ("org/model", None, "sub/m-q4_0.gguf")),
        ("hf://org/model@v1.0/m.gguf", ("org/model", "v1.0", "m.gguf")),
        ("./model", None),
        ("/data/model", None),
        ("models/missing.gguf", None),
        ("a/b/c", None),
        ("org/model@", None),
        ("x" * 500, None),
    ],
)
def test_parts_of_hub_names(name, parts):
    hub = parse_hub_name(name)
    assert hub == (parts and HubName(*parts))
    if hub:
        assert str(hub) == name.removeprefix("hf://")


def test_a_name_that_is_too_long_is_no_folder():
    with pytest.raises(UserError, match=r"a: no folder .* and the hub has not delivered it"):
        pin_revision("a" * 300)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Let the hub deliver a folder of commit `hub["head"]`, or of `hub["heads"]` by revision.

    Its requests are in hub["requests"].
    """
    state = {"head": OLD, "heads": {}, "requests": []}

    def snapshot(repo, revision=None, **patterns):
        state["requests"].append((repo, revision))
        commit = state["heads"].get(revision, state["head"])
        commit = revision if revision and len(revision) == 40 else commit
        return str(tmp_path / "cache" / repo.replace("/", "--") / "snapshots" / commit)

    def one_file(repo, file, revision=None):
        return str(Path(snapshot(repo, revision)) / file)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one_file)
    return state


def start(config, write=True):
    """Return the pinned config of a start of a run, which writes config.json as `train` does."""
    pinned, pins = pin_models(config)
    run_dir = Path(config.run_dir)
    run_dir.mkdir(exist_ok=True)
    if write:
        (run_dir / "config.json").write_text(json.dumps(describe_run(pinned, "recipe", [], pins)))
    return pinned


def test_a_run_keeps_the_commit_that_it_began_with(tmp_path, hub):
    algo = algos.gkd.Config(teachers=("org/teacher", str(tmp_path)))
    config = TrainConfig(
        run_dir=str(tmp_path / "run"),
        model=ModelConfig(path="hf://org/model", tokenizer="tiny"),
        critic=CriticConfig(path="org/critic@v2"),
        reference=ReferenceConfig(path="org/reference@v3"),
        algo=algo,
    )
    pinned = start(config)
    assert pinned.model.path == f"org/model@{OLD}" and pinned.model.tokenizer == "tiny"
    assert pinned.critic.path == f"org/critic@{OLD}"
    assert pinned.reference.path == f"org/reference@{OLD}"
    assert pinned.algo.teachers == (f"org/teacher@{OLD}", str(tmp_path))
    assert pin_models(pinned)[0] == pinned
    hub["head"] = NEW
    assert start(config) == pinned == start(config)  # the first of them has written its names, too
    again = start(replace(config, model=ModelConfig(path="org/model", tokenizer="tiny")))
    assert again.model.path == f"org/model@{OLD}" and again.algo.teachers[0] == f"org/teacher@{OLD}"
    other_run = start(replace(config, run_dir=str(tmp_path / "other")))
    assert other_run.model.path == f"org/model@{NEW}"


@pytest.mark.parametrize("name", ["org/model", "hf://org/model", "org/model@main", "hf://org/model@v1"])
def test_every_spelling_is_kept(tmp_path, hub, name):
    rewards = RewardConfig(models=(RewardModelConfig(path=name),))
    config = TrainConfig(run_dir=str(tmp_path / "run"), model=ModelConfig(path=name), reward=rewards)
    first = start(config)
    hub["head"] = NEW
    again = start(config)
    assert again == first and again.model.path == again.reward.models[0].path == f"org/model@{OLD}"


def test_two_revisions_of_a_repository_stay_two(tmp_path, hub):
    model, reference = ModelConfig(path="org/model@v1"), ReferenceConfig(path="org/model")
    config = TrainConfig(run_dir=str(tmp_path / "run"), model=model, reference=reference)
    hub["heads"] = {"v1": OLD, None: NEW}
    first = start(config)
    assert (first.model.path, first.reference.path) == (f"org/model@{OLD}", f"org/model@{NEW}")
    hub["heads"] = {"v1": "c" * 40, None: "d" * 40}
    assert start(config) == first


def test_a_run_of_an_earlier_version_keeps_its_commits(tmp_path, hub):
    """Its config.json has the pinned names alone."""
    reference = ReferenceConfig(path="org/other@v1")
    config = TrainConfig(
        run_dir=str(tmp_path / "run"), model=ModelConfig(path="hf://org/model"), reference=reference
    )
    first = start(config, write=False)
    described = describe_run(first, "recipe", ["--reference.path", "org/other@v1"])
    del described["pins"]
    (tmp_path / "run/config.json").write_text(json.dumps(described))
    hub["head"] = NEW
    assert start(config).model.path == f"org/model@{OLD}"
    described["config"]["critic"]["path"] = f"org/model@{NEW}"  # two commits: which is meant is not known
    (tmp_path / "run/config.json").write_text(json.dumps(described))
    assert read_pins(tmp_path / "run/config.json") == {"org/other": f"org/other@{OLD}"}


def test_the_pinned_commit_is_downloaded(hub):
    assert resolve_model(f"org/model@{OLD}").name == OLD
    assert hub["requests"] == [("org/model", OLD)]


def test_local_folders_stay(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/model").mkdir(parents=True)
    config = TrainConfig(model=ModelConfig(path="org/model"), run_dir=str(tmp_path / "run"))
    assert pin_models(config) == (config, {}) and not hub["requests"]


DATED = "{{ strftime_now('%Y') }}"


def test_a_run_keeps_the_date_on_which_it_began(tmp_path):
    """A template that writes the date would give the same row other tokens on the next day."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = DATED
    config = TrainConfig(run_dir=str(tmp_path))
    before, pinned = str(datetime.date.today()), pin_date(config, tokenizer)
    assert before <= pinned.data.chat.date <= str(datetime.date.today())
    write = lambda config: (tmp_path / "config.json").write_text(
        json.dumps(describe_run(config, "recipe", [], {}))
    )
    chosen = replace(config, data=DataConfig(chat=ChatConfig(date="2020-02-29")))
    write(chosen)
    assert pin_date(config, tokenizer) == pin_date(chosen, tokenizer) == chosen
    write(config)  # of a template that wrote no date
    assert pin_date(config, tokenizer).data.chat.date >= before
    (tmp_path / "config.json").write_text('{"config": []}')
    assert pin_date(config, tokenizer).data.chat.date >= before


def test_a_date_where_a_template_may_write_one(tmp_path):
    tokenizer, config = make_tokenizer(), TrainConfig(run_dir=str(tmp_path))
    assert pin_date(config, tokenizer) == config
    judged = replace(config, reward=RewardConfig(models=(RewardModelConfig(path="judge"),)))
    assert pin_date(judged, tokenizer).data.chat.date  # the judge's template may
    tokenizer.chat_template = {"default": "", "tool_use": DATED}
    assert pin_date(config, tokenizer).data.chat.date
