"""`--a.b value` on the command line -> a changed frozen dataclass."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import tyro

from jaxrl_llm.algos.contract import AlgorithmName
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError

Config = TypeVar("Config")
TYRO = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff, tyro.conf.SuppressFixed)


class Leaf(NamedTuple):
    """One settable field: its type as written, and its value."""

    hint: Any
    value: Any


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """(dotted key, leaf) of every field of nested dataclasses and tuples of dataclasses."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        if hints[field.name] is AlgorithmName:  # --algo sets it
            continue
        yield from _branch(f"{prefix}{field.name}", hints[field.name], getattr(config, field.name))


def _branch(key: str, hint: Any, value: Any) -> Iterator[tuple[str, Leaf]]:
    if dataclasses.is_dataclass(value):
        yield from leaves(value, f"{key}.")
        return
    if isinstance(value, tuple) and value and all(dataclasses.is_dataclass(item) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, f"{key}.{index}.")
        return
    yield key, Leaf(hint, value)


def split(argv: list[str]) -> list[tuple[str, list[str]]]:
    """["--a.b", "1", "--c=2"] -> [("a.b", ["1"]), ("c", ["2"])]. A negative number is a value, and so is
    what has a space where a key would stand: --sglang.flags "--tp 2".

    Raises:
        ConfigError: a value without a key before it.
    """
    pairs: list[tuple[str, list[str]]] = []
    for word in argv:
        key, equals, value = word.partition("=")
        if key.startswith("--") and not (pairs and " " in key):
            pairs.append((key[2:], [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(word)
        else:
            raise ConfigError(f"{word!r} has no key before it. Write --key value, such as --steps 100.")
    return pairs


def override(config: TrainConfig, pairs: list[tuple[str, list[str]]]) -> TrainConfig:
    """The config with each key set, in order.

    Raises:
        ConfigError: an unknown key (with the nearest one), a value of the wrong type or one its part refuses.
    """
    for typed, words in pairs:
        known = dict(leaves(config))
        key, leaf = _resolve(typed, known)
        value = parse(key, leaf.hint, words)
        try:
            config = put(config, key.split("."), value)
        except ValueError as error:  # a part's own check
            raise ConfigError(f"--{key}: {error}.") from None
    return config


def _resolve(typed: str, known: dict[str, Leaf]) -> tuple[str, Leaf]:
    """The key that was meant: as it stands, with hyphens, or one level short where that is unambiguous."""
    key = typed.replace("-", "_")
    if key in known:
        return key, known[key]
    parent, _, name = key.rpartition(".")
    inside = [k for k in known if parent and k.startswith(f"{parent}.") and k.split(".")[-1] == name]
    if len(inside) == 1:
        return inside[0], known[inside[0]]
    raise ConfigError(f"--{typed}: unknown key. {_advice(key, known)}")


def _advice(key: str, known: dict[str, Leaf]) -> str:
    group = sorted(k for k in known if k.startswith(f"{key}."))
    if group:
        return f"{key} is a group; set its fields: {', '.join('--' + k for k in group[:8])}."
    unset = next((k for k in known if key.startswith(f"{k}.") and known[k].value in (None, ())), None)
    if unset:
        return f"{unset} is not set in this recipe, so it has no fields; set it in the recipe file."
    return f"Did you mean --{nearest(key, known)}? --help lists all keys."


def nearest(key: str, known: Iterable[str]) -> str:
    """The likeliest of `known`: a misspelling, a field of another group, initials (lr), else a neighbour."""
    parent, _, name = key.rpartition(".")

    def likeness(other: str) -> float:
        other_parent, _, other_name = other.rpartition(".")
        if name == other_name:
            return 1.0
        if other_name.startswith(name) or name == "".join(word[0] for word in other_name.split("_")):
            return 0.9
        last = difflib.SequenceMatcher(None, name, other_name).ratio()
        whole = difflib.SequenceMatcher(None, key, other).ratio()
        best = max(whole, 0.95 * last)
        return max(best, min(best + 0.3, 0.75)) if parent == other_parent else best

    return max(known, key=likeness)


def closest(word: str, known: Iterable[str]) -> str:
    """The likeliest of `known`, letters alone considered."""
    return difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]


def put(config: Config, path: list[str], value: Any) -> Config:
    """`config` with the field at `path` replaced; everything else is shared."""
    head, *rest = path
    if dataclasses.is_dataclass(config):
        return dataclasses.replace(
            config, **{head: put(getattr(config, head), rest, value) if rest else value}
        )
    index = int(head)
    return (*config[:index], put(config[index], rest, value), *config[index + 1 :])


def parse(key: str, hint: Any, words: list[str]) -> Any:
    """The words after --key as a value of type `hint`.

    Raises:
        ConfigError: they are not one.
    """
    if any(dataclasses.is_dataclass(part) for part in typing.get_args(hint)):
        raise ConfigError(f"--{key} has fields of its own; set it in the recipe file.")
    if hint is bool or bool in typing.get_args(hint):
        words = [word.capitalize() if word.lower() in ("true", "false") else word for word in words]
    if hint is str and len(words) == 1:
        return words[0]
    holder = dataclasses.make_dataclass("Holder", [("value", hint)])
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return tyro.cli(holder, args=["--value", *words], config=TYRO, console_outputs=False).value
        except SystemExit:
            pass
    given = repr(" ".join(words)) if words else "nothing"
    raise ConfigError(f"--{key}: expected {spell(hint)}, got {given}.")


def spell(hint: Any) -> str:
    """A type in words."""
    if hint in (int, float, str, bool, None, type(None)):
        words = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
        return words.get(hint, "None")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spell(arg) for arg in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"any number of values, each {spell(args[0])}"
    if origin is tuple:
        return f"{len(args)} values: " + ", ".join(spell(arg) for arg in args)
    return getattr(hint, "__name__", str(hint))


def conforms(value: Any, hint: Any) -> bool:
    """Whether a recipe's value is of the type its field declares (an int is a float, a bool is no int)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (typing.Union, types.UnionType):
        return any(conforms(value, arg) for arg in args)
    if origin is tuple and isinstance(value, tuple):
        wanted = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(wanted) == len(value) and all(map(conforms, value, wanted))
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, typing.get_origin(hint) or hint)


def print_help(config: TrainConfig, prog: str) -> None:
    """Every field with its doc and its value in this recipe."""
    with contextlib.suppress(SystemExit):
        tyro.cli(type(config), default=config, args=["--help"], prog=prog, config=TYRO, use_underscores=True)
