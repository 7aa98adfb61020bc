"""Upload of an export to the hub, with a fake of its client."""

from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest

from jaxrl_llm.build.exports import check_export_folders, push_model
from jaxrl_llm.config import CheckpointConfig, TrainConfig
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.hf.upload import check_upload


class FakeHub:
    """Records the calls of `HfApi`."""

    calls: ClassVar = []

    def __getattr__(self, name):
        def call(*args, **settings):
            self.calls.append((name, *args, settings))
            return SimpleNamespace(commit_url="https://hub/commit/1")

        return call


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(FakeHub, "calls", [])
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    return FakeHub


def run_of(tmp_path, name):
    return TrainConfig(run_dir=str(tmp_path), checkpoint=CheckpointConfig(push_to_hub=name))


def test_the_export_is_one_commit_of_a_private_repository(hub, tmp_path, capsys):
    push_model(run_of(tmp_path, "me/model@trial"), 7)
    assert hub.calls == [
        ("create_repo", "me/model", {"private": True, "exist_ok": True}),
        ("create_branch", "me/model", {"branch": "trial", "exist_ok": True}),
        (
            "upload_folder",
            dict(
                repo_id="me/model", folder_path=tmp_path / "hf", revision="trial",
                commit_message=f"Step 7 of {tmp_path}",
            ),
        ),
    ]  # fmt: skip
    assert capsys.readouterr().err == "uploaded: https://hub/commit/1\n"
    hub.calls.clear()
    push_model(run_of(tmp_path, "me/model"), 7)
    assert [name for name, *_ in hub.calls] == ["create_repo", "upload_folder"]
    assert "revision" not in hub.calls[1][1]
    push_model(run_of(tmp_path, ""), 7)
    assert len(hub.calls) == 2


def test_what_cannot_be_uploaded_is_refused_before_the_run(hub, monkeypatch, tmp_path):
    check_export_folders(run_of(tmp_path, "me/model"))
    for name in ("./model", "me/model/file.gguf", "a/b/c"):
        with pytest.raises(UserError, match=f"--checkpoint.push_to_hub {name}: no hub name. Set one such as"):
            check_export_folders(run_of(tmp_path, name))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(
        UserError, match=r"--push_to_hub me/model: there is no token of the hub\. Run `hf auth"
    ):
        check_upload("push_to_hub", "me/model")


def test_a_hub_that_refuses_leaves_the_folder(hub, monkeypatch, tmp_path):
    def refuse(*args, **settings):
        raise OSError("403 Forbidden\nlong text")

    monkeypatch.setattr(FakeHub, "upload_folder", refuse, raising=False)
    with pytest.raises(
        RunError, match=r"hf is not on the hub as me/model \(OSError: 403 Forbidden\)\. Upload"
    ):
        push_model(run_of(tmp_path, "me/model"), 7)
