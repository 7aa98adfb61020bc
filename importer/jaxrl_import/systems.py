"""Table of the systems whose files are read."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from jaxrl_import import chatlearn, openrlhf, rl2, trl, verl
from jaxrl_import.fields import Field, System

SYSTEMS: dict[str, System] = {
    module.SYSTEM.name: module.SYSTEM for module in (verl, openrlhf, trl, rl2, chatlearn)
}


@functools.cache
def fields_by_name() -> dict[str, list[Field]]:
    """Return the fields of all systems by their keys, including older names, and by the last parts of keys.

    The likeliest field comes first: a whole key before longer keys with this end, and the policy's keys
    before the critic's, as in the tables. A single word is a name only if it is a key, or has an underscore.
    """
    keys = list(_all_fields())
    names: dict[str, list[Field]] = {}
    for name, field in [*keys, *((end, field) for key, field in keys for end in _ends(key))]:
        ours = re.match(r"[\w.-]*", field.ours or field.hint)[0].lstrip("-")
        if name != ours.rpartition(".")[2]:  # else the nearest key is the answer
            names.setdefault(name, []).append(field)
    return names


def _ends(key: str) -> Iterator[str]:
    """Yield the last parts of a key, without single words."""
    parts = key.split(".")
    for start in range(1, len(parts)):
        end = ".".join(parts[start:])
        if "." in end or "_" in end:
            yield end


def _all_fields() -> Iterator[tuple[str, Field]]:
    for system in SYSTEMS.values():
        for table in system.tables.values():
            yield from table.items()
            for old, keys in system.aliases.items():
                yield from ((old, table[key]) for key in keys.split("|") if key in table)
