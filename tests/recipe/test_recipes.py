"""Recipes and the command line: which there are, --algo, --help and --list, and whom an error blames."""

import inspect
import json
import re
from pathlib import Path

import pytest
from test_config import refusal

from jaxrl_llm import algos
from jaxrl_llm.algos import sft
from jaxrl_llm.config import EvalConfig, LogConfig, ModelConfig, TrainConfig, WarmStartConfig, dump
from jaxrl_llm.recipe import load
from jaxrl_llm.recipe.load import from_command_line
from jaxrl_llm.recipe.overrides import leaves

RECIPES = (
    "dapo_tiny.py",
    "dpo_tiny.py",
    "gkd_tiny.py",
    "grpo_async.py",
    "grpo_guess_tiny.py",
    "grpo_qwen.py",
    "grpo_qwen_gym.py",
    "grpo_qwen_sglang.py",
    "grpo_tiny.py",
    "grpo_tools_tiny.py",
    "ppo_reward_tiny.py",
    "ppo_tiny.py",
    "reward_model_tiny.py",
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
    assert tuple(path.name for path in load.packaged()) == RECIPES


def test_a_recipe_is_found_as_a_path_then_among_the_packaged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load.find("grpo_tiny.py") == load.packaged_dir().resolve() / "grpo_tiny.py"
    assert load.find("grpo_tiny") == load.find("configs/grpo_tiny.py") == load.find("grpo_tiny.py")
    (tmp_path / "grpo_tiny.py").write_text("")
    assert load.find("grpo_tiny.py") == tmp_path / "grpo_tiny.py"
    assert refusal(load.find, "grpo_tny.py") == (
        "--config grpo_tny.py: no such file, and no packaged recipe of that name. "
        f"Did you mean --config grpo_tiny.py? The packaged ones: {', '.join(RECIPES)}."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": no get_config(); a recipe defines get_config() and returns a TrainConfig."),
        (
            "def get_config():\n    return 3\n",
            ": get_config() returns 3; a recipe defines get_config() and returns a TrainConfig.",
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
        ("x = (\n", ":1: SyntaxError: '(' was never closed"),
        ("\nx = 1 / 0\n", ":2: ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_recipe_is_blamed_with_its_line(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert refusal(load.load, path).startswith(f"{path}{message}")


ALGO = """
from dataclasses import dataclass
from jaxrl_llm.algos.contract import AlgoConfig
INPUT = "tokens"
@dataclass(frozen=True)
class Config(AlgoConfig):
    sharpness: float = 2.0
def loss(inputs, config): ...
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


def test_an_unknown_or_broken_algorithm_is_refused(tmp_path):
    config = TrainConfig()
    known = ", ".join(sorted(algos.ALGOS))
    assert refusal(load.with_algo, config, "grppo") == (
        f"--algo grppo: unknown algorithm. Did you mean --algo grpo? There are {known}; your own is the path "
        "of a .py file."
    )
    mine = tmp_path / "mine_broken.py"
    mine.write_text("x = y\n")
    assert (
        refusal(load.with_algo, config, str(mine)) == f"--algo: {mine}:1: NameError: name 'y' is not defined"
    )
    assert "not a Python file" in refusal(load.with_algo, config, str(tmp_path / "none.py"))


def test_help_lists_every_field_with_doc_and_the_recipes_value(capsys):
    with pytest.raises(SystemExit) as done:
        from_command_line(["--config", "grpo_tiny.py", "--help", "--steps", "77"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    words = " ".join(text.replace("\u2502", " ").split())
    assert "--algo.kl_coef FLOAT Weight of KL(policy || reference); 0" in words
    assert "(default: 77)" in words
    config = load.load(load.find("grpo_tiny.py"))
    keys = [key for key, leaf in leaves(config) if leaf.value != () or "sources" not in key]
    short = [key.replace("rollout.sampling.", "rollout.") for key in keys]
    missing = [
        a for a, b in zip(keys, short, strict=True) if f"--{a} " not in words and f"--{b} " not in words
    ]
    in_recipes_only = {"data.eval", "critic.mesh", "reward.models"}  # whole parts, empty here
    assert [key for key in missing if key not in in_recipes_only] == []


@pytest.mark.parametrize("cls", [TrainConfig, ModelConfig, EvalConfig, WarmStartConfig, LogConfig])
def test_every_field_of_a_plain_type_has_a_doc(cls):
    lines = inspect.getsource(cls).splitlines()
    for i, line in enumerate(lines):
        if re.match(r"    \w+: (int|float|str|bool|tuple|Literal)", line):
            assert lines[i + 1].startswith('    """'), line


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
