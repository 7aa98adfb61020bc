"""Tables of the other systems' keys, keys/*.toml, as fields and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxrl_import import values
from jaxrl_import.fields import Conversion, Field, System
from jaxrl_import.values import UNSET, key_table


def load_system(
    name: str,
    title: str,
    *,
    rules: Mapping[str, Callable[[Conversion], None]],
    readers: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
) -> System:
    """Return a system with the trainers, keys and older names of keys/NAME.toml, whose head explains it.

    Args:
        rules: trainer -> rules for several keys together.
        readers: functions that read values, by their names in the table, besides those of values.py.
    """
    tables = key_table(name)
    aliases = tables.pop("_aliases", {})
    known = {**vars(values), **readers}
    rows = {trainer: _rows(tables, trainer) for trainer in tables if not trainer.startswith("_")}
    fields = {
        trainer: {key: _field(row, known) for key, row in keys.items() if row.get("read")}
        for trainer, keys in rows.items()
    }
    defaults = {
        trainer: {
            key: None if row["default"] == UNSET else row["default"]
            for key, row in keys.items()
            if "default" in row
        }
        for trainer, keys in rows.items()
    }
    return System(name, title, fields, defaults, rules=rules, aliases=aliases)


def _field(row: Mapping[str, Any], readers: Mapping[str, Callable[[Any], Any]]) -> Field:
    return Field(row.get("ours", ""), readers[row["read"]], row.get("hint", ""))


def _rows(tables: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """Return the lines of a table by key, after the lines of the tables that it extends.

    A line with a reader replaces the extended table's line, except its default.
    """
    rows: dict[str, dict[str, Any]] = {}
    for parent in tables[name].get("extends", "").split():
        rows |= _rows(tables, parent)
    for key, row in tables[name].items():
        if key == "extends":
            continue
        if "like" in row:
            for end, line in _rows(tables, row["like"]).items():
                rows[f"{key}.{end}".lstrip(".")] = {
                    part: _here(text, row["ours"]) for part, text in line.items()
                }
            continue
        before = rows.get(key, {})
        if "read" in row:
            before = {part: value for part, value in before.items() if part == "default"}
        rows[key] = {**before, **row}
    return rows


def _here(value: Any, ours: str) -> Any:
    return value.replace("HERE", ours) if isinstance(value, str) else value
