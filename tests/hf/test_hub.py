"""Uploads to the Hugging Face hub, against a client with the real client's signatures."""

import json
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from jaxrl_llm.__main__ import main
from jaxrl_llm.builders.exports import model_card, push_run
from jaxrl_llm.config import HubConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf import hub
from jaxrl_llm.hf.hub import GENERATED, PushError, check_repository, push_folder
from jaxrl_llm.recipe.fields import check_fields


@pytest.fixture
def api(monkeypatch):
    """The client; attribute `card` is the README.md that the hub has."""
    client = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    client.endpoint, client.card = "https://hf.example", None
    client.file_exists.side_effect = lambda repo, name: client.card is not None
    client.hf_hub_download.side_effect = lambda repo, name: client.card

    class Client(huggingface_hub.HfApi):
        def __new__(cls, token):
            assert token == "hf_secret"
            return client

    monkeypatch.setattr(huggingface_hub, "HfApi", Client)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(hub, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    return client


@pytest.fixture
def run_dir(tmp_path):
    described = {
        "recipe": "/home/me/secret_place/grpo_qwen.py",
        "config": {
            "algo": {"name": "/home/me/my_algo.py"}, "model": {"path": "Qwen/Qwen3-0.6B@" + "a" * 40},
            "steps": 20, "optim": {"learning_rate": 1e-6}, "lora": {"rank": 0}, "seed": 0,
        },
    }  # fmt: skip
    rows = [
        {"step": 0, "eval/pass@1": 0.25},
        {"step": 1, "reward/mean": 0.5},
        {"step": 20, "eval/pass@1": 0.75},
    ]
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    return tmp_path


def http_error(code):
    response = SimpleNamespace(status_code=code, headers={}, request=None)
    return HfHubHTTPError(f"{code} of the hub", response=response)


def test_a_run_is_pushed_with_its_card(api, run_dir, capsys):
    push_run(run_dir, HubConfig("me/model", private=True))
    api.create_repo.assert_called_once_with("me/model", private=True, exist_ok=True)
    sent = api.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["folder_path"]) == ("me/model", str(run_dir / "hf"))
    assert sent["delete_patterns"] == ["*.safetensors", "*.safetensors.index.json"]
    card = api.upload_file.call_args.kwargs["path_or_fileobj"].decode()
    assert card.startswith('---\nlibrary_name: "transformers"\n') and GENERATED in card
    assert capsys.readouterr().err == "pushed to https://hf.example/me/model\n"
    push_run(run_dir, HubConfig())
    assert api.create_repo.call_count == 1


def test_a_card_has_base_algorithm_recipe_and_metrics_and_no_local_path(run_dir):
    card = model_card(run_dir, "me/model", run_dir / "hf")
    assert 'base_model: "Qwen/Qwen3-0.6B"' in card and "- my_algo\n" in card and "\n# model\n" in card
    assert "| recipe | grpo_qwen.py |" in card and "| steps | 20 |" in card and "LoRA" not in card
    assert "| eval/pass@1 | 0.25 | 0.75 |" in card and "| reward/mean | 0.5 | 0.5 |" in card
    assert "/home" not in card and "license" not in card
    assert "base_model" not in model_card(run_dir / "nowhere", "me/model", run_dir / "hf")
    assert 'pipeline_tag: "text-generation"' in card
    (run_dir / "hf/config.json").write_text('{"vision_config": {}}')
    assert 'pipeline_tag: "image-text-to-text"' in model_card(run_dir, "me/model", run_dir / "hf")


def test_a_hub_that_cannot_be_reached_is_named_before_any_work(api, capsys):
    api.create_repo.side_effect = ConnectionError("refused")
    with pytest.raises(
        PushError, match=r"me/model: ConnectionError: refused. The hub \(https://hf.example\)"
    ):
        check_repository("me/model", private=False)
    assert "me/model: ConnectionError: refused; tried again in 0 s" in capsys.readouterr().err
    api.create_repo.side_effect = OfflineModeIsEnabled("offline")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so nothing can be uploaded"):
        check_repository("me/model", private=False)
    assert api.create_repo.call_count == 5  # the second time once


def test_errors_that_may_pass_are_tried_again(api, tmp_path):
    api.upload_folder.side_effect = [http_error(503), ConnectionError("reset"), mock.DEFAULT]
    assert (
        push_folder(tmp_path, "me/model", False, "card", message="message") == "https://hf.example/me/model"
    )
    assert api.upload_folder.call_count == 3


def test_a_failed_upload_leaves_the_folder_and_names_the_command(api, run_dir):
    api.upload_folder.side_effect = http_error(500)
    with pytest.raises(PushError) as failed:
        push_run(run_dir, HubConfig("me/model"))
    assert api.upload_folder.call_count == 4 and (run_dir / "hf" / "config.json").exists()
    command = f"python -m jaxrl_llm export --checkpoint {run_dir} --out FOLDER --push me/model"
    assert "500 of the hub" in str(failed.value) and str(failed.value).endswith(command)


@pytest.mark.parametrize("code", [401, 403, 404])
def test_a_refusal_is_not_tried_again(api, code):
    api.create_repo.side_effect = http_error(code)
    with pytest.raises(UserError, match=r"the hub refuses me/model .*HF_TOKEN"):
        check_repository("me/model", private=False)
    assert api.create_repo.call_count == 1


def test_a_card_of_the_users_own_is_kept(api, tmp_path):
    api.card = tmp_path / "README.md"
    for text, uploads in (("my own", 0), (f"old\n{GENERATED}\n", 1)):
        api.card.write_text(text)
        push_folder(tmp_path, "me/model", False, "card", message="message")
        assert api.upload_file.call_count == uploads


def test_a_missing_token_and_a_wrong_name_are_named(api, monkeypatch):
    with pytest.raises(UserError, match="--push is 'a/b/c': it must be the name of a repository, ORG/NAME"):
        check_fields(HubConfig("a/b/c"))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="set the environment variable HF_TOKEN"):
        check_repository("me/model", private=False)


@pytest.mark.slow
def test_runs_and_exports_push(api, tmp_path, capsys):
    run_dir = tmp_path / "run"
    settings = ["--steps", "1", "--eval.every", "0", "--run_dir", str(run_dir), "--hub.push", "me/model"]
    assert main(["train", "--config", "sft_tiny.py", *settings]) == 0
    assert api.upload_folder.call_args.kwargs["folder_path"] == str(run_dir / "hf")
    assert api.create_repo.call_count == 2  # before the first step, too
    out = ["--checkpoint", str(run_dir), "--out", str(tmp_path / "out"), "--push", "me/other"]
    assert main(["export", *out]) == 0
    assert api.upload_folder.call_args.kwargs["folder_path"] == str(tmp_path / "out")
    assert "pushed to https://hf.example/me/other" in capsys.readouterr().out
    api.upload_folder.side_effect = http_error(500)
    assert main(["export", *out, "--overwrite", "True"]) == 1
    assert (tmp_path / "out" / "config.json").exists()
