"""Tool calls in what a model writes: reading them, writing them, checking their arguments.

What is not a call as it should be becomes a `BadCall` that says why, for the model to read; nothing that a
model writes raises. Calls inside a thought, up to </think>, are none.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from jaxrl_llm.envs.formats import FORMATS, BadCall, Call
from jaxrl_llm.errors import UserError

__all__ = ["FORMATS", "BadCall", "Call", "checked", "detect", "parse", "render"]

MAX_CALLS = 32  # of one turn; each costs about one pass over the text at most, so no text takes long


def parse(text: str, format: str) -> list[Call | BadCall]:
    """The calls of one turn, in order; [] where it has none. Raises only for an unknown format (KeyError)."""
    thought, end, rest = text.partition("</think>")
    if not end:
        rest = "" if thought.lstrip().startswith("<think>") else text
    calls = list(itertools.islice(FORMATS[format].read(rest), MAX_CALLS + 1))
    if len(calls) > MAX_CALLS:
        calls[MAX_CALLS:] = [BadCall("", f"more than {MAX_CALLS} calls in one turn; the rest was not read")]
    return calls


def render(call: Call, format: str) -> str:
    """The call as a model should write it: `parse` reads it back.

    An xml call says no types: its values come back as strings, and `checked` makes of them what they were.

    Raises:
        ValueError: the format has no way to write this call.
    """
    return FORMATS[format].render(call)


def detect(template: str) -> str:
    """The format that a chat template (Jinja text) writes calls in.

    Raises:
        ValueError: none of those that are known here.
    """
    for name, known in FORMATS.items():
        if known.used_by(template):
            return name
    raise UserError(
        "the chat template shows no format of tool calls that is known here: name it, one of "
        f"{', '.join(FORMATS)}"
    )


def checked(call: Call, schema: dict[str, Any]) -> Call | BadCall:
    """The call with arguments as the tool's schema wants them, or what is wrong with them.

    A string where the schema wants another type is read as JSON. Known of JSON schema: type, properties,
    required, additionalProperties, items, enum, anyOf, oneOf.
    """
    parameters = {"type": "object", "properties": {}, **schema.get("parameters", {})}
    try:
        return Call(call.name, _conform(call.arguments, parameters, "arguments"))
    except ValueError as problem:
        return BadCall(call.name, f"{call.name}: {problem}")


TYPES = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def _conform(value: Any, schema: dict[str, Any], where: str) -> Any:
    """`value` as the schema wants it; ValueError says which part is not."""
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _first(value, options, where)
    value = _typed(value, schema.get("type", list(TYPES)), where)
    if "enum" in schema and value not in schema["enum"]:
        raise UserError(f"{where} must be one of {json.dumps(schema['enum'])}")
    if isinstance(value, list | tuple):
        return [_conform(item, schema.get("items", {}), f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and "properties" in schema:
        return _object(value, schema, where)
    return value


def _typed(value: Any, wanted: str | list[str], where: str) -> Any:
    names = [wanted] if isinstance(wanted, str) else wanted
    if isinstance(value, str) and "string" not in names:
        try:
            value = json.loads(PYTHON.get(value, value))
        except (ValueError, RecursionError):
            raise UserError(f"{where} must be {' or '.join(names)}, not the text {value[:40]!r}") from None
    if "integer" in names and isinstance(value, float) and value.is_integer():
        value = int(value)
    kinds = tuple(kind for name in names for kind in TYPES[name])
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UserError(f"{where} must be {' or '.join(names)}, not {json.dumps(value)[:40]}")
    return value


def _first(value: Any, options: list[dict[str, Any]], where: str) -> Any:
    problems = []
    for option in options:
        try:
            return _conform(value, option, where)
        except ValueError as problem:
            problems.append(str(problem))
    raise UserError(", or ".join(problems))


def _object(value: dict[str, Any], schema: dict[str, Any], where: str) -> dict[str, Any]:
    properties = schema["properties"]
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        raise UserError(f"{where} must have {', '.join(missing)}")
    unknown = [name for name in value if name not in properties]
    if unknown and not schema.get("additionalProperties"):
        raise UserError(
            f"{where} may not have {unknown[0][:40]!r}, only {', '.join(properties) or 'nothing'}"
        )
    return {name: _conform(item, properties.get(name, {}), name) for name, item in value.items()}


PYTHON = {"True": "true", "False": "false", "None": "null"}
"""What xml calls write for JSON's words."""
