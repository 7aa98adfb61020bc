"""Table of the systems whose files are read."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from jaxrl_llm.importer import chatlearn, openrlhf, rl2, trl, verl
from jaxrl_llm.importer.fields import Field, System

SYSTEMS: dict[str, System] = {
    module.SYSTEM.name: module.SYSTEM for module in (verl, openrlhf, trl, rl2, chatlearn)
}


@functools.cache
def fields_by_name() -> dict[str, Field]:
    """Return the fields of all systems by their keys, older names included, and by the last parts of keys.

    Of several keys that end alike the first counts: tables name the policy's before the critic's. One word
    alone is a name only where it is a key, or has an underscore.
    """
    names: dict[str, Field] = {}
    for key, field in _all_fields():
        parts = key.split(".")
        for start in range(len(parts)):
            tail = ".".join(parts[start:])
            is_name = "." in tail or "_" in tail or not start
            ours = re.match(r"[\w.-]*", field.ours or field.hint)[0].lstrip("-")
            if is_name and tail != ours.rpartition(".")[2]:  # else the nearest key is the answer
                names.setdefault(tail, field)
    return names


def _all_fields() -> Iterator[tuple[str, Field]]:
    for system in SYSTEMS.values():
        for table in system.tables.values():
            yield from table.items()
            for old, keys in system.aliases.items():
                yield from ((old, table[key]) for key in keys.split("|") if key in table)
