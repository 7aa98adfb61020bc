"""Dotted keys of nested Configs: walk them, read a value from text, replace one field."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from jaxrl_llm.algos.config import AlgorithmName

Config = TypeVar("Config")

TYPES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    type(None): "None",
    Path: "a path",
}
MAX_BITS = 1024  # of an int, so that a float can hold it


class ConfigField(NamedTuple):
    """A field that a key names."""

    owner: Any
    """The Config that has the field."""
    name: str
    """Name of the field in it."""

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.name)

    @property
    def hint(self) -> Any:
        """Type of the field, without its range."""
        return type_hints(type(self.owner))[self.name]

    @property
    def is_off_at_zero(self) -> bool:
        """True for a number whose default 0 means off, so that None means 0 too."""
        defaults = {field.name: field.default for field in dataclasses.fields(self.owner)}
        return self.hint in (int, float) and defaults[self.name] == 0


@functools.cache
def type_hints(config_class: type) -> dict[str, Any]:
    """Return the type of each field, without ranges."""
    return typing.get_type_hints(config_class)


def iter_configs(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (prefix of its keys, Config): the config itself under "", its parts under "optim." and so on."""
    yield prefix, config
    for field in dataclasses.fields(config):
        for key, part in nested_configs(f"{prefix}{field.name}", getattr(config, field.name)):
            yield from iter_configs(part, f"{key}.")


def iter_fields(config: Any) -> Iterator[tuple[str, ConfigField]]:
    """Yield (dotted key, field) of every field of nested Configs that holds no Config itself."""
    for prefix, owner in iter_configs(config):
        for field in dataclasses.fields(owner):
            key = f"{prefix}{field.name}"
            is_name = type_hints(type(owner))[field.name] is AlgorithmName  # --algo sets it
            if not is_name and not any(nested_configs(key, getattr(owner, field.name))):
                yield key, ConfigField(owner, field.name)


def nested_configs(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, Config) of a value that is a Config or a tuple of Configs; nothing for others."""
    if is_config(value):
        yield key, value
    elif isinstance(value, tuple) and all(map(is_config, value)):
        yield from ((f"{key}.{index}", item) for index, item in enumerate(value))


def is_config(value: Any) -> bool:
    """Return whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def plain_values(value: Any) -> Any:
    """Return a Config, or a value in one, with tuples for lists and Python's numbers for NumPy's."""
    if is_config(value):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: new for name, x in old.items() if (new := plain_values(x)) is not x}
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, list | tuple):
        items = tuple(map(plain_values, value))
        return value if isinstance(value, tuple) and all(map(operator.is_, items, value)) else items
    return value.item() if getattr(value, "shape", None) == () else value


def replace_at(config: Config, path: Sequence[str], value: Any) -> Config:
    """Return `config` with the field at `path` replaced; everything else is shared."""
    head, *rest = path
    if is_config(config):
        return dataclasses.replace(
            config, **{head: replace_at(getattr(config, head), rest, value) if rest else value}
        )
    index = int(head)
    return (*config[:index], replace_at(config[index], rest, value), *config[index + 1 :])


def add_missing(config: Config, path: Sequence[str]) -> Config:
    """Return `config` with the Configs that a path passes through.

    A field that is None, and the next place of a tuple of Configs, gets the defaults of its Config:
    `critic.mesh.tensor`, `reward.models.0.path`.
    """
    head, *rest = path
    hints = type_hints(type(config))
    if head not in hints:  # no field, though it may be a property
        return config
    inner = config_class(hints[head])
    value = getattr(config, head, None)
    if isinstance(value, tuple) and inner and rest[:1] == [str(len(value))]:
        value = (*value, inner())
    elif value is None and inner and rest:
        value = inner()
    if isinstance(value, tuple) and rest and rest[0].isdecimal() and int(rest[0]) < len(value):
        index, *rest = int(rest[0]), *rest[1:]
        if rest and is_config(value[index]):
            value = (*value[:index], add_missing(value[index], rest), *value[index + 1 :])
    elif is_config(value) and rest:
        value = add_missing(value, rest)
    return config if value is getattr(config, head, None) else dataclasses.replace(config, **{head: value})


def config_class(hint: Any) -> type | None:
    """Return the Config of a type such as `MeshConfig | None` or `tuple[SourceConfig, ...]`."""
    if dataclasses.is_dataclass(hint):
        return hint
    return next(filter(None, map(config_class, typing.get_args(hint))), None)


def inner_key(key: str, hint: Any) -> str:
    """Return the key of the first field of the Config in this field, or ""."""
    inner = config_class(hint)
    index = ".0" if typing.get_origin(hint) is tuple else ""
    return f"{key}{index}.{dataclasses.fields(inner)[0].name}" if inner else ""


def has_type(value: Any, hint: Any) -> bool:
    """Return whether a recipe's value is of the type that its field declares (an int is a float, but a bool
    is not an int)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, arg) for arg in args)
    if origin is tuple and isinstance(value, tuple):
        expected = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(expected) == len(value) and all(map(has_type, value, expected))
    if hint in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and value.bit_length() < MAX_BITS
    return isinstance(value, origin or hint)


def shorten(text: str, width: int = 100) -> str:
    """Return the text, or its beginning and end if it is longer, for messages."""
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[:half]}...{text[-half:]}"


def short_repr(value: Any) -> str:
    """Return the repr of a user's value, shortened; its type if repr fails."""
    try:
        return shorten(repr(value))
    except Exception:  # the user's class, or an int of more than 4300 digits
        return f"<{type(value).__name__}>"


def type_words(hint: Any) -> str:
    """Return a type in words: "a whole number or None"."""
    if isinstance(hint, type) and hint in TYPES:
        return TYPES[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_words(arg) for arg in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"any number of values, each {type_words(args[0])}"
    if origin is tuple:
        return f"{len(args)} values: " + ", ".join(type_words(arg) for arg in args)
    return getattr(hint, "__name__", str(hint))
