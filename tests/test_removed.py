"""A removed key is answered with what to do: in a recipe, on the command line and in a saved config."""

import dataclasses

import pytest

from jaxrl_llm.checkpoint.resume import check_resume
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.recipe.load import config_classes, load_recipe
from jaxrl_llm.recipe.overrides import apply_overrides
from jaxrl_llm.removed import REMOVED, removed_key

each_row = pytest.mark.parametrize("row", REMOVED, ids=lambda row: row.keys)


@each_row
def test_a_removed_key_is_in_no_config(row):
    classes = {cls.__name__: cls for cls in config_classes()}
    names = {key.rpartition(".")[2] for key in row.keys.split()}
    assert len(names) == 1 and not names & {field.name for field in dataclasses.fields(classes[row.owner])}
    assert row.instead.endswith(".") and len(row.instead) < 160


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
        tree = {group: [tree] if group in ("train", "eval", "models") else tree}
    return tree
