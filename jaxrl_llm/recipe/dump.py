"""A config as JSON, with secrets masked."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxrl_llm.addresses import MASKED, SECRET_NAME, mask_text, secrets_of
from jaxrl_llm.algos.config import AlgorithmName
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.extensions import package_versions


def dump(config: TrainConfig) -> dict[str, Any]:
    """Return the config as nested dicts for JSON; the algorithm's name is `algo.name`.

    Fields with a secret name (api_key) and what `mask_text` finds are masked. The environment is not read:
    the same config gives the same dicts anywhere, so that a resumed run can be compared with its checkpoint.
    """
    tree = _plain("", config)
    tree["algo"] = {"name": str(config.algo.algorithm), **tree["algo"]}
    return tree


def describe_run(
    config: TrainConfig, recipe: str, argv: list[str], pins: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the contents of config.json: command, recipe, versions, commits of models, the resolved config.

    Values of environment variables whose names look secret are masked in every text.

    Args:
        pins: hub name as the recipe has it -> name with its commit.
    """
    described = {
        "command": list(argv),
        "recipe": recipe,
        "versions": {"python": platform.python_version(), **package_versions()},
        "pins": dict(pins),
        "config": dump(config),
    }
    return _masked(described, secrets_of(os.environ))


def _masked(tree: Any, secrets: list[str]) -> Any:
    """Return a tree of JSON values with the secrets in its texts masked."""
    if isinstance(tree, dict):
        return {name: _masked(x, secrets) for name, x in tree.items()}
    if isinstance(tree, list):
        return [_masked(x, secrets) for x in tree]
    return mask_text(tree, secrets) if isinstance(tree, str) else tree


def _plain(name: str, value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: _plain(name, x) for name, x in fields.items() if not isinstance(x, AlgorithmName)}
    if isinstance(value, tuple | list):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return MASKED if value and SECRET_NAME.search(name) else mask_text(str(value))
