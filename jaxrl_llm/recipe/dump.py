"""A config as JSON, with secrets masked."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxrl_llm.algos.config import AlgorithmName
from jaxrl_llm.checkpoint.resume import MASKED
from jaxrl_llm.config import TrainConfig

PACKAGES = (
    "jaxrl-llm",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "transformers",
    "numpy",
)
SECRET_NAME = re.compile(
    r"(^|_)(api_?key|(access|secret|private|auth)_?key|token|secret|password|credential)$", re.I
)
URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # user:password, or a token alone
SECRET_FLAG = re.compile(r"(--[\w-]*(?:key|token|password|secret)[ =]+)\S+")  # of servers: --api-key KEY
MIN_SECRET = 8  # characters; what is shorter may be an ordinary word


def dump(config: TrainConfig) -> dict[str, Any]:
    """Return the config as nested dicts for JSON; the algorithm's name is `algo.name`.

    Fields with a secret name (api_key), logins in URLs and values of secret flags are masked. The environment
    is not read: the same config gives the same dicts anywhere, so that a resumed run can be compared with its
    checkpoint.
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
    installed = {dist.name for dist in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    described = {
        "command": [mask_text(word) for word in argv],
        "recipe": recipe,
        "versions": {"python": platform.python_version(), **versions},
        "pins": dict(pins),
        "config": dump(config),
    }
    return mask_secrets(described, os.environ)


def mask_secrets(tree: Any, environment: Mapping[str, str]) -> Any:
    """Return a tree of JSON values with the secrets of the environment masked in its texts.

    Only whole values of at least 8 characters are masked, where no letter or digit stands beside them.
    """
    secrets = sorted(
        (x for name, x in environment.items() if SECRET_NAME.search(name) and len(x) >= MIN_SECRET), key=len
    )
    if not secrets:
        return tree
    longest_first = "|".join(map(re.escape, reversed(secrets)))
    pattern = re.compile(rf"(?<![A-Za-z0-9])({longest_first})(?![A-Za-z0-9])")

    def mask(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: mask(x) for name, x in value.items()}
        if isinstance(value, list):
            return [mask(x) for x in value]
        return pattern.sub(MASKED, value) if isinstance(value, str) else value

    return mask(tree)


def mask_text(text: str) -> str:
    """Return the text with logins in `scheme://user:password@host` and values of `--api-key KEY` masked."""
    return SECRET_FLAG.sub(rf"\1{MASKED}", URL_LOGIN.sub(MASKED, text))


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
