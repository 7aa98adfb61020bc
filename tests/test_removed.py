"""A removed key is answered with what to do: in a recipe, on the command line and in a saved config."""

import dataclasses
import re

import pytest

from jaxrl_llm import algos
from jaxrl_llm.checkpoint.resume import check_resume
from jaxrl_llm.config import (
    DataConfig,
    RewardConfig,
    RewardModelConfig,
    SourceConfig,
    TrainConfig,
    WarmStartConfig,
)
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.recipe.keys import iter_configs
from jaxrl_llm.recipe.load import config_classes, load_recipe
from jaxrl_llm.recipe.overrides import apply_overrides
from jaxrl_llm.removed import REMOVED, removed_key

LISTS = ("train", "eval", "models", "sources")
each_row = pytest.mark.parametrize("row", REMOVED, ids=lambda row: row.keys)


@each_row
def test_a_removed_key_is_in_no_config(row):
    classes = {cls.__name__: cls for cls in config_classes()}
    names = {key.rpartition(".")[2] for key in row.keys.split()}
    assert len(names) == 1 and not names & {field.name for field in dataclasses.fields(classes[row.owner])}
    assert row.instead.endswith(".") and len(row.instead) < 160


@each_row
def test_a_row_has_every_key_of_its_field(row):
    source = (SourceConfig(),)
    whole = TrainConfig(
        data=DataConfig(train=source, eval=source),
        warm_start=WarmStartConfig(sources=source),
        reward=RewardConfig(models=(RewardModelConfig(),)),
    )
    configs = [dataclasses.replace(whole, algo=algorithm.config) for algorithm in algos.ALGOS.values()]
    parts = [part for config in configs for part in iter_configs(config)]
    field = row.keys.rpartition(".")[2]
    keys = {
        re.sub(r"\.\d+(?=\.)", "", f"{prefix}{field}")
        for prefix, part in parts
        if row.owner in {cls.__name__ for cls in type(part).__mro__}
    }
    assert row.owner == "ToolsConfig" or keys == set(row.keys.split())


@each_row
def test_the_command_line_names_what_to_do(row):
    for key in row.keys.split():
        with pytest.raises(ConfigError) as error:
            apply_overrides(TrainConfig(), [(key, ["1"])])
        assert str(error.value) == f"--{key}: this key was removed. {row.instead}"


def test_a_shortened_key_and_a_key_of_a_list_are_found():
    assert removed_key("algo.loss-cap") is removed_key("algo.loss_cap") is not None
    assert removed_key("loss_cap") is None and removed_key("critic.loss_cap") is None


def test_a_recipe_names_what_to_do(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from jaxrl_llm.config import LogConfig, TrainConfig\n"
        "def get_config():\n    return TrainConfig(log=LogConfig(directory='x'))\n"
    )
    with pytest.raises(ConfigError, match=r"'directory'\. This key was removed\. Set WANDB_DIR"):
        load_recipe(recipe)


@each_row
def test_a_saved_run_continues_unless_the_key_had_an_effect(row):
    for key in row.keys.split():
        assert check_resume(saved(key, row.neutral), saved(key), 5) == []
        line = f'"other"; this key was removed. {row.instead}'
        if row.continues:
            assert check_resume(saved(key, "other"), saved(key), 5)[0].endswith(line)
            continue
        with pytest.raises(UserError) as error:
            check_resume(saved(key, "other"), saved(key), 5)
        assert line in str(error.value)


def saved(key: str, *value) -> dict:
    """Return the part of a saved config that has the key, with or without it."""
    *groups, name = key.split(".")
    tree = {name: value[0]} if value else {}
    for group in reversed(groups):
        tree = {group: [tree] if group in LISTS else tree}
    return tree
