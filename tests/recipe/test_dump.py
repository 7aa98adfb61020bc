"""The config as JSON: complete, the same in any environment, and without secrets."""

import dataclasses
import json
from dataclasses import replace

import pytest

from jaxrl_llm.algos import grpo
from jaxrl_llm.algos.config import ClippedConfig
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.recipe.dump import describe_run, dump, mask_secrets, mask_text


def test_the_dump_is_json_and_complete(config):
    tree = json.loads(json.dumps(dump(config), allow_nan=False))
    assert {f.name for f in dataclasses.fields(TrainConfig)} == set(tree)
    as_json = json.loads(json.dumps(dataclasses.asdict(grpo.Config())))
    assert tree["algo"] == {"name": as_json.pop("algorithm"), **as_json}
    assert tree["model"]["architecture"]["max_position"] == 64
    assert tree["data"]["train"][1]["path"] == "b.jsonl"
    assert dump(replace(config, max_runtime=float("inf")))["max_runtime"] == "inf"


@dataclasses.dataclass(frozen=True)
class Secretive(ClippedConfig):
    api_key: str = "abc123"
    auth_token: str = "abc123"
    password: str = ""
    stop_tokens: str = "kept"
    prompt_key: str = "kept"


def test_secrets_are_masked(config, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2hunter2")
    config = replace(config, algo=Secretive(), model=replace(config.model, path="https://u:p4ss@host/m"))
    run = describe_run(config, "r.py", ["--model.path", "https://u:p4ss@host/m", "--x", "a=hunter2hunter2"])
    text = json.dumps(run)
    assert "p4ss" not in text
    assert "hunter2" not in text
    assert "abc123" not in text
    algo = run["config"]["algo"]
    assert [algo[k] for k in ("api_key", "auth_token", "password", "stop_tokens", "prompt_key")] == (
        ["***", "***", "", "kept", "kept"]
    )
    assert run["command"] == ["--model.path", "https://***@host/m", "--x", "a=***"]
    assert run["versions"]["jax"].count(".") >= 2


def test_the_environment_does_not_change_what_a_resumed_run_is_compared_with(config, monkeypatch):
    before = dump(config)
    monkeypatch.setenv("MY_TOKEN", "task:arithmetic")
    assert dump(config) == before


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:p4ss@host/m and http://t0ken@h", "https://***@host/m and http://***@h"),
        ("--tp 2 --api-key s3cret --admin-api-key=x", "--tp 2 --api-key *** --admin-api-key=***"),
        ("--max-total-tokens 9", "--max-total-tokens 9"),
        ("a@b.c //x:y", "a@b.c //x:y"),
    ],
)
def test_logins_and_keys_are_masked_in_any_text(text, masked):
    assert mask_text(text) == masked


def test_only_whole_long_secrets_are_masked_in_texts():
    environment = {
        "A_TOKEN": "short",
        "B_KEY": "plain12345",
        "API_KEY": "s3cr.t(long",
        "DB_PASSWORD": "12345678",
    }
    tree = {"a": ["short", "plain12345", "=s3cr.t(long;", "x12345678", "12345678", 12345678, None, True]}
    assert mask_secrets(tree, environment) == {
        "a": ["short", "plain12345", "=***;", "x12345678", "***", 12345678, None, True]
    }
