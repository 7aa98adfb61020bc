"""Checks of fields: their types, their ranges and the rules within one Config. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxrl_llm import algos
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.ranges import problems
from jaxrl_llm.recipe.keys import (
    has_type,
    iter_configs,
    nested_configs,
    short_repr,
    shorten,
    type_hints,
    type_words,
)

MAX_LINE = 1000  # characters of a message


def check_fields(config: Any) -> None:
    """Refuse fields of the wrong type, outside their range, or against a rule of their Config.

    Args:
        config: a dataclass with Configs in it: TrainConfig, or the arguments of a command.

    Raises:
        ConfigError: one line for each problem.
    """
    refuse(list(field_problems(config)))


def refuse(lines: list[str]) -> None:
    """Raise a ConfigError with a line for each problem, if any."""
    lines = [shorten(line, MAX_LINE) for line in lines]
    if len(lines) > 1:
        raise ConfigError("\n".join(["the config has several problems:", *(f"  - {line}" for line in lines)]))
    if lines:
        raise ConfigError(lines[0])


def field_problems(config: Any) -> Iterator[str]:
    """Yield problems of types; if all types are right, of ranges and of rules within one Config."""
    wrong = list(_wrong_types(config))
    yield from wrong
    for prefix, part in iter_configs(config) if not wrong else ():
        yield from (f"--{prefix}{name} {text}" for name, text in problems(part))


def _wrong_types(config: Any, prefix: str = "") -> Iterator[str]:
    hints = type_hints(type(config))
    for field in dataclasses.fields(config):
        key, hint, value = f"{prefix}{field.name}", hints[field.name], getattr(config, field.name)
        if not has_type(value, hint):
            yield f"--{key} is {short_repr(value)} ({type(value).__name__}): expected {type_words(hint)}."
        elif isinstance(value, algos.AlgoConfig) and not algos.is_known(value):
            yield f"--{key}: {type(value).__name__} of no algorithm; make it with NAME.Config(...)."
        else:
            for part_key, part in nested_configs(key, value):
                yield from _wrong_types(part, f"{part_key}.")
