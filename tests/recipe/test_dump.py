"""The config as JSON: complete, the same in any environment, and without secrets."""

import dataclasses
import json
from dataclasses import replace

from jaxrl_llm.algos import grpo
from jaxrl_llm.algos.config import ClippedConfig
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.recipe.dump import describe_run, dump


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


def test_a_key_in_the_address_of_a_service_reaches_no_file_of_a_run(config):
    url = "https://host/score?api_key=hunter2hunter2"
    reward = replace(config.reward, name=url, shaping=((url, 0.5),))
    config = replace(config, reward=reward, eval=replace(config.eval, judge=url))
    run = describe_run(config, "r.py", ["--reward.name", url, f"--eval.judge={url}"])
    assert "hunter2" not in json.dumps([run, dump(config)])
    assert run["config"]["reward"]["name"] == "https://host/score?api_key=***"
