"""Tool calls in responses: parse them, render them, check their arguments.

A broken call becomes an `InvalidToolCall` with the reason, for the model to read; no text of a model raises.
Calls inside a thought, up to </think> or its like, do not count.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from jaxrl_llm.data.rows import Example
from jaxrl_llm.envs.env import Step, Tool, ToolError, Turn
from jaxrl_llm.envs.formats import CANNOT_READ, DECODER, FORMATS, MAX_PYTHON, InvalidToolCall, ToolCall
from jaxrl_llm.thoughts import MARKS

MAX_REFERENCES = 32  # that lead from one to the next
MAX_VISITS = 200_000  # of parts of a schema, for one call: options within options are exponentially many
MAX_CALLS = 32  # of one turn; each costs about one pass over the text at most, so no text takes long


def parse_calls(text: str, format: str) -> list[ToolCall | InvalidToolCall]:
    """Return the tool calls of one turn, in order. Raises only for an unknown format (KeyError)."""
    opening = next((mark for mark in MARKS if text.lstrip().startswith(mark)), "")
    _, end, rest = text.partition(MARKS.get(opening, "</think>"))  # a prompt may have opened the thought
    if not end:
        rest = "" if opening else text
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


def check_arguments(call: ToolCall, schema: dict[str, Any]) -> ToolCall | InvalidToolCall:
    """Return the call with arguments converted to the tool's schema, or an InvalidToolCall with the problem.

    If the schema has another type, a string is read as JSON or as a Python literal. Supports these keywords
    of JSON schema: type, properties, required, additionalProperties, items, prefixItems, enum, const, anyOf,
    oneOf, allOf, and $ref within the schema. A reference to another document allows any value.
    """
    parameters = {"type": "object", "properties": {}, **(schema.get("parameters") or {})}
    try:
        document = _Document(parameters, iter(range(MAX_VISITS)))
        return ToolCall(call.name, _conform(call.arguments, parameters, document, where="arguments"))
    except ValueError as problem:
        return InvalidToolCall(call.name, f"{call.name}: {problem}")
    except RecursionError:  # of a schema that refers to itself, or with too many options
        return InvalidToolCall(call.name, f"{call.name}: the arguments are nested too deeply for the schema")


FORMS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("required", "enum", "anyOf", "oneOf", "allOf", "prefixItems"), list),
    "properties": dict,
    "type": (str, list),
    "$ref": str,
}
"""Keywords of JSON schema that `check_arguments` reads -> the types that they may have."""


def schema_problem(parameters: dict[str, Any]) -> str:
    """Return why `check_arguments` cannot read these parameters of a tool, or ""."""
    waiting: list[Any] = [parameters]
    seen: set[int] = set()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        for key, kinds in FORMS.items():
            if key in schema and not isinstance(schema[key], kinds):
                return f"{key} is {schema[key]!r:.40}, which JSON schema does not allow"
        # Names, and the schemas in this one.
        names = [*schema.get("required", ()), *schema.get("type", ())]
        if not all(isinstance(name, str) for name in names):
            return f"required and type must hold names, not {names!r:.40}"
        inner = [schema.get("items"), schema.get("additionalProperties")]
        inner += schema.get("properties", {}).values()
        inner += [part for key in ("anyOf", "oneOf", "allOf", "prefixItems") for part in schema.get(key, ())]
        waiting += [*inner, _target(schema["$ref"], parameters)] if "$ref" in schema else inner
    return ""


TYPES = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


class _Document(NamedTuple):
    """The whole schema of a call."""

    root: dict[str, Any]
    """The schema that references point into."""
    visits: Iterator[int]
    """An item for each part of it that may still be compared with a value."""


def _conform(value: Any, schema: Any, document: _Document, *, where: str) -> Any:
    """Return `value` as the schema requires it; ValueError names the part that is not."""
    if next(document.visits, None) is None:
        raise RecursionError
    schema = _followed(schema, document.root)
    if not isinstance(schema, dict):  # true: any value
        return value
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _first(value, options, document, where=where)
    value = _typed(value, schema.get("type", list(TYPES)), where)
    if "const" in schema or "enum" in schema:
        value = _chosen(value, schema, where)
    if isinstance(value, list | tuple):
        first, rest = schema.get("prefixItems", []), schema.get("items", {})
        schemas = [*first, *[rest] * len(value)]
        return [_conform(item, schemas[i], document, where=f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and ("properties" in schema or schema.get("additionalProperties")):
        return _object(value, schema, document, where=where)
    return value


def _followed(schema: Any, root: dict[str, Any]) -> Any:
    """Resolve `$ref` and `allOf` in a schema; pydantic writes types of parameters with them."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not ("$ref" in schema or "allOf" in schema):
            return schema
        parts = [_target(schema["$ref"], root)] if "$ref" in schema else []
        parts += schema.get("allOf", [])
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        merged: dict[str, Any] = {}
        for part in (*parts, own):
            part = part if isinstance(part, dict) else {}
            both = {"properties": {**merged.get("properties", {}), **part.get("properties", {})}}
            both["required"] = [*merged.get("required", ()), *part.get("required", ())]
            merged |= part | {key: value for key, value in both.items() if value}
        schema = merged
    return {}  # references in a circle


def _target(reference: Any, root: dict[str, Any]) -> Any:
    """Return the part of a schema that "#/$defs/Point" names; {} for one that is elsewhere."""
    path = str(reference).split("/")
    part: Any = root if path[0] == "#" else {}
    for name in path[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        part = part.get(name, {}) if isinstance(part, dict) else {}
    return part


def _chosen(value: Any, schema: dict[str, Any], where: str) -> Any:
    """Return the allowed value that matches."""
    allowed = [schema["const"]] if "const" in schema else schema["enum"]
    read = _literal(value) if isinstance(value, str) else value
    for meant in (value, read):
        if any(meant == one and isinstance(meant, bool) == isinstance(one, bool) for one in allowed):
            return meant
    expected = json.dumps(schema["const"]) if "const" in schema else f"one of {json.dumps(allowed)}"
    raise ValueError(f"{where} must be {expected}")


def _typed(value: Any, required: str | list[str], where: str) -> Any:
    names = [required] if isinstance(required, str) else required
    if not TYPES.keys() >= {*names}:  # a type that JSON schema lacks, such as "any"
        return value
    if isinstance(value, str) and "string" not in names:
        value, text = _literal(value), value
        if value is text:
            raise ValueError(f"{where} must be {' or '.join(names)}, not the text {value[:40]!r}")
    if "integer" in names and isinstance(value, float) and value.is_integer():
        value = int(value)
    kinds = tuple(kind for name in names for kind in TYPES[name])
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{where} must be {' or '.join(names)}, not {json.dumps(value)[:40]}")
    return value


def _literal(text: str) -> Any:
    """Parse text as JSON or a Python literal (some templates write Python); else return the text."""
    for read in (DECODER.decode, ast.literal_eval)[: 1 + (len(text) <= MAX_PYTHON)]:
        with contextlib.suppress(TypeError, *CANNOT_READ):  # 1e999, a set; a tuple is a list
            return json.loads(json.dumps(read(text), allow_nan=False))
    return text


def _first(value: Any, options: list[Any], document: _Document, *, where: str) -> Any:
    problems = []
    for option in options:
        try:
            return _conform(value, option, document, where=where)
        except ValueError as problem:
            problems.append(str(problem))
    raise ValueError(", or ".join(problems)[:1000])


def _object(value: dict[str, Any], schema: dict[str, Any], document: _Document, *, where: str) -> dict:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        raise ValueError(f"{where} must have {', '.join(missing)}")
    unknown = [name for name in value if name not in properties]
    if unknown and not others:
        raise ValueError(
            f"{where} may not have {unknown[0][:40]!r}, only {', '.join(properties) or 'nothing'}"
        )
    return {
        name: _conform(item, properties.get(name, others), document, where=name)
        for name, item in value.items()
    }


def call_record(call: ToolCall | InvalidToolCall) -> dict[str, Any]:
    """Return a call for `Step.calls`."""
    if isinstance(call, InvalidToolCall):
        return {"text": call.text, "error": call.problem}
    return {"name": call.name, "arguments": call.arguments}


class ToolResult(NamedTuple):
    """The result of one tool call."""

    text: str
    error: bool = False
    timeout: bool = False


class ToolEnv:
    """A turn without a tool call ends the conversation; the verifier scores it.

    `role` is the role of its messages. It limits the time of each call itself (`own_limits`).

    Args:
        tools: by name.
        format: of tool calls, a key of calls.FORMATS.
        timeout: seconds one call may take.
        max_calls: maximum number of calls executed in one turn.
    """

    role = "tool"
    own_limits = True

    def __init__(self, tools: Mapping[str, Tool], format: str, timeout: float, max_calls: int = 16):
        self.tools, self.format, self.timeout, self.max_calls = tools, format, timeout, max_calls

    async def reset(self, example: Example, seed: int) -> None:
        """Return no state: tools keep none of a conversation."""
        return None

    async def step(self, state: None, turn: Turn) -> Step:
        """Return the results of the turn's tool calls."""
        calls = parse_calls(turn.text, self.format)
        if not calls or turn.last:
            return Step(done=True, tool_calls=len(calls), calls=list(map(call_record, calls)))
        results = await asyncio.gather(*map(self._run, calls[: self.max_calls]))
        too_many = f"error: only the first {self.max_calls} calls of a turn are carried out"
        results += [ToolResult(too_many, error=True)] * (len(calls) - len(results))
        messages = [
            {"role": "tool", "name": getattr(call, "name", ""), "content": result.text}
            for call, result in zip(calls, results, strict=True)
        ]
        errors, timeouts = sum(r.error for r in results), sum(r.timeout for r in results)
        return Step(
            messages,
            calls=list(map(call_record, calls)),
            tool_calls=len(calls),
            tool_errors=errors,
            timeouts=timeouts,
        )

    async def _run(self, call: ToolCall | InvalidToolCall) -> ToolResult:
        """Carry out one call; errors become text for the policy."""
        if isinstance(call, ToolCall):
            if call.name not in self.tools:
                known = ", ".join(self.tools)
                return ToolResult(f"error: there is no tool {call.name!r}, only {known}", error=True)
            call = check_arguments(call, self.tools[call.name].schema)
        if isinstance(call, InvalidToolCall):
            return ToolResult(f"error: {call.problem}", error=True)
        tool = self.tools[call.name]
        try:
            async with getattr(tool, "turn", contextlib.nullcontext()), asyncio.timeout(self.timeout):
                return ToolResult(str(await tool.call(call.arguments)))
        except TimeoutError:
            return ToolResult(f"error: stopped after {self.timeout:g} s without a result", True, True)
        except ToolError as error:
            return ToolResult(f"error: {error}", error=True)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # met with these arguments
            if asyncio.current_task().cancelling():  # by the end of the run, not by the tool
                raise
            return ToolResult(f"error: {type(error).__name__}: {error}", error=True)
