"""Rewards and data of TRL's trainers."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_import.fields import Conversion
from jaxrl_import.python_file import FILE_FORMATS
from jaxrl_import.values import items, printable, source_path

OF_MATH = (
    "here math, by the same library: TRL counts LaTeX alone (\\boxed{{4}}, $4$), math a plain number, too; "
    "TRL leaves out a row whose solution it cannot read. TRL's own is --reward.name FILE.py:{}, with "
    "`from trl.rewards import {}` in that file"
)
REWARDS = {  # TRL's own functions -> reward here
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
}
SHAPING = {"think_format_reward": "format", "get_soft_overlong_punishment": "overlong"}


SLICE = re.compile(r"(\w+)\[.*\]")
"""Split of load_dataset that is a part of one: train[:5%]."""
OVERLONG = {"max_completion_len": 1280, "soft_punish_cache": 256}
"""Arguments of TRL's get_soft_overlong_punishment, with the values in its script."""


def put_rewards(conv: Conversion) -> None:
    """Set the main reward, what shapes it, and reward models."""
    functions = [name for name in conv.get("reward_funcs") or () if name]
    weights = [float(weight) for weight in conv.get("reward_weights") or ()] or [1.0] * len(functions)
    if len(weights) != len(functions):
        conv.refuse("reward_weights", f"{len(weights)} weights of {len(functions)} rewards: one for each")
    shaping, models, main = [], [], ""
    # The first function is the main reward; others shape it, and models are added.
    for name, weight in zip(functions, weights, strict=False):
        short = name.partition("(")[0].rpartition(".")[2]
        if short in SHAPING:
            shaping.append((SHAPING[short], weight))
            if SHAPING[short] == "overlong":
                _overlong(conv, name)
        elif "/" in name and not name.endswith(".py") and ".py:" not in name:
            models.append((name, weight))
        elif not main:
            main = _reward(conv, name, short)
            conv.put("reward.name", main, "reward_funcs")
            if weight != 1.0:
                conv.put("reward.weight", weight, "reward_weights")
        else:
            shaping.append((_reward(conv, name, short), weight))
    # Reward models, and rewards that shape the main one.
    for key in ("reward_model_name_or_path", "reward_model_path"):
        if conv.is_set(key):
            models.append((conv.get(key), 1.0))
    keys = ("reward_funcs", "reward_model_name_or_path", "reward_model_path")
    for i, (path, weight) in enumerate(models):
        conv.put(f"reward.models.{i}.path", path, *keys)
        if weight != 1.0:
            conv.put(f"reward.models.{i}.weight", weight, "reward_weights")
    if models and not main:
        conv.put("reward.name", "none", note="reward models alone reward")
    if shaping:
        conv.put("reward.shaping", tuple(shaping), "reward_funcs", "reward_weights")
    if conv.value_of("algo.advantage", conv.algo) == "gdpo" and any(weight != 1.0 for weight in weights):
        # Each reward has its weight, so its sign, before it is normalized: the size is left for afterwards.
        sizes = [conv.value_of("reward.weight", 1.0), *(weight for _, weight in shaping)]
        sizes += [weight for _, weight in models]
        conv.put("algo.component_weights", tuple(map(abs, sizes)), "reward_weights")


def _reward(conv: Conversion, name: str, short: str) -> str:
    """Return the reward here for a function of TRL or of the user."""
    if short not in REWARDS:
        return _function(name)
    text = OF_MATH.format(short, short)
    if short == "reasoning_accuracy_reward":
        text += "; it reads the text after </think> alone, without which a response scores 0"
    conv.lose("reward_funcs", text)
    return REWARDS[short]


def _overlong(conv: Conversion, name: str) -> None:
    """Set the range of the penalty of long responses: it grows over the last soft_punish_cache tokens."""
    arguments = dict(OVERLONG)
    if "(" in name:
        call = ast.parse(name, mode="eval").body
        given = [*zip(OVERLONG, call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
        for key, node in given:
            if isinstance(node, ast.Constant) and key in arguments:
                arguments[key] = node.value
            else:
                conv.lose("reward_funcs", f"{key} of get_soft_overlong_punishment is only known at run time")
    longest, cache = arguments.values()
    conv.put("reward.overlong_from", longest - cache, note="TRL's get_soft_overlong_punishment")
    conv.put("reward.overlong_to", longest, note="TRL's get_soft_overlong_punishment")


def _function(name: str) -> str:
    """Return module.function of Python as file.py:function."""
    if ":" in name or name.endswith(".py"):
        return name
    module, _, function = name.rpartition(".")
    return f"{module.replace('.', '/')}.py:{function}" if module else f"FILE.py:{name}"


def put_data(conv: Conversion) -> None:
    """Set the training and evaluation sources."""
    evaluated = conv.value_of("eval.every", 0)
    if conv.is_set("datasets"):
        _put_mixture(conv)
        return
    _without_slice(conv, 0, "dataset_train_split")
    if not conv.is_set("dataset_name"):
        return
    train, test = _paths_of(conv.get("dataset_name"))
    conv.put_sources(train, "dataset_name")
    if evaluated:
        conv.put_sources(test or train, "dataset_name", "eval")
        if not test:
            conv.put("data.eval.0.split", conv.get("dataset_test_split") or "test", "dataset_test_split")
        conv.copy_set("data.eval.0.subset", "dataset_config")


def _without_slice(conv: Conversion, i: int, key: str) -> None:
    """Set the split of a source without the part of it that is read there."""
    ours = f"data.train.{i}.split"
    if match := SLICE.fullmatch(conv.value_of(ours, "")):
        conv.put(ours, match[1], key)
        conv.lose(key, "all rows of the split are used: cut the file")


def _paths_of(value: Any) -> tuple[list[str], list[str]]:
    """Return the paths for training and evaluation of a data set's name or data_files."""
    if not isinstance(value, Mapping):
        return list(map(source_path, items(value))), []
    test = value.get("test") or value.get("validation") or value.get("eval") or ()
    return list(map(source_path, items(value.get("train", ())))), list(map(source_path, items(test)))


def _put_mixture(conv: Conversion) -> None:
    """Set the sources of TRL's `datasets`: one or several, with fractions as weights."""
    key, entries = "datasets", conv.get("datasets")
    entries = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    if not entries:
        conv.refuse(key, "it must be a list of mappings with path")
    for i, entry in enumerate(entries):
        path, files = entry.get("path", ""), entry.get("data_files") or entry.get("data_dir")
        if path in FILE_FORMATS and files:
            path, *more = _paths_of(files)[0] or [""]
            if more:
                conv.lose(
                    key, f"of the files of one source the first is read: {path}. Give each its own entry"
                )
        elif files:
            conv.lose(key, f"of {path} all files are read, not {printable(files)} alone")
        conv.put(f"data.train.{i}.path", source_path(path), key)
        for name, ours in (("name", "subset"), ("split", "split")):
            if entry.get(name):
                conv.put(f"data.train.{i}.{ours}", str(entry[name]), key)
        _without_slice(conv, i, key)
        if entry.get("fraction"):
            conv.put(f"data.train.{i}.weight", float(entry["fraction"]), key)
            conv.lose(
                key, "sources are mixed by weight, and none ends before the run; TRL cuts each to its share"
            )
