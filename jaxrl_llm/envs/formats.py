"""The four formats of tool calls that calls.py reads and writes.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>         Hermes, Qwen 2.5 and 3
llama     {"name": ..., "parameters": {...}}, maybe after <|python_tag|>   Llama 3.x
xml       <function=name><parameter=x>value</parameter></function>         Qwen3-Coder, Qwen 3.5, Seed-OSS
pythonic  [name(x=value), ...]                                             Llama 3.2 and 4

A reader yields tool calls in order and never raises; a stretch of text is read about once for each call.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_PYTHON = 20_000  # characters given to Python's parser
MAX_SHOWN = 200  # characters of a bad call that are kept


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; its arguments are not yet checked against the schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class InvalidToolCall:
    """Text in the form of a tool call that cannot be read as one."""

    text: str
    """Its beginning."""
    problem: str
    """The error, for the model to read."""


@dataclass(frozen=True)
class CallFormat:
    """One format of tool calls."""

    read: Callable[[str], Iterator[ToolCall | InvalidToolCall]]
    render: Callable[[ToolCall], str]
    example: str
    """Beginning of the example in prompts that ask for this format."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)
SPACE = re.compile(r"\s*")
CALL_KEYS = {"name", "arguments", "parameters", "type", "id"}


def _skip(text: str, at: int) -> int:
    return SPACE.match(text, at).end()


def _read_json(text: str, at: int) -> tuple[Any, int]:
    """Return (value, index of its end)."""
    try:
        return DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"the JSON is broken at its character {error.pos - at}: {error.msg}") from None


def _json_call(text: str, at: int) -> tuple[ToolCall, int]:
    value, end = _read_json(text, _skip(text, at))
    if not isinstance(value, dict):
        raise ValueError('a call is a JSON object with "name" and "arguments"')
    if unknown := sorted(value.keys() - CALL_KEYS):
        raise ValueError(f'unknown key {unknown[0][:MAX_SHOWN]!r}: a call has "name" and "arguments"')
    if "arguments" in value and "parameters" in value:
        raise ValueError('give "arguments" or "parameters", not both')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except ValueError as error:
            raise ValueError(f'"arguments" is a string that is not JSON: {error}') from None
    return _call(value.get("name"), arguments), end


def _call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not name:
        raise ValueError('"name" must be the name of a tool')
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" must be an object')
    try:
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # a lone surrogate, 1e999, a set
        raise ValueError(f"not JSON: {error}") from None
    return ToolCall(name, arguments)


def _render_json(call: ToolCall, key: str) -> str:
    text = json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)
    return text.replace("</think>", "<\\/think>")


CANNOT_READ = (ValueError, SyntaxError, RecursionError, MemoryError)
"""Errors of JSON and Python for broken text, and for text nested too deeply."""


def _bad(text: str, at: int, error: BaseException) -> InvalidToolCall:
    deep = isinstance(error, RecursionError | MemoryError)
    return InvalidToolCall(text[at : at + MAX_SHOWN], "the call is nested too deeply" if deep else str(error))


def _each(
    text: str, opening: re.Pattern, read: Callable[[str, re.Match], tuple[ToolCall, int]]
) -> Iterator[ToolCall | InvalidToolCall]:
    """Yield the results of `read` at each opening that is not inside an earlier call."""
    at = 0
    while match := opening.search(text, at):
        try:
            call, at = read(text, match)
            yield call
        except CANNOT_READ as error:
            at = match.end()
            yield _bad(text, match.start(), error)


def _closed(text: str, at: int, closing: str) -> int:
    """Return where the text continues after `closing`; the end of the text closes too (stop strings)."""
    at = _skip(text, at)
    if at < len(text) and not text.startswith(closing, at):
        raise ValueError(f"{text[at : at + 20]!r} after the call, where {closing} belongs")
    return at + len(closing)


def _check_end(text: str, at: int, closing: str) -> None:
    if text.find(closing, at) < 0:
        raise ValueError(f"the call was cut off: it has no {closing}")


def _hermes(text: str, match: re.Match) -> tuple[ToolCall, int]:
    try:
        call, end = _json_call(text, match.end())
        return call, _closed(text, end, "</tool_call>")
    except ValueError:
        _check_end(text, match.end(), "</tool_call>")
        raise


BARE = re.compile(r'\s*(?=\{\s*"(?:name|type|id|parameters|arguments)"\s*:)')
TAG = re.compile(r"<\|python_tag\|>")
NEXT = re.compile(r"\s*(?:;|,|<\|python_tag\|>)?\s*(?=\{)")


def _llama(text: str) -> Iterator[ToolCall | InvalidToolCall]:
    """Yield calls from the tag, or from the start of JSON text, as long as one object follows another."""
    match = BARE.match(text) or TAG.search(text)
    while match:
        try:
            call, end = _json_call(text, match.end())
            yield call
        except CANNOT_READ as error:
            yield _bad(text, match.end(), error)
            return
        match = NEXT.match(text, end)


NAME = re.compile(r"[^\s<>]+")
FUNCTION = re.compile(r"(?:<(?:seed:)?tool_call>\s*)?<function=([^\s<>]*)|<(?:seed:)?tool_call>")
PARAMETER = re.compile(r"\s*(?:<parameter=([^\s<>]+)>|</function>)")


def _xml(text: str, match: re.Match) -> tuple[ToolCall, int]:
    name, at, arguments = match[1], match.end(), {}
    if not name or not text.startswith(">", at):
        raise ValueError("a call begins with <function=NAME>, where NAME is the name of a tool")
    at += 1
    while True:
        tag = PARAMETER.match(text, at)
        if tag is None:
            _check_end(text, at, "</function>")
            at = _skip(text, at)
            raise ValueError(f"{text[at : at + 20]!r} where <parameter=NAME> or </function> belongs")
        if tag[1] is None:
            return _call(name, arguments), tag.end()
        end = text.find("</parameter>", tag.end())
        if end < 0:
            raise ValueError(f"the call was cut off: parameter {tag[1]} has no </parameter>")
        if tag[1] in arguments:
            raise ValueError(f"parameter {tag[1]} is given twice")
        arguments[tag[1]] = text[tag.end() : end].removeprefix("\n").removesuffix("\n")
        at = end + len("</parameter>")


def _render_xml(call: ToolCall) -> str:
    lines = [f"<tool_call>\n<function={call.name}>"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if "</parameter>" in text or "</think>" in text:
            raise ValueError(f"{call.name}: no xml call can have </parameter> or </think> in {key}")
        lines.append(f"<parameter={key}>\n{text}\n</parameter>")
    if bad := [word for word in (call.name, *call.arguments) if not NAME.fullmatch(word)]:
        raise ValueError(f"{bad[0]!r} cannot be a name in an xml call")
    return "\n".join([*lines, "</function>\n</tool_call>"])


LIST = re.compile(r"\A\s*(?=\[\s*[A-Za-z_][\w.]*\s*\()|<\|python_start\|>\s*")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _pythonic(text: str) -> Iterator[ToolCall | InvalidToolCall]:
    """Yield the calls of lists, from the tag or the start of the text to its end."""
    match = LIST.search(text)
    if match is None:
        return
    body = text[match.end() :].strip().removesuffix("<|python_end|>")
    try:
        if len(body) > MAX_PYTHON:
            raise ValueError(f"the calls are longer than {MAX_PYTHON} characters")
        for statement in ast.parse(body).body:
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.List):
                raise ValueError("calls are a list: [name(argument=value), ...]")
            yield from [_python_call(node) for node in statement.value.elts]
    except CANNOT_READ as error:
        yield _bad(text, match.end(), error)


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or not all(k.arg for k in node.keywords):
        raise ValueError("a call is name(argument=value, ...), every argument with its name")
    try:
        arguments = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
    except (ValueError, TypeError):
        raise ValueError("a value must be written out: no variables, no computation") from None
    return _call(ast.unparse(node.func), arguments)


def _render_pythonic(call: ToolCall) -> str:
    words = [*call.name.split("."), *call.arguments]
    if bad := [word for word in words if not IDENTIFIER.fullmatch(word) or keyword.iskeyword(word)]:
        raise ValueError(f"{bad[0]!r} cannot be a name in a pythonic call")
    values = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
    return f"[{call.name}({values})]".replace("</think>", "<\\x2fthink>")


FORMATS = {
    "xml": CallFormat(
        lambda text: _each(text, FUNCTION, _xml), _render_xml, "<function=example_function_name>"
    ),
    "hermes": CallFormat(
        lambda text: _each(text, re.compile("<tool_call>"), _hermes),
        lambda call: f"<tool_call>\n{_render_json(call, 'arguments')}\n</tool_call>",
        '<tool_call>\n{"name": ',
    ),
    "pythonic": CallFormat(_pythonic, _render_pythonic, "[func_name1("),
    "llama": CallFormat(
        _llama, lambda call: _render_json(call, "parameters"), '{"name": function name, "parameters"'
    ),
}
"""Name -> format."""
