"""Arguments of the commands, read and explained as the keys of a recipe; no jax."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.recipe.fields import check_fields
from jaxrl_llm.recipe.help import arguments_text, print_and_exit, split_help, topics_text
from jaxrl_llm.recipe.keys import iter_fields, type_hints
from jaxrl_llm.recipe.overrides import Pair, apply_overrides, split_arguments

Args = TypeVar("Args")


def parse_arguments(args_class: type[Args], argv: Sequence[str], command: str, positional: str = "") -> Args:
    """Return the arguments of `python -m jaxrl_llm COMMAND`, checked against types and ranges.

    `--help` prints and raises SystemExit(0).

    Args:
        positional: field that gets the words without a key.

    Raises:
        ConfigError: an unknown flag (with the nearest one), a value of the wrong type or out of its range, or
            a flag that is missing.
    """
    missing, hints = dataclasses.MISSING, type_hints(args_class)
    required = [f.name for f in dataclasses.fields(args_class) if f.default is f.default_factory is missing]
    shown = [*required, *([positional] if positional and positional not in required else [])]
    needed = {name: _spelled(name, hints[name], name == positional) for name in shown}
    argv, topics = split_help(argv)
    blank = args_class(**{name: hints[name]() for name in required})
    pairs = _with_positional(blank, argv, positional)
    args, notes = apply_overrides(blank, pairs)
    prog = f"python -m jaxrl_llm {command}"
    if topics is not None:
        print_and_exit(topics_text(args, topics) if topics else arguments_text(args, prog, needed))
    given = {key.replace("-", "_") for key, _ in pairs}
    if absent := ", ".join(needed[name] for name in required if name not in given):
        raise ConfigError(f"{command}: {absent} is missing. {prog} --help lists the flags.")
    check_fields(args)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return args


def _spelled(name: str, hint: Any, is_positional: bool) -> str:
    """Return how a field without a default is written: --model TEXT, RUNS ..."""
    more = " ..." if typing.get_origin(hint) is tuple else ""
    return f"{name.upper()}{more}" if is_positional else f"--{name} {'PATH' if hint is Path else 'TEXT'}"


def _with_positional(args: Any, argv: Sequence[str], positional: str) -> list[Pair]:
    """Return `split_arguments`; words without a key, and further ones after a flag of one value, are the
    positional field's."""
    if not positional:
        return split_arguments(argv)
    known, rest = dict(iter_fields(args)), []
    (_, first), *pairs = split_arguments([f"--{positional}", *argv])
    for key, words in pairs:
        if key in known and typing.get_origin(known[key].hint) is not tuple:
            rest += words[1:]
            del words[1:]
    words = [*first, *rest]
    return [*pairs, (positional, words)] if words else pairs


def parse_own(args_class: type[Args], argv: Sequence[str], command: str) -> tuple[Args, list[str]]:
    """Return the arguments of a command, and the words of all other flags, which are a recipe's.

    Raises:
        ConfigError: as `parse_arguments`.
    """
    if {"--help", "-h"}.intersection(argv):
        argv = ["--help"]  # without the recipe's flags, which the help of training lists
    names = {field.name for field in dataclasses.fields(args_class)} | {"help"}
    own: list[str] = []
    others: list[str] = []
    current = others
    for word in argv:
        if word.startswith("--"):
            current = own if word[2:].partition("=")[0].replace("-", "_") in names else others
        current.append(word)
    return parse_arguments(args_class, own, command), others


def check_output_path(path: Path, source: Path | None = None, flag: str = "--out") -> None:
    """Raise UserError if a file cannot be written there, or is the one that is read, before any work.

    Args:
        source: file that is read; None = none.
        flag: that names the path.
    """
    if not path.absolute().parent.is_dir():
        raise UserError(f"{flag} {path}: the folder {path.absolute().parent} does not exist; make it first")
    if path.is_dir():
        raise UserError(f"{flag} {path}: a folder; give a file name in it")
    if source and path.exists() and source.exists() and path.samefile(source):
        raise UserError(f"{flag} {path}: the file that is read; it would be overwritten. Give another name")
