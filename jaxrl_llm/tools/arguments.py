"""Parser of the commands' arguments, in the style of training's flags: `--max_tokens 8`, `--switch True`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tyro

from jaxrl_llm.recipe.checks import check_fields

Args = TypeVar("Args")
STYLE = (tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff)


def parse_arguments(args_class: type[Args], argv: Sequence[str], command: str) -> Args:
    """Return the arguments of `python -m jaxrl_llm COMMAND`, checked against types and ranges.

    Raises SystemExit(0) after `--help`, SystemExit(2) after the message of a parse error.

    Raises:
        ConfigError: a value outside the range of its field.
    """
    prog = f"python -m jaxrl_llm {command}"
    args = tyro.cli(args_class, args=argv, prog=prog, config=STYLE, use_underscores=True)
    check_fields(args)
    return args
