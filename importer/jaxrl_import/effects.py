"""Keys of other systems that no table has: which of them change the result, and with which values."""

from __future__ import annotations

import re
from typing import Any

from jaxrl_import.values import UNSET, key_table

OFF = (None, False, 0, "", "none", "null", "off", "disable", "disabled", "no", [], {})
"""Values that have no effect, unless keys/effects.toml gives the key others; "OFF" there stands for these."""
UNKNOWN_KEY = "import-config does not know this key; see what it changes there"
_TABLES = key_table("effects")


def changes_result(system: str, key: str, value: Any) -> tuple[bool, str]:
    """Return whether a key outside all tables changes the result with this value, and the replacement. For
    systems with a list of keys, an unknown key that has a value counts as changing the result.
    """
    for effect in _TABLES.get(system, ()):
        if re.fullmatch(effect["keys"], key, re.VERBOSE):
            neutral = effect.get("neutral", ["OFF"])
            is_neutral = (value in OFF and "OFF" in neutral) or (UNSET if value is None else value) in neutral
            return not is_neutral, effect["reason"]
    harmless = _TABLES["harmless"].get(system)
    if harmless is None or re.fullmatch(harmless, key, re.VERBOSE):
        return False, ""
    return value not in (None, "None", {}, []), UNKNOWN_KEY
