"""Arguments of the commands, in one style of flags, that of training: `--max_tokens 8`, `--switch True`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tyro

from jaxrl_llm.recipe.checks import check_fields

Args = TypeVar("Args")
STYLE = (tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff)


def parse_arguments(args_class: type[Args], argv: Sequence[str], command: str) -> Args:
    """Return the arguments of `python -m jaxrl_llm COMMAND`, checked against types and ranges.

    `--help` prints and raises SystemExit(0); what cannot be parsed is printed, with SystemExit(2).

    Raises:
        ConfigError: a value outside the range of its field.
    """
    prog = f"python -m jaxrl_llm {command}"
    args = tyro.cli(args_class, args=argv, prog=prog, config=STYLE, use_underscores=True)
    check_fields(args)
    return args
