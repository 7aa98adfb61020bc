"""Rows of the known shapes as `Example`s.

Accepted as they are (the first of these columns that a row has decides):

    conversations                      ShareGPT: list of {from, value}
    messages                           RL2, TRL, OpenAI: list of {role, content}
    prompt (text or messages)          veRL, TRL, RL2, OpenRLHF
    question                           GSM8K
    problem                            MATH, NuminaMath, DeepScaleR
    instruction [+ input]              Alpaca
    input (text or messages)           OpenRLHF
    text                               plain text, all of it learned

The ground truth is the first of `ANSWER_KEYS`, the supervised target the first of `RESPONSE_KEYS`.
`prompt_key`, `answer_key` and `response_key` of the source come first; dots reach into nested columns.
Pairs, steps, judgements and scores: jaxrl_llm/data/preference.py. Imports no jax.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.data.config import GENERATED, RESERVED_OPTIONS, SourceConfig
from jaxrl_llm.errors import UserError

PROMPT_KEYS = ("conversations", "messages", "prompt", "question", "problem", "instruction", "input", "text")
ANSWER_KEYS = (
    "reward_model.ground_truth",  # veRL
    "ground_truth",
    "answer",
    "label",  # OpenRLHF
    "solution",
    "target",
    "extra_info.answer",  # RL2
    "extra_info.ground_truth",
)
RESPONSE_KEYS = ("completion", "response", "output")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
SEPARATOR = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)  # of thousands
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
    """The rows of one file or dataset, without what is lost of it."""

    size: int
    get: Callable[[int], Any]  # raises RowError, or what its library raises, where the row is damaged
    where: Callable[[int], str]  # "file.jsonl:12"
    damage: tuple[Damage, ...] = ()


@dataclass(frozen=True)
class Example:
    """One problem. Exactly one of `messages` and `text` is not None."""

    messages: tuple[Message, ...] | None  # a chat; for supervised training it may hold assistant turns
    text: str | None  # a prompt in plain text; "" where all of `response` is learned text
    response: str | None = None  # supervised target
    answer: Any = None  # ground truth, what the verifier compares
    source: str = ""  # data_source or name of the source: picks the verifier
    columns: dict[str, Any] = field(default_factory=dict)  # the other columns, for reward functions
    where: str = ""  # "file.jsonl:12"
    rejected: Example | None = None  # the same prompt with a worse response than this one's
    margin: float = 0.0  # by how much it is worse
    steps: tuple[tuple[str, float], ...] = ()  # of a worked solution: text, and whether it is right (0 to 1)
    teacher: int = 0  # index of the teacher that scores it
    turns: tuple[Message, ...] = ()  # supervised target of several turns, in place of `response`

    def __post_init__(self):
        assert (self.messages is None) != (self.text is None), self.where


def no_rows(path: Path, reason: str) -> RowFile:
    """Return a file of which nothing can be read."""
    return RowFile(0, lambda i: None, lambda i: str(path), (Damage(reason),))


def read_prompt_row(row: dict[str, Any], where: str, config: SourceConfig) -> Example:
    """Return one row with a prompt, which `check_row` has passed, as an `Example`.

    Raises:
      RowError: unknown shape, wrong type, empty prompt, NUL character or lone surrogate.
    """
    present = {key: None if _is_null(value) else value for key, value in row.items()}
    key, prompt = _prompt(present, where, config)
    messages, text = _chat_or_text(key, prompt, present, where, config)
    answer, worked = _answer(present, where, config)
    response, turns = _response(present, where, config)
    if turns and messages is None:
        raise RowError(f"{where}: the target is a list of messages but the prompt is plain text")
    if turns:
        messages = (*messages, *turns)
    if messages is not None:
        template_columns(row, where)
    if text is not None and key == "text" and not config.prompt_key:
        text, response = "", text
    source = first_column(present, ("data_source",))
    source = "" if source is None else source
    check_text(source, f"{where}: data_source")
    return Example(
        messages=messages,
        text=text,
        response=response or worked or None,
        answer=answer,
        source=source or config.name or _source_name(config.path),
        columns={name: value for name, value in row.items() if name != key},
        where=where,
        teacher=config.teacher,
    )


def check_row(row: Any, where: str) -> None:
    """Raise RowError unless the row is an object with named columns and of bounded depth."""
    if not isinstance(row, dict):
        raise RowError(f"{where}: a row must be an object with named columns, got {type_name(row)}")
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
        raise RowError(f"{where} must be text, got {type_name(value)}")
    if len(value) > MAX_CHARACTERS:
        raise RowError(f"{where} has {len(value):,} characters, more than {MAX_CHARACTERS:,}")
    if "\0" in value:
        raise RowError(f"{where} holds a NUL character")
    if SURROGATE.search(value):
        raise RowError(f"{where} holds a lone surrogate or bytes that are not UTF-8")


def check_json(value: Any, where: str) -> None:
    """Raise RowError unless the value is what JSON can hold, all its text readable by a tokenizer."""
    if isinstance(value, dict):
        for key, inner in value.items():
            check_text(key, f"{where}: a key")
            check_json(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            check_json(inner, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"{where} is {value}: it must be finite")
    elif not isinstance(value, bool | int | float | None):
        check_text(value, where)


def lookup(row: dict, key: str) -> Any:
    """Return column `key`, where dots reach into nested columns; None where there is none."""
    if key in row:
        return row[key]
    head, _, rest = key.partition(".")
    inner = row.get(head) if rest else None
    return lookup(inner, rest) if isinstance(inner, dict) else None


def template_columns(columns: dict[str, Any], where: str) -> tuple[list[dict] | None, dict[str, Any]]:
    """Return (tools, options), the columns of a row that its chat template gets.

    Raises:
      RowError: they are not what a chat template can read.
    """
    tools, options = columns.get("tools"), columns.get("chat_template_kwargs")
    tools, options = (None if _is_null(value) else _from_text(value, where) for value in (tools, options))
    options = {} if options is None else options
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools)):
        raise RowError(f"{where}: tools must be a list of JSON schemas, got {tools!r:.100}")
    if not isinstance(options, dict):
        raise RowError(f"{where}: chat_template_kwargs must be an object, got {type_name(options)}")
    if reserved := RESERVED_OPTIONS & options.keys():
        raise RowError(f"{where}: chat_template_kwargs may not set {', '.join(sorted(reserved))}")
    check_json(tools, f"{where}: tools")
    check_json(options, f"{where}: chat_template_kwargs")
    return tools or None, options


def _from_text(value: Any, where: str) -> Any:
    """Return what JSON text holds, as which tables keep objects of different keys; "" is a missing cell."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(value.strip() or "null")
    check_row({"text": value}, where)
    return value


def first_column(row: dict, keys: tuple[str, ...]) -> Any:
    """Return the first of these columns that is not null; None where all are."""
    return next((value for key in keys if not _is_null(value := lookup(row, key))), None)


def final_answer(text: str) -> str:
    """Return what follows the last '####' (GSM8K), without thousands separators."""
    return SEPARATOR.sub("", text.rsplit("####", 1)[1].strip())


def role_of(message: dict) -> str:
    """Return the role of a message in the shape of OpenAI or ShareGPT; "" where it has none that is known."""
    role, speaker = message.get("role"), message.get("from")
    if role:
        return role if isinstance(role, str) else ""
    return SHAREGPT_ROLES.get(speaker, "") if isinstance(speaker, str) else ""


def without_reference(messages: Sequence[Message]) -> list[Message]:
    """Return a chat up to the policy's turn: assistant turns at its end are a reference, not the prompt."""
    asked = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
    return list(messages[: asked[-1] + 1]) if asked else []


def column_names(row: dict) -> str:
    """Return the names of a row's columns, for messages; null ones are marked."""
    return ", ".join(
        sorted(f"{name} (null)" if _is_null(value) else str(name) for name, value in row.items())
    )


def type_name(value: Any) -> str:
    """Return the type of a value, for messages."""
    return type(value).__name__


def _is_null(value: Any) -> bool:
    """Return whether a value is missing: tables write a missing number as NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _prompt(row: dict, where: str, config: SourceConfig) -> tuple[str, Any]:
    keys = (config.prompt_key,) if config.prompt_key else PROMPT_KEYS
    for key in keys:
        value = lookup(row, key)
        if value is not None:
            return key, value
    expected = f"one of {', '.join(PROMPT_KEYS)}; --data.train.0.prompt_key names another in training"
    if config.prompt_key:
        expected = f"prompt_key {config.prompt_key!r}"
    raise RowError(f"{where}: no prompt: the columns are {column_names(row)}, expected {expected}")


def _chat_or_text(
    key: str, prompt: Any, row: dict, where: str, config: SourceConfig
) -> tuple[tuple[Message, ...] | None, str | None]:
    """Return (messages, None) or (None, text)."""
    if isinstance(prompt, list):
        messages = _messages(prompt, f"{where}: {key}")
        if key == "conversations" and row.get("system"):
            check_text(row["system"], f"{where}: system")
            messages = ({"role": "system", "content": row["system"]}, *messages)
        return messages, None
    check_text(prompt, f"{where}: {key}")
    if not prompt.strip():
        raise RowError(f"{where}: {key} is empty")
    if key == "instruction" and row.get("input"):
        check_text(row["input"], f"{where}: input")
        prompt = f"{prompt}\n\n{row['input']}"
    if config.input_template:
        return None, config.input_template.replace("{}", prompt)
    if key in ("question", "problem", "instruction"):
        return ({"role": "user", "content": prompt},), None
    return None, prompt


def _answer(row: dict, where: str, config: SourceConfig) -> tuple[Any, str | None]:
    """Return (ground truth, worked solution where the same column holds one)."""
    answer = first_column(row, (config.answer_key,) if config.answer_key else ANSWER_KEYS)
    if answer is None and config.answer_key:
        raise RowError(f"{where}: no answer_key {config.answer_key!r}: the columns are {column_names(row)}")
    worked = row.get("solution") if isinstance(row.get("solution"), str) else None
    if worked is not None:
        check_text(worked, f"{where}: solution")
    if isinstance(answer, str | list | dict):
        check_json(answer, f"{where}: answer")
    if isinstance(answer, str) and "####" in answer:
        return final_answer(answer), answer
    return answer, worked


def _response(row: dict, where: str, config: SourceConfig) -> tuple[str | None, tuple[Message, ...]]:
    """Return (supervised target, ()) or, where the target is several messages, (None, messages)."""
    keys = (config.response_key,) if config.response_key else RESPONSE_KEYS
    for key in keys:
        value = lookup(row, key)
        if isinstance(value, list):
            turns = _turns(value, f"{where}: {key}")
            single = len(turns) == 1 and turns[0]["role"] == "assistant"
            return (turns[0]["content"], ()) if single else (None, turns)
        if value is not None:
            check_text(value, f"{where}: {key}")
            return value, ()
    if config.response_key:
        raise RowError(
            f"{where}: no response_key {config.response_key!r}: the columns are {column_names(row)}"
        )
    return None, ()


def _turns(value: list, where: str) -> tuple[Message, ...]:
    return tuple(_message(item, f"{where}[{i}]") for i, item in enumerate(value))


def _messages(value: list, where: str) -> tuple[Message, ...]:
    """Return a chat in which there is something for the policy to answer."""
    messages = _turns(value, where)
    if not any(m["content"].strip() for m in messages if m["role"] != "assistant"):
        raise RowError(f"{where} is empty: no message of a user, the system or a tool has any text")
    return messages


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise RowError(f"{where} must be an object with role and content, got {type_name(item)}")
    item = {key: value for key, value in item.items() if value is not None}
    role = role_of(item)
    if not role:
        given = {key: item[key] for key in ("role", "from") if key in item}
        raise RowError(f"{where} has no known role: its keys are {column_names(item)}, {given!r:.100}")
    check_text(role, f"{where}.role")
    content = item.get("content", item.get("value", "" if item.get("tool_calls") else None))
    if isinstance(content, list):
        content = _join_parts(content, where)
    check_text(content, f"{where}.content")
    others = {key: value for key, value in item.items() if key not in ("role", "from", "content", "value")}
    check_json(others, where)
    return {"role": role, "content": content, **others}


def _join_parts(parts: list, where: str) -> str:
    """Return the text of a message whose content is a list of parts."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RowError(f"{where}.content has parts that are not text")
    return "".join(texts)


def _source_name(path: str) -> str:
    if path.startswith(GENERATED):
        return path
    return path.removeprefix("hub:") if path.startswith("hub:") else ""
