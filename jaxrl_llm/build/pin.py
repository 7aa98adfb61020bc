"""Revisions of hub models, pinned by the run that uses them first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.hf.hub_name import parse_hub_name
from jaxrl_llm.hf.resolve import pin_revision
from jaxrl_llm.host.processes import on_first


def pin_models(config: TrainConfig) -> TrainConfig:
    """Return the config with a commit in each hub name: those of the run directory, if it has some.

    A run that continues reads the weights that it began with, though the hub may have newer ones: the frozen
    reference, the base of adapters, teachers. Process 0 chooses the commits. A collective.
    """
    earlier = _recorded_names(Path(config.run_dir) / "config.json")

    def pin(name: str) -> str:
        if not name or parse_hub_name(name) is None:
            return name
        return earlier.get(name) or on_first(lambda: pin_revision(name))

    tokenizer = config.model.tokenizer
    model = replace(
        config.model,
        path=pin(config.model.path),
        tokenizer=tokenizer if tokenizer == "tiny" else pin(tokenizer),
    )
    rewards = tuple(replace(reward, path=pin(reward.path)) for reward in config.reward.models)
    algo = config.algo
    if algos.requirements(algo).teachers and hasattr(algo, "teachers"):
        algo = replace(algo, teachers=tuple(map(pin, algo.teachers)))
    return replace(
        config,
        model=model,
        algo=algo,
        critic=replace(config.critic, path=pin(config.critic.path)),
        reference=replace(config.reference, path=pin(config.reference.path)),
        reward=replace(config.reward, models=rewards),
    )


def _recorded_names(file: Path) -> dict[str, str]:
    """Return hub name without commit -> with it, as config.json of the run directory has them."""
    try:
        tree = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    names, pending = {}, [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str) and "@" in value and (hub := parse_hub_name(value)):
            names[str(hub._replace(revision=None))] = value
    return names
