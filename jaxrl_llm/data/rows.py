"""Examples of the data, and the checks of a row's values. Imports no jax."""

from __future__ import annotations

import bisect
import contextlib
import difflib
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.data.config import RESERVED_OPTIONS
from jaxrl_llm.errors import UserError

PROMPT_KEYS = ("conversations", "messages", "prompt", "question", "problem", "instruction", "input", "text")
RESPONSE_KEYS = ("completion", "response", "output")
THOUGHT_KEY = re.compile(
    r"tool_plan|(?:complex_|deepseek_)?(?:reasoning|thinking|thoughts?|cot|chain_of_thought|rationale)"
    r"(?:_content|_traces?|_details)?",
    re.IGNORECASE,
)
"""Keys of a message, and columns beside a response, that hold a thought."""
CALL_KEYS = ("tool_calls", "function_call", "function_calls")  # function_calls: OLMo 3
MEDIA_KEYS = tuple(
    f"{kind}{end}"
    for kind in ("image", "video", "audio")
    for end in ("", "s", "_url", "_urls", "_path", "_paths")
)
SHAREGPT_ROLES = {
    "human": "user",
    "prompter": "user",  # OpenAssistant
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",  # Gemini, Gemma
    "bot": "assistant",
    "ai": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
}
CALL_ROLES = ("function_call", "tool_call")  # LLaMA-Factory, ms-swift: the text is the call as JSON text
TEMPLATE_ROLES = ("function", "observation")  # names of a role that templates of models read themselves
THINKING = "enable_thinking"
SURROGATE = re.compile(r"[\ud800-\udfff]")
MAX_CHARACTERS = 1 << 24  # of one text or rendered chat: about 4M tokens
MAX_NESTING = 64  # levels of lists and objects in a row; pickle and jinja2 recurse
Message = dict[str, Any]


class RowError(UserError):
    """A row that cannot be used; the message names file, line and column. --data.bad_rows skip skips it."""


@dataclass(frozen=True)
class Damage:
    """A part of a file that cannot be read."""

    reason: str  # with its place: "file.jsonl.gz:12: ..."
    rows: int = 1  # lost, as far as that is known


@dataclass(frozen=True)
class RowFile:
    """The readable rows of one file or dataset."""

    size: int
    get: Callable[[int], Any]  # raises RowError, or its library's error, if the row is damaged
    where: Callable[[int], str]  # "file.jsonl:12"
    damage: tuple[Damage, ...] = ()

    @staticmethod
    def join(files: Sequence[RowFile]) -> RowFile:
        """Return the rows of several files, one file after the other."""
        starts = [0, *itertools.accumulate(file.size for file in files)]

        def find(i: int) -> tuple[RowFile, int]:
            which = bisect.bisect_right(starts, i) - 1
            return files[which], i - starts[which]

        def get(i: int) -> Any:
            file, row = find(i)
            return file.get(row)

        def where(i: int) -> str:
            file, row = find(i)
            return file.where(row)

        damage = itertools.chain.from_iterable(file.damage for file in files)
        return RowFile(starts[-1], get, where, tuple(damage))


@dataclass(frozen=True)
class Example:
    """One problem. Exactly one of `messages` and `text` is not None."""

    messages: tuple[Message, ...] | None  # a chat; for supervised training it may hold assistant turns
    text: str | None  # a prompt in plain text; "" if `response` is plain text to learn
    response: str | None = None  # supervised target
    answer: Any = None  # ground truth for the verifier
    thought: str = ""  # of `response`, if a column of its own has it
    source: str = ""  # data_source or name of the source: picks the verifier
    columns: dict[str, Any] = field(default_factory=dict)  # the other columns, for reward functions
    where: str = ""  # "file.jsonl:12"
    rejected: Example | None = None  # the same prompt with a worse response than this one's
    margin: float = 0.0  # by how much it is worse
    steps: tuple[tuple[str, float], ...] = ()  # of a worked solution: text, and whether it is right (0 to 1)
    teacher: int = 0  # index of the teacher that scores it
    turns: tuple[Message, ...] = ()  # supervised target of several turns, in place of `response`
    system: str = ""  # system prompt of the row, where the prompt is text
    parses_controls: bool = False  # `text` begins learned text, so its control tokens are tokens
    tools_of_run: bool = False  # `columns` has the tools of the run, which may be described elsewhere

    def __post_init__(self):
        assert (self.messages is None) != (self.text is None), self.where


def no_rows(path: Path, reason: str, lost: int = 1) -> RowFile:
    """Return a file without readable rows."""
    return RowFile(0, lambda i: None, lambda i: str(path), (Damage(reason, lost),))


def check_row(row: Any, where: str) -> None:
    """Raise RowError unless the row is an object with named columns and of bounded depth."""
    if not isinstance(row, dict):
        raise RowError(f"{where}: a row must be an object with named columns, got {type(row).__name__}")
    if not all(isinstance(key, str) for key in row):
        raise RowError(f"{where}: the names of columns must be text: {column_names(row)}")
    level: list[Any] = [row]
    for _ in range(MAX_NESTING):
        children = (value.values() if isinstance(value, dict) else value for value in level)
        level = [child for inner in children for child in inner if isinstance(child, dict | list)]
        if not level:
            return
    raise RowError(f"{where}: nested more than {MAX_NESTING} levels deep")


def check_text(value: Any, where: str) -> None:
    """Raise RowError unless the value is text that a tokenizer can read."""
    if not isinstance(value, str):
        raise RowError(f"{where} must be text, got {type(value).__name__}")
    if len(value) > MAX_CHARACTERS:
        raise RowError(f"{where} has {len(value):,} characters, more than {MAX_CHARACTERS:,}")
    if "\0" in value:
        raise RowError(f"{where} holds a NUL character")
    if SURROGATE.search(value):
        raise RowError(f"{where} holds a lone surrogate or bytes that are not UTF-8")


def check_json(value: Any, where: str) -> None:
    """Raise RowError unless the value is valid JSON whose text a tokenizer can read."""
    if isinstance(value, dict):
        for key, inner in value.items():
            check_text(key, f"{where}: a key")
            check_json(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            check_json(inner, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"{where} is {value}: it must be finite")
    elif isinstance(value, str):
        check_text(value, where)
    elif not isinstance(value, bool | int | float | None):
        expected = "text, a Python number or another value of JSON"
        raise RowError(f"{where} must be {expected}, got {type(value).__name__}")


def lookup(row: dict, key: str) -> Any:
    """Return column `key`, or None; dots reach into nested columns."""
    if key in row:
        return row[key]
    head, _, rest = key.partition(".")
    inner = row.get(head) if rest else None
    return lookup(inner, rest) if isinstance(inner, dict) else None


def template_columns(columns: dict[str, Any], where: str) -> tuple[list[dict] | None, dict[str, Any]]:
    """Return (tools, options), a row's columns for its chat template.

    Raises:
      RowError: a chat template cannot read the columns.
    """
    tools, options = columns.get("tools"), columns.get("chat_template_kwargs")
    tools, options = (None if is_null(value) else read_json_text(value, where) for value in (tools, options))
    tools = [read_json_text(tool, where) for tool in tools] if isinstance(tools, list) else tools
    options = {} if options is None else options
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools)):
        raise RowError(f"{where}: tools must be a list of JSON schemas, got {tools!r:.100}")
    if not isinstance(options, dict):
        raise RowError(f"{where}: chat_template_kwargs must be an object, got {type(options).__name__}")
    if reserved := RESERVED_OPTIONS & options.keys():
        raise RowError(f"{where}: chat_template_kwargs may not set {', '.join(sorted(reserved))}")
    given = columns.get(THINKING)  # of veRL's rows
    if not is_null(given):
        if not isinstance(given, bool):
            raise RowError(f"{where}: the column {THINKING} must be true or false, got {given!r:.100}")
        if options.get(THINKING, given) != given:
            raise RowError(f"{where}: the column {THINKING} and chat_template_kwargs contradict each other")
        options = {**options, THINKING: given}
    check_json(tools, f"{where}: tools")
    check_json(options, f"{where}: chat_template_kwargs")
    return tools or None, options


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError if it has a key twice, as one value would be left out."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {next(k for k in keys if keys.count(k) > 1)!r:.100} twice")
    return value


def read_json_text(value: Any, where: str) -> Any:
    """Parse JSON text, as tables store objects with different keys; "" is a missing cell.

    Other values are returned unchanged.
    """
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(value.strip() or "null")
    check_row({"text": value}, where)
    return value


def read_chat_text(value: Any) -> Any:
    """Parse messages from JSON text, as tables store chats; other values are returned unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    with contextlib.suppress(ValueError, RecursionError):
        chat = json.loads(value)
        said = lambda m: isinstance(m, dict) and ("content" in m or "value" in m)
        if chat and all(said(m) and role_of(m) in {*SHAREGPT_ROLES.values(), "developer"} for m in chat):
            return chat
    return value


def first_column(row: dict, keys: tuple[str, ...]) -> Any:
    """Return the first of these columns that is not null, or None."""
    return next((value for key in keys if not is_null(value := lookup(row, key))), None)


def role_of(message: dict) -> str:
    """Return the role of a message in OpenAI's or ShareGPT's format; "" if unknown.

    A role of another name than a template reads would not be learned, and an answer would stay in the prompt.
    """
    role, speaker = message.get("role"), message.get("from")
    if role:
        name = role.strip().lower() if isinstance(role, str) else ""
        return role if name in TEMPLATE_ROLES else SHAREGPT_ROLES.get(name, name and role)
    return SHAREGPT_ROLES.get(speaker, "") if isinstance(speaker, str) else ""


def without_reference(messages: Sequence[Message]) -> list[Message]:
    """Return a chat up to the policy's turn: assistant turns at its end are a reference, not the prompt."""
    asked = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
    return list(messages[: asked[-1] + 1]) if asked else []


def column_names(row: dict) -> str:
    """Return the names of a row's columns, for messages; null ones are marked."""
    return ", ".join(sorted(f"{name} (null)" if is_null(value) else str(name) for name, value in row.items()))


def no_column(where: str, field: str, key: str, row: dict) -> RowError:
    """Return the error of a row without a column that its source names; it has the flag and the nearest
    name."""
    present = [name for name, value in row.items() if not is_null(value)]
    near = difflib.get_close_matches(key, present, n=1, cutoff=0.5)
    advice = f" Did you mean {near[0]}?" if near else ""
    return RowError(
        f"{where}: no {field} {key!r} (--data.train.0.{field}).{advice} The columns are {column_names(row)}"
    )


def is_null(value: Any) -> bool:
    """Return whether a value is missing: tables write a missing number as NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))
