"""Changes of a recipe that given settings imply: for another model, other data, another length. Each rule
changes settings that belong to a replaced one, unless they are given too, and adds a note.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from jaxrl_llm.config import DataConfig, TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.recipe.keys import replace_at, shorten

RANDOM_WEIGHTS_RATE = 1e-4
"""A learning rate above which the recipe of a model with random weights is noted for a trained one."""


class Implied(NamedTuple):
    """A change that the given keys imply."""

    note: str
    """Line for the user; "" = none."""
    key: str = ""
    """Key that changes; "" = only the note."""
    value: Any = None
    """Its new value."""


def imply(before: TrainConfig, config: TrainConfig, given: set[str]) -> tuple[TrainConfig, list[str]]:
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
        for note, key, value in rule(before, config, given):
            config = replace_at(config, key.split("."), value) if key else config
            notes += [note] if note else []
    return config, notes


def _own_tokenizer(before: TrainConfig, config: TrainConfig, given: set[str]) -> Iterator[Implied]:
    """Drop the recipe's tokenizer, which belongs to the recipe's model."""
    tokenizer, path = config.model.tokenizer, config.model.path
    is_other = "model.path" in given and path not in ("", before.model.path)
    if is_other and tokenizer and "model.tokenizer" not in given:
        note = (
            f"--model.path {path} uses its own tokenizer, not the recipe's {tokenizer!r}; "
            f"--model.tokenizer {tokenizer} keeps that"
        )
        yield Implied(note, "model.tokenizer", "")


def _no_warm_up(before: TrainConfig, config: TrainConfig, given: set[str]) -> Iterator[Implied]:
    """Drop the SFT warm-up of a recipe for random weights if a trained model is given."""
    if before.model.path or not config.model.path:
        return
    steps, rate, path = config.warm_start.steps, config.optim.learning_rate, config.model.path
    if steps and not any(key.startswith("warm_start.") for key in given):
        note = (
            f"--model.path {path} is trained: the recipe's SFT warm-up of {steps} steps for "
            f"random weights is left out; --warm_start.steps {steps} keeps it"
        )
        yield Implied(note, "warm_start.steps", 0)
    if rate > RANDOM_WEIGHTS_RATE and "optim.learning_rate" not in given and not config.lora.rank:
        yield Implied(
            f"the recipe's --optim.learning_rate {rate:g} is for its random weights; of a trained model 1e-6 "
            "to 1e-5 are usual"
        )


def _other_task(before: TrainConfig, config: TrainConfig, given: set[str]) -> Iterator[Implied]:
    """Drop the recipe's system prompt where data and reward are others; name what goes before other rows."""
    paths = [[source.path for source in either.data.sources("train")] for either in (before, config)]
    if "data.path" not in given or paths[0] == paths[1]:
        return
    chat, rows = config.data.chat, ", ".join(paths[1])
    if chat.system_prompt and "data.chat.system_prompt" not in given:
        prompt = f"the recipe's system prompt {shorten(chat.system_prompt)!r}"
        if "reward.name" in given:
            fate = "is left out: data and reward are others. --data.chat.system_prompt TEXT sets one"
            yield Implied(f"{prompt} {fate}", "data.chat.system_prompt", "")
        else:
            yield Implied(f"{prompt} is put before {rows}, too; --data.chat.system_prompt '' leaves it out")
    if chat.template_options and "data.chat.template_options" not in given:
        yield Implied(
            f"the chat template of {rows} gets the recipe's options {chat.template_options}, too; "
            "--data.chat.template_options '' leaves them out"
        )


def _evaluated_elsewhere(before: TrainConfig, config: TrainConfig, given: set[str]) -> Iterator[Implied]:
    """Add a note if --data.path is set but the held-out data are still the recipe's."""
    data = config.data
    kept = "data.path" in given and not any(key.startswith(("data.eval", "data.holdout")) for key in given)
    if not kept or not config.eval.every or data.holdout or not data.sources("eval"):
        return
    paths, trained = (", ".join(own.path for own in data.sources(split)) for split in ("eval", "train"))
    if paths != trained:  # else generated data, which have a held-out part
        yield Implied(
            f"evaluated is the recipe's held-out data, {paths}: --data.holdout 0.1 holds out a tenth of "
            f"{trained}, --data.eval_path FILE names other data, --eval.every 0 turns evaluation off"
        )


def _unranked(before: TrainConfig, config: TrainConfig, given: set[str]) -> Iterator[Implied]:
    """Drop the recipe's ranking of checkpoints by held-out metrics if evaluation is turned off."""
    is_off = "eval.every" in given and not config.eval.every
    if is_off and "checkpoint.best_metric" not in given and config.checkpoint.best_metric.startswith("eval/"):
        yield Implied("", "checkpoint.best_metric", "")


def _steps(before: TrainConfig, config: TrainConfig, given: set[str]) -> Iterator[Implied]:
    """Drop the recipe's epochs if steps are given."""
    if "steps" not in given or not config.epochs:
        return
    if "epochs" in given:
        raise ConfigError("--steps and --epochs are both given: each is the length of the run. Give one.")
    note = f"--steps {config.steps} takes the place of the recipe's epochs {config.epochs:g}"
    yield Implied(note, "epochs", 0.0)


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
