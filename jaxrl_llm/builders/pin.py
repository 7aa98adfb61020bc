"""Revisions of hub models and the date of chat templates, pinned by the run that uses them first."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data.config import is_date
from jaxrl_llm.hf.hub import parse_hub_name
from jaxrl_llm.hf.resolve import pin_revision
from jaxrl_llm.host.files import load_object
from jaxrl_llm.host.processes import on_first

PINS = "pins"
"""Key of config.json: hub name as the recipe has it -> name with the commit."""


def pin_models(config: TrainConfig) -> tuple[TrainConfig, dict[str, str]]:
    """Return (the config with a commit in each hub name, name -> name with it, for config.json).

    A run that continues reads the weights that it began with, though the hub may have newer ones: the frozen
    reference, the base of adapters, teachers. A name means the commit that it meant at its first use, and a
    repository with and without a branch are two names. Process 0 chooses the commits. A collective.
    """
    pins = read_pins(Path(config.run_dir) / "config.json")

    def pin(name: str) -> str:
        if not name or (hub := parse_hub_name(name)) is None:
            return name
        if str(hub) not in pins:
            pinned = on_first(lambda: pin_revision(name))
            if pinned == name:  # a local folder, or a commit already
                return name
            pins[str(hub)] = pinned
        return pins[str(hub)]

    return map_models(config, pin), pins


def pin_date(config: TrainConfig, tokenizer: Any) -> TrainConfig:
    """Return the config with a date for chat templates, if one may write a date. Otherwise a row would have
    other tokens on another day. The date is the day on which the run began, by process 0's clock and
    config.json. A collective.
    """
    chat = config.data.chat
    if chat.date or not ("strftime_now" in str(tokenizer.chat_template) or config.reward.models):
        return config
    date = on_first(lambda: read_date(Path(config.run_dir) / "config.json") or str(datetime.date.today()))
    return replace(config, data=replace(config.data, chat=replace(chat, date=date)))


def read_date(file: Path) -> str:
    """Return the date of chat templates in the config.json of a run, or ""."""
    try:
        date = load_object(file)["config"]["data"]["chat"]["date"]
    except (KeyError, TypeError):
        return ""
    return date if isinstance(date, str) and is_date(date) else ""


def map_models(config: TrainConfig, rename: Callable[[str], str]) -> TrainConfig:
    """Return the config with each name of a model or its tokenizer replaced; "" = no model."""
    tokenizer = config.model.tokenizer
    model = replace(
        config.model,
        path=rename(config.model.path),
        tokenizer=tokenizer if tokenizer == "tiny" else rename(tokenizer),
    )
    rewards = tuple(replace(reward, path=rename(reward.path)) for reward in config.reward.models)
    algo = config.algo
    if algos.requirements(algo).teachers and hasattr(algo, "teachers"):
        algo = replace(algo, teachers=tuple(map(rename, algo.teachers)))
    return replace(
        config,
        model=model,
        algo=algo,
        critic=replace(config.critic, path=rename(config.critic.path)),
        reference=replace(config.reference, path=rename(config.reference.path)),
        reward=replace(config.reward, models=rewards),
    )


def read_pins(file: Path) -> dict[str, str]:
    """Return hub name -> name with its commit, from config.json of the run directory.

    If an earlier version wrote the file without them, collect the names in it, and drop their commits. A
    repository with two commits in the file is left out, since a name could mean either.
    """
    tree = load_object(file)
    if PINS in tree:
        return dict(tree[PINS])
    found: dict[str, set[str]] = {}
    for text in _texts(tree.get("config")):
        if "@" in text and (hub := parse_hub_name(text)):
            found.setdefault(str(hub._replace(revision=None)), set()).add(text)
    return {name: pinned.pop() for name, pinned in found.items() if len(pinned) == 1}


def _texts(tree: Any) -> list[str]:
    """Return the texts in a tree of JSON values."""
    texts, pending = [], [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str):
            texts.append(value)
    return texts
