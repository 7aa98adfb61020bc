"""Changes of a recipe that given settings imply: for another model, other data, another length. Each rule
changes settings that belong to a replaced one, unless they are given too, and adds a note.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from jaxrl_llm.config import DataConfig, TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.recipe.keys import shorten

RANDOM_WEIGHTS_RATE = 1e-4
"""A learning rate above which the recipe of a model with random weights is noted for a trained one."""
Implied = tuple[TrainConfig, list[str]]
"""The changed config, and notes."""


def imply(before: TrainConfig, config: TrainConfig, given: set[str]) -> Implied:
    """Return the config with the changes that the given keys imply, and a note on each change.

    Args:
        before: the recipe.
        config: the recipe with the given keys set.
        given: keys, spelled in full.

    Raises:
        ConfigError: two of the given keys exclude each other.
    """
    data = _with_sources(_with_sources(config.data, given, "path", "train"), given, "eval_path", "eval")
    config, notes = dataclasses.replace(config, data=data), []
    for rule in (_own_tokenizer, _no_warm_up, _other_task, _evaluated_elsewhere, _unranked, _steps):
        config, more = rule(before, config, given)
        notes += more
    return config, notes


def _own_tokenizer(before: TrainConfig, config: TrainConfig, given: set[str]) -> Implied:
    """Drop the recipe's tokenizer, which belongs to the recipe's model."""
    tokenizer, path = config.model.tokenizer, config.model.path
    if "model.path" not in given or "model.tokenizer" in given or not path or not tokenizer:
        return config, []
    if path == before.model.path:
        return config, []
    note = (
        f"--model.path {path} uses its own tokenizer, not the recipe's {tokenizer!r}; "
        f"--model.tokenizer {tokenizer} keeps that"
    )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, tokenizer="")), [note]


def _no_warm_up(before: TrainConfig, config: TrainConfig, given: set[str]) -> Implied:
    """Drop the SFT warm-up of a recipe for random weights if a trained model is given."""
    if before.model.path or not config.model.path:
        return config, []
    notes, warm, rate, path = [], config.warm_start, config.optim.learning_rate, config.model.path
    if warm.steps and not any(key.startswith("warm_start.") for key in given):
        notes.append(
            f"--model.path {path} is trained: the recipe's SFT warm-up of {warm.steps} steps for "
            f"random weights is left out; --warm_start.steps {warm.steps} keeps it"
        )
        config = dataclasses.replace(config, warm_start=dataclasses.replace(warm, steps=0))
    if rate > RANDOM_WEIGHTS_RATE and "optim.learning_rate" not in given and not config.lora.rank:
        notes.append(
            f"the recipe's --optim.learning_rate {rate:g} is for its random weights; of a trained model 1e-6 "
            "to 1e-5 are usual"
        )
    return config, notes


def _other_task(before: TrainConfig, config: TrainConfig, given: set[str]) -> Implied:
    """Drop the recipe's system prompt where data and reward are others; name what goes before other rows."""
    paths = [[source.path for source in either.data.sources("train")] for either in (before, config)]
    if "data.path" not in given or paths[0] == paths[1]:
        return config, []
    chat, notes, rows = config.data.chat, [], ", ".join(paths[1])
    if chat.system_prompt and "data.chat.system_prompt" not in given:
        prompt = f"the recipe's system prompt {shorten(chat.system_prompt)!r}"
        if "reward.name" in given:
            fate = "is left out: data and reward are others. --data.chat.system_prompt TEXT sets one"
            chat = dataclasses.replace(chat, system_prompt="")
        else:
            fate = f"is put before {rows}, too; --data.chat.system_prompt '' leaves it out"
        notes.append(f"{prompt} {fate}")
    if chat.template_options and "data.chat.template_options" not in given:
        notes.append(
            f"the chat template of {rows} gets the recipe's options {chat.template_options}, too; "
            "--data.chat.template_options '' leaves them out"
        )
    return dataclasses.replace(config, data=dataclasses.replace(config.data, chat=chat)), notes


def _evaluated_elsewhere(before: TrainConfig, config: TrainConfig, given: set[str]) -> Implied:
    """Add a note if --data.path is set but the held-out data are still the recipe's."""
    data = config.data
    kept = "data.path" in given and not any(key.startswith(("data.eval", "data.holdout")) for key in given)
    if not kept or not config.eval.every or data.holdout or not data.sources("eval"):
        return config, []
    paths, trained = (", ".join(own.path for own in data.sources(split)) for split in ("eval", "train"))
    if paths == trained:  # generated data, which have a held-out part
        return config, []
    return config, [
        f"evaluated is the recipe's held-out data, {paths}: --data.holdout 0.1 holds out a tenth of "
        f"{trained}, --data.eval_path FILE names other data, --eval.every 0 turns evaluation off"
    ]


def _unranked(before: TrainConfig, config: TrainConfig, given: set[str]) -> Implied:
    """Drop the recipe's ranking of checkpoints by held-out metrics if evaluation is turned off."""
    saved = config.checkpoint
    if "checkpoint.best_metric" in given or config.eval.every or "eval.every" not in given:
        return config, []
    metric = "" if saved.best_metric.startswith("eval/") else saved.best_metric
    return dataclasses.replace(config, checkpoint=dataclasses.replace(saved, best_metric=metric)), []


def _steps(before: TrainConfig, config: TrainConfig, given: set[str]) -> Implied:
    """Drop the recipe's epochs if steps are given."""
    if "steps" not in given or not config.epochs:
        return config, []
    if "epochs" in given:
        raise ConfigError("--steps and --epochs are both given: each is the length of the run. Give one.")
    note = f"--steps {config.steps} takes the place of the recipe's epochs {config.epochs:g}"
    return dataclasses.replace(config, epochs=0.0), [note]


def _with_sources(
    data: DataConfig, given: set[str], path: str, split: Literal["train", "eval"]
) -> DataConfig:
    """Return `data` with all sources of --data.path a.jsonl --data.train.1.path b.jsonl.

    Settings of the first one that --data.path alone leaves out (--data.train.0.options) are kept if given.
    """
    keys = [key.split(".")[2:] for key in given if re.match(rf"data\.{split}\.\d+\.", key)]
    if not keys or not getattr(data, path):
        return data
    sources, (named,) = getattr(data, split), data.sources(split)
    settings = {name: getattr(sources[0], name) for index, name in keys if index == "0" and name != "path"}
    first = dataclasses.replace(named, **settings)
    more = [sources[index] for index in sorted({int(index) for index, _ in keys} - {0})]
    if not more and first == named:
        return data
    return dataclasses.replace(data, **{split: (first, *more), path: ""})
