"""Words of the command line -> values of a field's type: tyro's constructors, and three rules beside them."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Sequence
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo


def parse_value(hint: Any, words: Sequence[str]) -> Any:
    """Return the words of the command line as a value of this type.

    Raises:
        ValueError: the words are not such a value.
    """
    is_empty = list(words) == [""] and typing.get_origin(hint) is tuple  # --key= is the empty tuple
    with RULES:
        spec = RULES.get_primitive_spec(PrimitiveTypeInfo.make(tuple[hint], set()))
    if not isinstance(spec, PrimitiveConstructorSpec):
        raise ValueError("a type that cannot be spelled in words")
    return spec.instance_from_str([] if is_empty else list(words))[0]


def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Return how int, bool and None are read; None = as tyro reads the type."""
    parse = {int: _whole_number, bool: _true_or_false, type(None): _none}.get(info.type)
    return parse and PrimitiveConstructorSpec(
        nargs=1,
        metavar="",
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, info.type),
        str_from_instance=lambda value: [str(value)],
    )


def _whole_number(word: str) -> int:
    """Return the number of "1000", or of "1e3"."""
    try:
        return int(word)
    except ValueError:
        number = float(word) if re.fullmatch(r"[+-]?[\d.]+e\+?\d\d?", word.lower()) else math.nan
        if not number.is_integer():
            raise
        return int(number)


def _true_or_false(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise ValueError("neither True nor False")
    return word.lower() == "true"


def _none(word: str) -> None:
    if word.lower() != "none":
        raise ValueError("not None")


RULES = ConstructorRegistry()
RULES.primitive_rule(_rule)
