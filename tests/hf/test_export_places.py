"""Places of exports: what may be replaced, and what never is."""

import dataclasses
import json

import jax
import pytest

from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import check_export_folder, save_model
from jaxrl_llm.hf.tokenizer import load_tokenizer
from jaxrl_llm.models import init
from jaxrl_llm.tools import export

CONFIG = read_config(
    {
        "model_type": "qwen3",
        "vocab_size": 128,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
)


@pytest.fixture(scope="module")
def params():
    return init(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def run(params, tmp_path_factory):
    """A run with a checkpoint of step 1."""
    run = tmp_path_factory.mktemp("place") / "run"
    checkpoints = Checkpointer(CheckpointConfig(async_save=False), run)
    checkpoints.save(1, {"params": params}, {"config": {}, "model": dataclasses.asdict(CONFIG)}, {})
    (run / "config.json").write_text(json.dumps({"config": {"model": {"path": "", "tokenizer": "tiny"}}}))
    return run


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["todo.txt", "labels.json", "my.safetensors", "notes.jinja", "sp.model"])
def test_a_folder_with_a_file_that_no_export_writes_is_kept(params, tmp_path, name):
    folder = tmp_path / "mine"
    save_model(params, CONFIG, folder, make_tokenizer())
    (folder / name).write_text("mine")
    before = contents(folder)
    message = rf"mine: holds {name}, which is not part of an export; choose another folder"
    with pytest.raises(UserError, match=message):
        save_model(params, CONFIG, folder, make_tokenizer())
    with pytest.raises(UserError, match=message):
        check_export_folder(folder)
    assert contents(folder) == before


def test_every_file_of_an_export_may_be_replaced(params, tmp_path):
    folder = tmp_path / "out"
    save_model(params, CONFIG, folder, make_tokenizer(), max_shard_bytes=4000)
    written = contents(folder).keys()
    assert {"model.safetensors.index.json", "tokenizer.json", "generation_config.json"} <= written
    for name in ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "special_tokens_map.json"):
        (folder / name).write_text("of another tokenizer")
    save_model(params, CONFIG, folder)
    assert contents(folder).keys() == {"config.json", "model.safetensors"}


def test_an_export_with_several_chat_templates_may_be_replaced(params, tmp_path):
    folder, tokenizer = tmp_path / "out", make_tokenizer()
    tokenizer.chat_template = {"default": "A", "tool_use": "B"}
    for _ in range(2):  # a run that is continued exports again
        save_model(params, CONFIG, folder, tokenizer)
        assert load_tokenizer(folder, CONFIG).chat_template == tokenizer.chat_template
    tokenizer.chat_template = "C"
    save_model(params, CONFIG, folder, tokenizer)
    assert load_tokenizer(folder, CONFIG).chat_template == "C"
    assert not (folder / "additional_chat_templates").exists()


TEMPLATES = "additional_chat_templates"


@pytest.mark.parametrize("path", [f"{TEMPLATES}/mine.txt", f"{TEMPLATES}/a/b.jinja", "a/b.jinja"])
def test_a_folder_that_no_export_writes_is_kept(params, tmp_path, path):
    folder = tmp_path / "mine"
    save_model(params, CONFIG, folder, make_tokenizer())
    (folder / path).parent.mkdir(parents=True)
    (folder / path).write_text("mine")
    with pytest.raises(UserError, match=f"mine: holds {path.split('/')[0]}, which is not part of an export"):
        save_model(params, CONFIG, folder, make_tokenizer())
    assert (folder / path).read_text() == "mine"


def test_the_command_replaces_an_export_only_when_told_to(run, tmp_path):
    out = tmp_path / "out"
    arguments = ["--checkpoint", str(run), "--out", str(out)]
    assert export.main(arguments) == 0
    before = contents(out)
    with pytest.raises(UserError, match=r"--out .*out: exists\. Set another --out, or --overwrite True\."):
        export.main([*arguments, "--dtype", "float32"])
    assert contents(out) == before
    assert export.main([*arguments, "--dtype", "float32", "--overwrite", "True"]) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_the_command_writes_to_an_empty_folder(run, tmp_path):
    assert export.main(["--checkpoint", str(run), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(("here", "out"), [("out", "."), ("out", "../out"), ("out/in", "..")])
def test_the_working_directory_is_not_replaced(run, tmp_path, monkeypatch, here, *, out):
    (tmp_path / here).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / here)
    with pytest.raises(UserError, match=r": holds the working directory; choose another folder"):
        export.main(["--checkpoint", str(run), "--out", out, "--overwrite", "True"])
    assert (tmp_path / here).samefile(".")
