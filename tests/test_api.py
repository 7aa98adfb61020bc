"""The Python API: a run with a reward function and rows from memory, then responses of its model."""

import gc
import json
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm import api
from jaxrl_llm.api import RunResult, write_rows
from jaxrl_llm.configs import grpo_qwen, grpo_tiny
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.train import Ended

ROWS = [
    {"messages": [{"role": "user", "content": f"{a} + {b} ="}], "answer": str(a + b)}
    for a in range(5)
    for b in range(5)
]
SHORT = {"steps": 1, "prompts_per_step": 4, "responses_per_prompt": 4, "warm_start.steps": 0}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    seen = "7"

    def contains_seven(prompts, completions, answer, **columns):
        """A closure, with TRL's signature for chats; `answer` is a column of the rows."""
        assert all(a.isdigit() for a in answer)
        return [float(seen in completion[0]["content"]) for completion in completions]

    before = live_bytes()
    ended = jaxrl_llm.run(
        "grpo_tiny.py",
        reward=contains_seven,
        data=ROWS,
        eval_data=ROWS[:8],
        run_dir=str(tmp_path_factory.mktemp("api") / "run"),
        **SHORT,
        **{"eval.every": 1, "eval.prompts": 8, "log.tensorboard": False},
    )
    assert live_bytes() <= before + 1000  # the next run of a notebook has the memory of this one
    return ended


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
def test_a_run_returns_its_metrics_samples_and_model(result):
    assert (result.steps, result.stopped) == (1, "")
    assert [row["kind"] for row in result.metrics] == ["start", "train"]
    assert 0 <= result.metrics[-1]["reward/mean"] <= 1
    assert result.metrics[-1]["reward/failed_fraction"] == 0
    assert any(sample.get("eval") for sample in result.samples)
    for sample in result.samples:
        assert sample["reward"] == float("7" in sample["response"])
        if sample.get("eval"):  # no update has read it
            continue
        tokens = sample["per_token"]  # of the update: one mini-batch, whose old log-probs are its own
        assert len(tokens["text"]) == sample["response_tokens"] and tokens["trained"] == 1
        assert tokens["logprobs"] == pytest.approx(tokens["rollout_logprobs"], rel=1e-3)
        assert np.abs(tokens["mismatch"]).max() <= result.metrics[-1]["mismatch/max_abs"] * 1.001
    assert json.loads((result.run_dir / "config.json").read_text())["recipe"].endswith("grpo_tiny.py")
    assert result.curve.is_file()


@pytest.mark.slow
def test_a_run_cannot_be_continued_with_other_rows(result):
    """Rows are files named by their content, so the setting data.path differs."""
    (file,) = (result.run_dir / "data").glob("train_*.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == ROWS
    arguments = {
        "reward": len,
        "eval_data": ROWS[:8],
        "run_dir": str(result.run_dir),
        **SHORT,
        "steps": 2,
        "eval.every": 1,
    }
    with pytest.raises(UserError, match=r"data\.path: was .*train_\w+\.jsonl"):
        jaxrl_llm.run("grpo_tiny.py", data=ROWS[1:], **arguments, **{"eval.prompts": 8})


@pytest.mark.slow
def test_a_finished_run_is_not_returned_for_another_reward(result):
    """A cell whose reward was edited and run again would show the old results."""
    name = json.loads((result.run_dir / "config.json").read_text())["config"]["reward"]["name"]
    assert re.fullmatch(r"Python function contains_seven, [0-9a-f]{12}", name)

    def contains_seven(sample):
        return float("7" in sample.response)

    message = r"has a finished run of another reward \(Python function contains_seven, .*Set another run_dir"
    with pytest.raises(UserError, match=message):
        jaxrl_llm.run("grpo_tiny.py", reward=contains_seven, run_dir=str(result.run_dir), **SHORT)


@pytest.fixture
def executed(monkeypatch):
    """Return a list that gets the config of each run, in place of the run."""
    configs = []

    def execute(resolved, reward=None):
        configs.append(resolved.config)
        return Ended(None, 0, "SIGINT")

    monkeypatch.setattr(api, "execute", execute)
    return configs


def test_a_run_without_a_recipe_has_the_settings_of_grpo_qwen(executed, tmp_path, capsys):
    reward = lambda sample: 1.0
    jaxrl_llm.run(model="org/mine", data=ROWS, reward=reward, run_dir=str(tmp_path), steps=3)
    (config,), expected = executed, grpo_qwen.get_config()
    assert config.algo == expected.algo and config.optim == expected.optim and config.steps == 3
    assert config.model == replace(expected.model, path="org/mine")
    (source,) = config.data.sources("train")
    assert source.path.startswith(str(tmp_path / "data" / "train_")) and source.subset == ""
    assert config.data.chat.system_prompt == ""  # it belongs to GSM8K and its reward
    assert config.reward.name.startswith("Python function <lambda>")
    notes = capsys.readouterr().err
    assert "no recipe is named, so settings come from grpo_qwen.py" in notes
    assert "the recipe's system prompt" in notes and "is left out" in notes
    assert "best_metric" not in notes  # no evaluation, and so nothing to rank by


def test_a_note_is_printed_once(executed, tmp_path, capsys):
    own = {"lora.alpha": 3.0}
    jaxrl_llm.run("grpo_qwen.py", data=ROWS, eval_data=ROWS, reward=len, run_dir=str(tmp_path), **own)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert sum("--lora.alpha has no effect" in line for line in lines) == 1
    assert len(set(lines)) == len(lines)


def test_settings_of_the_chat_are_kept_beside_rows(executed, tmp_path):
    own = {"data.chat.system_prompt": "Add."}
    jaxrl_llm.run("grpo_qwen.py", data=ROWS, reward=len, run_dir=str(tmp_path), **own)
    assert executed[0].data.chat.system_prompt == "Add."


def test_a_stopped_run_says_how_to_get_a_model(tmp_path):
    stopped = RunResult(tmp_path, 3, "SIGINT", [], samples=[])
    with pytest.raises(UserError, match=r"stopped by SIGINT after step 3 .* the same call continues it"):
        _ = stopped.model


@pytest.mark.slow
def test_the_model_generates(result):
    chat = [{"role": "user", "content": "1 + 1 ="}]
    responses = jaxrl_llm.generate(result.model, ["1 + 1 =", chat, {"prompt": "2"}], n=2, max_tokens=3)
    assert [len(each) for each in responses] == [2, 2, 2]
    for response in (r for each in responses for r in each):
        assert len(response.tokens) == len(response.logprobs) <= 3
        assert (response.logprobs < 0).all()
    again = jaxrl_llm.generate(str(result.model), [chat], n=2, max_tokens=3)
    assert jaxrl_llm.generate(result.model, [chat], n=2, max_tokens=3)[0][1].text == again[0][1].text


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("grpo_tny.py",), {}, "Did you mean --config grpo_tiny.py"),
        ((3,), {}, "a recipe is a name, a path or a TrainConfig, not 3"),
        (("grpo_tiny.py",), {"stepz": 5}, "--stepz: unknown key. Did you mean --steps"),
        (("grpo_tiny.py",), {"steps": "many"}, "--steps: expected a whole number, got 'many'"),
        (("grpo_tiny.py",), {"algo": "grppo"}, "--algo grppo: unknown algorithm"),
        (("grpo_tiny.py",), {"data": []}, "data: the list of rows is empty"),
        (("grpo_tiny.py",), {"data": [{"prompt": {1, 2}}]}, "row 0, column prompt cannot be written as JSON"),
        (("grpo_tiny.py",), {"data": [3]}, "data: row 0 is 3: expected a dict of columns"),
        (("grpo_tiny.py",), {"data": "my.jsonl"}, "data: str given, a list of rows (dicts) expected; the"),
        (("grpo_tiny.py",), {"data": ROWS, "epochs": 2}, "--steps and --epochs are both given"),
        (("grpo_tiny.py",), {"data": ROWS, "data.holdout": 25}, "--data.holdout 25: the files have 25 rows"),
        (("grpo_tiny.py",), {"data": ROWS, "data.train.1.path": "none.jsonl"}, "none.jsonl"),
        (
            ("grpo_tiny.py",),
            {"eval_data": ROWS, "data.eval.0.path": "a.jsonl", "data.eval.1.path": "none.jsonl"},
            "none.jsonl",
        ),
        (("grpo_tiny.py",), {"reward": "exact"}, "reward: 'exact' is not a function; a built-in reward is"),
        (("grpo_tiny.py",), {"reward": lambda: 1.0, "data": ROWS}, "reward"),
        (("grpo_tiny.py",), {"model": 3}, "model: 3 is not the path of a model or its hub name"),
    ],
)
def test_mistakes_are_user_errors(arguments, settings, message, tmp_path):
    with pytest.raises(UserError) as error:
        jaxrl_llm.run(*arguments, run_dir=str(tmp_path), **SHORT | settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("temprature", "generate: temprature: unknown setting. Did you mean temperature?"),
        ("max_token", "generate: max_token: unknown setting. Did you mean max_tokens?"),
        ("xyzzy", "generate: xyzzy: unknown setting. Known are "),
    ],
)
def test_a_misspelt_setting_of_generate_is_answered_with_the_nearest(setting, message):
    with pytest.raises(UserError, match=re.escape(message)):
        jaxrl_llm.generate("models/none", ["1"], **{setting: 1})


def test_lists_and_numbers_of_numpy_are_settings_of_generate(tmp_path):
    settings = {"stop": ["\n"], "max_tokens": np.int64(4), "temperature": np.float32(0.5)}
    with pytest.raises(UserError, match="no such folder"):  # after the settings
        jaxrl_llm.generate(tmp_path / "none", ["1"], **settings)


def test_rows_of_tables_are_written_as_rows_of_files_are(tmp_path):
    row = {
        "prompt": "1 + 1 =",
        "answer": np.int64(2),
        "level": np.float32(0.5),
        "ids": np.arange(2),
        "ok": np.True_,
    }
    (line,) = write_rows([row], tmp_path, "train").read_text().splitlines()
    assert line == '{"prompt": "1 + 1 =", "answer": 2, "level": 0.5, "ids": [0, 1], "ok": true}'
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"prompt": ["a", "b"], "answer": [1, 2], "day": pandas.Timestamp(0)})
    with pytest.raises(
        UserError, match=r"row 0 is 'prompt': expected a dict .*; df.to_dict\(\"records\"\) makes"
    ):
        write_rows(table, tmp_path, "train")
    with pytest.raises(
        UserError, match=r"data: row 0, column day cannot be written as JSON: .*Timestamp is not"
    ):
        write_rows(table.to_dict("records"), tmp_path, "train")
    with pytest.raises(
        UserError, match=r"data: row 1, column answer cannot be written as JSON: .*bytes is not"
    ):
        write_rows([{"answer": "1"}, {"prompt": "1", "answer": b"1"}], tmp_path, "train")


@pytest.mark.slow
def test_a_config_is_a_recipe_and_a_wrong_setting_of_generate_is_named(result, tmp_path):
    with pytest.raises(ConfigError, match=r"--optim.b1 is 1.0"):
        jaxrl_llm.run(grpo_tiny.get_config(), run_dir=str(tmp_path), **{"optim.b1": 1.0})
    with pytest.raises(ConfigError, match=r"--temperature is -1"):
        jaxrl_llm.generate(result.model, ["1"], temperature=-1.0)
    with pytest.raises(UserError, match="prompt 0"):
        jaxrl_llm.generate(result.model, [{"text_": "1"}])
    with pytest.raises(UserError, match="prompt 1 is 5: expected text, a chat or a row"):
        jaxrl_llm.generate(result.model, ["1", 5])
    with pytest.raises(UserError, match="a list of prompts is expected"):
        jaxrl_llm.generate(result.model, "1 + 1 =")
    with pytest.raises(AttributeError, match="it has generate, run"):
        _ = jaxrl_llm.train_model


def test_a_finished_run_whose_config_is_damaged_is_named(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    for damaged in ("{", '{"recipe": ""}'):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(UserError, match=rf"{tmp_path}/config\.json: "):
            api.refuse_other_reward(tmp_path, "Python function f", 3)
