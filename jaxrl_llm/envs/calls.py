"""Tool calls in responses: parse them, render them, check their arguments.

A broken call becomes an `InvalidToolCall` with the reason, for the model to read; no text of a model raises.
Calls inside a thought, up to </think>, do not count.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from jaxrl_llm.envs.formats import DECODER, FORMATS, InvalidToolCall, ToolCall
from jaxrl_llm.errors import UserError

MAX_CALLS = 32  # of one turn; each costs about one pass over the text at most, so no text takes long


def parse_calls(text: str, format: str) -> list[ToolCall | InvalidToolCall]:
    """Return the tool calls of one turn, in order. Raises only for an unknown format (KeyError)."""
    thought, end, rest = text.partition("</think>")
    if not end:
        rest = "" if thought.lstrip().startswith("<think>") else text
    calls = list(itertools.islice(FORMATS[format].read(rest), MAX_CALLS + 1))
    if len(calls) > MAX_CALLS:
        calls[MAX_CALLS:] = [
            InvalidToolCall("", f"more than {MAX_CALLS} calls in one turn; the rest was not read")
        ]
    return calls


def render_call(call: ToolCall, format: str) -> str:
    """Return the text of a call: `parse_calls` reads it back.

    An xml call has no types: its values come back as strings, and `check_arguments` restores them.

    Raises:
        ValueError: the format has no way to write this call.
    """
    return FORMATS[format].render(call)


def detect_format(template: str) -> str:
    """Return the format that a chat template (Jinja text) writes tool calls in.

    Raises:
        UserError: it is none of FORMATS.
    """
    for name, known in FORMATS.items():
        if known.used_by(template):
            return name
    raise UserError(
        "the chat template shows no format of tool calls that is known here: name it, one of "
        f"{', '.join(FORMATS)}"
    )


def check_arguments(call: ToolCall, schema: dict[str, Any]) -> ToolCall | InvalidToolCall:
    """Return the call with arguments as the tool's schema requires them, or what is wrong with them.

    A string where the schema has another type is read as JSON. Known of JSON schema: type, properties,
    required, additionalProperties, items, enum, anyOf, oneOf.
    """
    parameters = {"type": "object", "properties": {}, **(schema.get("parameters") or {})}
    try:
        return ToolCall(call.name, _conform(call.arguments, parameters, "arguments"))
    except ValueError as problem:
        return InvalidToolCall(call.name, f"{call.name}: {problem}")


TYPES = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def _conform(value: Any, schema: Any, where: str) -> Any:
    """Return `value` as the schema requires it; ValueError names the part that is not."""
    if not isinstance(schema, dict):  # true: any value
        return value
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _first(value, options, where)
    value = _typed(value, schema.get("type", list(TYPES)), where)
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{where} must be one of {json.dumps(schema['enum'])}")
    if isinstance(value, list | tuple):
        return [_conform(item, schema.get("items", {}), f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and "properties" in schema:
        return _object(value, schema, where)
    return value


def _typed(value: Any, required: str | list[str], where: str) -> Any:
    names = [required] if isinstance(required, str) else required
    if not TYPES.keys() >= {*names}:  # a type that JSON schema lacks, such as "any"
        return value
    if isinstance(value, str) and "string" not in names:
        try:
            read = DECODER.decode(PYTHON.get(value, value))
            json.dumps(read, allow_nan=False)  # 1e999
        except (ValueError, RecursionError):
            raise ValueError(f"{where} must be {' or '.join(names)}, not the text {value[:40]!r}") from None
        value = read
    if "integer" in names and isinstance(value, float) and value.is_integer():
        value = int(value)
    kinds = tuple(kind for name in names for kind in TYPES[name])
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{where} must be {' or '.join(names)}, not {json.dumps(value)[:40]}")
    return value


def _first(value: Any, options: list[dict[str, Any]], where: str) -> Any:
    problems = []
    for option in options:
        try:
            return _conform(value, option, where)
        except ValueError as problem:
            problems.append(str(problem))
    raise ValueError(", or ".join(problems))


def _object(value: dict[str, Any], schema: dict[str, Any], where: str) -> dict[str, Any]:
    properties = schema["properties"]
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        raise ValueError(f"{where} must have {', '.join(missing)}")
    unknown = [name for name in value if name not in properties]
    if unknown and not schema.get("additionalProperties"):
        raise ValueError(
            f"{where} may not have {unknown[0][:40]!r}, only {', '.join(properties) or 'nothing'}"
        )
    return {name: _conform(item, properties.get(name, {}), name) for name, item in value.items()}


PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Python's words for JSON's, as xml calls may write them."""
