"""Recipes and the command line: find and load a recipe, --algo and --list; errors name file and line."""

import errno
import json
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import refusal

from jaxrl_llm import algos
from jaxrl_llm.algos import sft
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe import load
from jaxrl_llm.recipe.dump import dump
from jaxrl_llm.recipe.load import from_command_line

RECIPES = (
    "dapo_tiny.py",
    "dpo_smollm2.py",
    "dpo_tiny.py",
    "gkd_smollm2.py",
    "gkd_tiny.py",
    "grpo_agent_tiny.py",
    "grpo_async.py",
    "grpo_guess_tiny.py",
    "grpo_moe_tiny.py",
    "grpo_qwen.py",
    "grpo_qwen_gym.py",
    "grpo_qwen_sglang.py",
    "grpo_smollm2.py",
    "grpo_tiny.py",
    "grpo_tools_smollm2.py",
    "grpo_tools_tiny.py",
    "ppo_reward_tiny.py",
    "ppo_smollm2.py",
    "ppo_tiny.py",
    "reward_model_smollm2.py",
    "reward_model_tiny.py",
    "sft_smollm2.py",
    "sft_tiny.py",
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_packaged_recipes_are_sound_and_say_what_they_are(recipe, tmp_path):
    launch = from_command_line(["--config", recipe, "--run_dir", str(tmp_path)])
    assert launch.config.run_dir == str(tmp_path)
    text = Path(launch.recipe).read_text()
    assert all(part in text for part in ("Command:", "Hardware:", "Time:", "Expected:", f"--config {recipe}"))
    assert recipe.startswith(json.loads(json.dumps(dump(launch.config)))["algo"]["name"])


def test_the_recipes_are_those():
    assert tuple(path.name for path in load.packaged_recipes()) == RECIPES


def test_a_recipe_is_found_as_a_path_then_among_the_packaged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load.find_recipe("grpo_tiny.py") == load.packaged_dir().resolve() / "grpo_tiny.py"
    assert (
        load.find_recipe("grpo_tiny")
        == load.find_recipe("configs/grpo_tiny.py")
        == load.find_recipe("grpo_tiny.py")
    )
    (tmp_path / "grpo_tiny.py").write_text("")
    assert load.find_recipe("grpo_tiny.py") == tmp_path / "grpo_tiny.py"
    assert refusal(load.find_recipe, "grpo_tny.py") == (
        "--config grpo_tny.py: no such file, and no packaged recipe of that name. "
        f"Did you mean --config grpo_tiny.py? The packaged ones: {', '.join(RECIPES)}."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": no get_config(); a recipe defines get_config() and returns a TrainConfig."),
        (
            "def get_config():\n    return 3\n",
            ": get_config() returns a value of type int; a recipe defines get_config() and returns a "
            "TrainConfig.",
        ),
        (
            "from jaxrl_llm.config import TrainConfig\ndef get_config():\n    return TrainConfig(stpes=3)\n",
            ":3: TypeError: TrainConfig.__init__() got an unexpected keyword argument 'stpes'. "
            "Did you mean 'steps'?",
        ),
        (
            "from jaxrl_llm.config import OptimConfig\ndef get_config():\n    return OptimConfig(lr=3)\n",
            ":3: TypeError: OptimConfig.__init__() got an unexpected keyword argument 'lr'",
        ),
        (
            "def get_config():\n    3\n",
            ": get_config() returns nothing; a recipe defines get_config() and returns a TrainConfig.",
        ),
        ("x = (\n", ":1: SyntaxError: '(' was never closed"),
        ("x = 1\n\udce4 = 2\n", ":2: SyntaxError: (unicode error) 'utf-8' codec can't decode byte 0xe4"),
        ("import sys\nsys.exit(3)\n", ":2: SystemExit: 3; the file must not end the program"),
        ("def get_config():\n    raise KeyboardInterrupt\n", ":2: KeyboardInterrupt; the file must"),
        ("def get_config():\n    raise BaseException('x')\n", ":2: BaseException: x; the file must"),
        ("def get_config():\n    return get_config()\n", ":2: RecursionError: maximum recursion depth"),
        ("\nx = 1 / 0\n", ":2: ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_recipe_is_blamed_with_its_line(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text, errors="surrogateescape")
    assert refusal(load.load_recipe, path).startswith(f"--config: {path}{message}")


@pytest.mark.parametrize(
    ("algo", "problem"),
    [
        ("grpo", "grpo, not its settings: write algo=grpo.Config()."),
        ("grpo.Config", "grpo.Config, not its settings: write algo=grpo.Config()."),
        ("'rloo'", "'rloo', not its settings: write algo=rloo.Config()."),
        ("None", "None, not its settings: write algo=grpo.Config()."),
    ],
)
def test_an_algorithm_in_place_of_its_settings(tmp_path, algo, problem):
    path = tmp_path / "mine.py"
    path.write_text(
        "from jaxrl_llm.algos import grpo\nfrom jaxrl_llm.config import TrainConfig\n"
        f"def get_config():\n    return TrainConfig(algo={algo})\n"
    )
    assert refusal(load.load_recipe, path) == f"--config: {path}: algo is {problem}"


def test_settings_of_python_are_checked_as_a_recipe_is(config):
    (path,) = (path for path in load.packaged_recipes() if path.name == "grpo_tiny.py")
    run_dir = {"run_dir": config.run_dir}
    assert load.with_settings(path, run_dir).config == load.with_settings("grpo_tiny", run_dir).config
    problem = "algo is grpo, not its settings: write algo=grpo.Config()."
    assert refusal(load.with_settings, config, {"algo": algos.grpo}) == problem
    assert refusal(load.with_settings, replace(config, algo=algos.grpo), {}) == problem


def test_lists_and_numbers_of_numpy_in_a_recipe_are_those_of_python(config):
    shaping = (("format", 0.5),)
    expected = replace(config, steps=100, reward=replace(config.reward, shaping=shaping))
    given = replace(
        config,
        steps=np.int64(100),
        reward=replace(config.reward, shaping=[["format", np.float32(0.5)]]),
        data=replace(config.data, train=list(config.data.train)),
    )
    checked = load.with_settings(given, {}).config
    assert checked == expected and type(checked.steps) is int and hash(checked) == hash(expected)
    assert dump(checked) == dump(expected)


def test_none_is_none_or_no_value(config):
    for key, kind in {"run_dir": "text", "reward.name": "text", "steps": "a whole number"}.items():
        assert refusal(load.with_settings, config, {key: None}) == (
            f"--{key} is None: expected {kind}. Leave the key out for the recipe's value."
        )
    changed = load.with_settings(config, {"score.tokens_per_device": 64}).config
    assert load.with_settings(changed, {"score.tokens_per_device": None}).config == config
    assert load.with_settings(config, {"critic.mesh": None}).config == config


def test_a_broken_file_that_a_recipe_imports_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_neighbor.py").write_text("x = 1\ny = (\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text("import broken_neighbor\n")
    message = refusal(load.load_recipe, path)
    assert message == f"--config: {tmp_path}/broken_neighbor.py:2: SyntaxError: '(' was never closed"


def test_a_signal_ends_a_recipe_that_loops(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text("while True:\n    pass\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert re.match(rf"--config: {path}:[12]: KeyboardInterrupt", refusal(load.load_recipe, path))
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_exception_of_a_signal_handler_is_no_mistake_of_the_recipe(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("class Interrupted(SystemExit):\n    pass\nraise Interrupted(143)\n")
    with pytest.raises(SystemExit) as ended:
        load.load_recipe(path)
    assert ended.value.code == 143


NOT_PYTHON = "a recipe is a Python file that defines get_config(); --list shows some to start from"


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.json", "recipe.toml", "recipe", "weights.bin"])
def test_a_recipe_of_another_kind_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\x00\xff steps: 3")
    kind = path.suffix or "no .py"
    assert refusal(load.find_recipe, str(path)) == f"--config {path}: {kind} file; {NOT_PYTHON}."


def test_a_folder_is_no_recipe(tmp_path):
    (tmp_path / "a.py").write_text("")
    assert (
        refusal(load.find_recipe, str(tmp_path))
        == f"--config {tmp_path}: a folder; {NOT_PYTHON}. It has a.py."
    )
    assert refusal(load.find_recipe, "") == f"--config is empty; {NOT_PYTHON}."


def test_a_recipe_that_cannot_be_read_or_named(tmp_path, monkeypatch):
    assert refusal(load.find_recipe, "x" * 5000) == f"--config {'x' * 48}...{'x' * 48}: File name too long."
    assert "~no_such_user/recipe.py: no such file" in refusal(load.find_recipe, "~no_such_user/recipe.py")
    path = tmp_path / "mine.py"
    path.write_text("")

    def denied(self, *args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # root may read everything
    assert refusal(load.find_recipe, str(path)) == f"--config {path}: Permission denied."


ALGO = """
from dataclasses import dataclass
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.algos.contract import Algorithm
@dataclass(frozen=True)
class Config(AlgoConfig):
    sharpness: float = 2.0
def loss(inputs, config): ...
algorithm = Algorithm("mine", "", "tokens", Config(), loss)
"""


def test_algo_swaps_the_algorithm_before_the_overrides(tmp_path):
    run = ["--run_dir", str(tmp_path / "run")]
    tuned = from_command_line(["--config", "grpo_tiny.py", "--algo", "grpo", *run]).config.algo
    assert tuned == from_command_line(["--config", "grpo_tiny.py", *run]).config.algo
    plain = from_command_line(
        ["--config", "grpo_tiny.py", "--algo.aggregation", "token", "--algo", "sft", *run]
    )
    assert plain.config.algo == sft.Config(aggregation="token")
    mine = tmp_path / "mine.py"
    mine.write_text(ALGO)
    launch = from_command_line(["--config", "grpo_tiny", "--algo", str(mine), "--algo.sharpness", "3", *run])
    assert launch.config.algo.sharpness == 3.0
    assert dump(launch.config)["algo"] == {"name": str(mine), "sharpness": 3.0}


@pytest.mark.parametrize("name", sorted(algos.ALGOS))
def test_every_algorithm_is_known_to_the_command_line(name, tmp_path):
    """With its own settings, and those of an algorithm inside it (online DPO's pairs)."""
    teachers = {"distill": ["--algo.teachers", "t"], "gkd": ["--algo.teachers", "t"]}.get(name, [])
    line = ["--config", "grpo_tiny.py", "--algo", name, *teachers, "--run_dir", str(tmp_path / "run")]
    try:
        assert from_command_line(line).config.algo.algorithm == name
    except UserError as error:  # what else it needs, such as pairs
        assert "of no algorithm" not in str(error)


def test_a_key_inside_an_empty_list_is_told_how_to_begin():
    message = refusal(from_command_line, ["--config", "grpo_tiny.py", "--reward.shaping.0.weight", "1"])
    assert "begin with --reward.shaping " in message and "begin with --." not in message


def test_settings_that_another_algorithm_drops_are_said(tmp_path, capsys):
    line = ["--config", "dapo_tiny.py", "--run_dir", str(tmp_path)]
    from_command_line([*line, "--algo", "rloo"])
    assert capsys.readouterr().err == (
        "note: --algo rloo has its own defaults; dropped are the recipe's settings of dapo: max_draws 10. "
        "--algo.KEY VALUE sets them again\n"
    )
    from_command_line([*line, "--algo", "dapo"])
    assert capsys.readouterr().err == ""


def test_an_evaluation_of_the_recipes_data_beside_ones_own_is_noted(tmp_path, capsys):
    def notes(recipe, *argv):
        from_command_line(["--config", recipe, *argv, "--run_dir", str(tmp_path)])
        return capsys.readouterr().err

    mine = ("--data.path", "my.jsonl")
    assert notes("grpo_smollm2.py", *mine) == (
        "note: evaluated is the recipe's held-out data, gym:basic_arithmetic: --data.holdout 0.1 holds out a "
        "tenth of my.jsonl, --data.eval_path FILE names other data, --eval.every 0 turns evaluation off\n"
    )
    for more in ("--data.holdout=9", "--data.eval_path=a.json", "--data.eval.0.split=test", "--eval.every=0"):
        assert notes("grpo_smollm2.py", *mine, more) == ""
    assert notes("grpo_tiny.py", *mine) == notes("grpo_tiny.py", "--data.path", "task:arithmetic") == ""


def test_options_that_are_given_with_a_path_are_those_of_its_source(tmp_path):
    def sources(*argv, split="train"):
        line = ["--config", "grpo_tiny.py", "--run_dir", str(tmp_path), *argv]
        return from_command_line(line).config.data.sources(split)

    sums, options = ("--data.path", "task:arithmetic"), '{"digits": 1, "terms": 2}'
    assert [own.options for own in sources(*sums)] == [""]  # not the recipe's
    for key in ("data.train.0.options", "data.options"):
        (source,) = sources(*sums, f"--{key}", options, "--data.train.0.distinct", "True")
        assert (source.path, source.options, source.distinct) == ("task:arithmetic", options, True)
    (held_out,) = sources(*sums, "--data.train.0.options", options, split="eval")
    assert (held_out.options, held_out.split) == (options, "test")
    more = ("--data.train.0.options", options, "--data.train.1.path", "b.jsonl")
    assert [(own.path, own.options) for own in sources(*sums, *more)] == [
        ("task:arithmetic", options),
        ("b.jsonl", ""),
    ]
    (held_out,) = sources("--data.eval_path=my.jsonl", "--data.eval.0.prompt_key=question", split="eval")
    assert (held_out.path, held_out.prompt_key, held_out.split) == ("my.jsonl", "question", "test")
    message = refusal(sources, "--data.path", "my.jsonl", "--data.train.0.options", options)
    assert message.endswith("only task: and gym: sources have options.")

    settings = {"data.path": "task:arithmetic", "data.train.0.options": options, "run_dir": str(tmp_path)}
    assert load.with_settings("grpo_tiny.py", settings).config.data.sources("train")[0].options == options


def test_a_run_directory_below_the_home_is_one_path_for_all(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    expected = str(tmp_path / "runs/a")
    assert from_command_line(["--config", "grpo_tiny.py", "--run_dir=~/runs/a"]).config.run_dir == expected
    assert load.with_settings("grpo_tiny.py", {"run_dir": "~/runs/a"}).config.run_dir == expected
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_an_installation_without_recipes_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "packaged_dir", lambda: tmp_path / "none")
    message = refusal(load.find_recipe, "grpo_tiny.py")
    assert message.startswith("--config grpo_tiny.py: no such file. This installation has no recipes")
    assert load.list_text() == "recipes:"


def test_an_unknown_or_broken_algorithm_is_refused(tmp_path):
    config = TrainConfig()
    known = ", ".join(sorted(algos.ALGOS))
    assert refusal(load.with_algo, config, "grppo") == (
        f"--algo grppo: unknown algorithm. Did you mean --algo grpo? Known are {known}; your own is the path "
        "of a .py file."
    )
    assert refusal(load.with_algo, config, "SDPO") == (
        "--algo SDPO: unknown algorithm. There is none: its teacher has feedback in the prompt, and teachers "
        "here read the student's prompt (docs/algorithms.md)."
    )
    mine = tmp_path / "mine_broken.py"
    mine.write_text("x = y\n")
    assert refusal(load.with_algo, config, str(mine)) == (
        f"--algo: {mine}:1: NameError: name 'y' is not defined"
    )
    mine.write_text("raise SystemExit\n")
    assert refusal(load.with_algo, config, str(mine)).startswith(
        f"--algo: {mine}:1: SystemExit; the file must"
    )
    none = str(tmp_path / "none.py")
    assert refusal(load.with_algo, config, none) == f"--algo: there is no file {none}."


def test_list_and_no_config_show_the_recipes(capsys):
    with pytest.raises(SystemExit) as done:
        from_command_line(["--list"])
    assert done.value.code == 0
    listed = capsys.readouterr().out
    assert all(recipe in listed for recipe in RECIPES)
    assert "grpo_tiny.py           GRPO on generated" in listed
    assert "    dapo                   Decoupled clip and dynamic sampling: DAPO (arXiv 2503.14476" in listed
    message = refusal(from_command_line, [])
    assert message.startswith("--config RECIPE.py is missing.")
    assert "grpo_tiny.py" in message
