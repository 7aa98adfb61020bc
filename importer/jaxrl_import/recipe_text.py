"""A TrainConfig as the text of a recipe file: only what differs from the defaults, each with a comment."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_llm import algos
from jaxrl_llm import config as config_module
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.recipe.keys import (
    add_missing,
    has_type,
    is_config,
    iter_fields,
    replace_at,
    short_repr,
    type_words,
)

WIDTH = 110


class Built(NamedTuple):
    """A config made from keys and values."""

    config: TrainConfig
    refused: dict[str, str]
    """Key -> why it is not set: its algorithm has no such setting."""


def build_config(algo: str, values: Mapping[str, Any], origins: Mapping[str, str]) -> Built:
    """Return the config of an algorithm with these keys set.

    Args:
        values: by the keys of the command line, as Python values.
        origins: key -> its origin, for messages.

    Raises:
        ConfigError: a value of the wrong type.
    """
    config, refused = TrainConfig(algo=algos.ALGOS[algo].config), {}
    for key, value in values.items():
        config = add_missing(config, key.split("."))
        field = dict(iter_fields(config)).get(key)
        if field is None and key.startswith("algo."):
            refused[key] = f"{algo} has no setting {key.removeprefix('algo.')}"
            continue
        assert field is not None, f"{key}: no such key"
        if isinstance(value, float) and value.is_integer() and not has_type(value, field.hint):
            value = int(value)
        if not has_type(value, field.hint):
            raise ConfigError(
                f"{origins[key]}: --{key} would be {short_repr(value)}; it must be {type_words(field.hint)}."
            )
        config = replace_at(config, key.split("."), value)
    return Built(config, refused)


def recipe_source(
    config: TrainConfig, docstring: str, comments: Mapping[str, str], stated: set[str], *, footer: list[str]
) -> str:
    """Return the text of a recipe whose get_config() returns this config.

    Args:
        docstring: of the file.
        comments: key -> comment.
        stated: keys that are written though they have their default.
        footer: lines of comments at the end.
    """
    body = "\n".join(_call(config, "", 8, comments, stated=stated))
    imports = "\n".join(_imports(config))
    text = docstring.replace("\\", "\\\\").replace('"""', "'''").strip()
    notes = "".join(f"\n{line}" for line in footer)
    return (
        f'"""{text}\n"""\n\n{imports}\n\n\ndef get_config() -> TrainConfig:\n    return TrainConfig(\n'
        f"{body}\n    )\n{notes}\n"
    ).replace("\n\n\n\n", "\n\n\n")


def comment_lines(text: str, indent: str = "") -> list[str]:
    """Return a comment, wrapped."""
    wrapped = textwrap.wrap(
        " ".join(text.split()), WIDTH - len(indent) - 2, subsequent_indent="    ", break_long_words=False
    )
    return [f"{indent}# {line}" for line in wrapped]


def _fresh(part: Any) -> Any:
    """Return the Config that the constructor's defaults make."""
    if isinstance(part, AlgoConfig):
        return algos.of(part).Config()
    return type(part)()


def _constructor(part: Any) -> str:
    return f"{part.algorithm}.Config" if isinstance(part, AlgoConfig) else type(part).__name__


def _changed(part: Any, prefix: str, stated: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield (field, value) of each field to write."""
    fresh = _fresh(part)
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        key = f"{prefix}{field.name}"
        differs = value != getattr(fresh, field.name) or key in stated
        if differs or (is_config(value) and any(name.startswith(f"{key}.") for name in stated)):
            yield field.name, value


def _call(
    part: Any, prefix: str, indent: int, comments: Mapping[str, str], *, stated: set[str]
) -> Iterator[str]:
    """Yield the lines of a constructor's arguments."""
    space = " " * indent
    for name, value in _changed(part, prefix, stated):
        key = f"{prefix}{name}"
        items = value if isinstance(value, tuple) and value and all(map(is_config, value)) else ()
        if is_config(value):
            inner = _call(value, f"{key}.", indent + 4, comments, stated=stated)
            yield from _bracketed(f"{space}{name}={_constructor(value)}(", inner)
        elif items:
            yield f"{space}{name}=("
            for i, item in enumerate(items):
                inner = _call(item, f"{key}.{i}.", indent + 8, comments, stated=stated)
                yield from _bracketed(f"{space}    {_constructor(item)}(", inner)
            yield f"{space}),"
        else:
            yield from _argument(f"{space}{name}={_literal(value)},", comments.get(key, ""), space)


def _bracketed(start: str, inner: Iterator[str]) -> Iterator[str]:
    """Yield a constructor's call; on one line without arguments."""
    lines = list(inner)
    if not lines:
        yield f"{start}),"
        return
    yield from (start, *lines, f"{' ' * (len(start) - len(start.lstrip()))}),")


def _argument(line: str, comment: str, space: str) -> Iterator[str]:
    """Yield an argument with its comment after it, or above it if it is long."""
    if not comment:
        yield line
    elif len(line) + len(comment) + 4 <= WIDTH:
        yield f"{line}  # {comment}"
    else:
        yield from comment_lines(comment, space)
        yield line


def _literal(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _parts(part: Any) -> Iterator[Any]:
    """Yield the Configs that are written."""
    yield part
    for _, value in _changed(part, "", set()):
        for inner in value if isinstance(value, tuple) else (value,):
            if is_config(inner):
                yield from _parts(inner)


def _imports(config: TrainConfig) -> list[str]:
    parts = list(_parts(config))
    names = sorted({config.algo.algorithm, *(p.algorithm for p in parts if isinstance(p, AlgoConfig))})
    lines = [f"from jaxrl_llm.algos import {', '.join(names)}"]
    classes = {type(part) for part in parts if not isinstance(part, AlgoConfig)}
    public = sorted(c.__name__ for c in classes if c.__name__ in config_module.__all__)
    listed = "".join(f"\n    {name}," for name in public)
    others = [f"from {c.__module__} import {c.__name__}" for c in classes if c.__name__ not in public]
    lines += [line for line in sorted(others) if "jaxrl_llm.algos" in line]
    lines += [f"from jaxrl_llm.config import ({listed}\n)"]
    return lines + sorted(line for line in others if "jaxrl_llm.algos" not in line)
