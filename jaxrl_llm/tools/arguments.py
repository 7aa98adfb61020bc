"""Arguments of the commands, in the style of training's flags: `--max_tokens 8`, `--switch True`; no jax."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import tyro

from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe.fields import check_fields
from jaxrl_llm.recipe.load import stdout_may_close

Args = TypeVar("Args")
STYLE = (tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff)


def parse_arguments(args_class: type[Args], argv: Sequence[str], command: str) -> Args:
    """Return the arguments of `python -m jaxrl_llm COMMAND`, checked against types and ranges.

    Raises SystemExit(0) after `--help`, SystemExit(2) after the message of a parse error.

    Raises:
        ConfigError: a value outside the range of its field.
    """
    with stdout_may_close():
        args = tyro.cli(args_class, args=argv, prog=_prog(command), config=STYLE, use_underscores=True)
    check_fields(args)
    return args


def parse_known_arguments(
    args_class: type[Args], argv: Sequence[str], command: str
) -> tuple[Args, list[str]]:
    """Return the arguments of the command as `parse_arguments`, and the words of all other flags."""
    with stdout_may_close():
        args, rest = tyro.cli(
            args_class,
            args=argv,
            prog=_prog(command),
            config=STYLE,
            use_underscores=True,
            return_unknown_args=True,
        )
    check_fields(args)
    return args, rest


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


def _prog(command: str) -> str:
    return f"python -m jaxrl_llm {command}"
