"""Messages of rows in the formats of OpenAI and ShareGPT, and whether they are learned."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl_llm.data.rows import (
    CALL_KEYS,
    CALL_ROLES,
    MEDIA_KEYS,
    THOUGHT_KEY,
    Message,
    RowError,
    check_json,
    check_row,
    check_text,
    column_names,
    distinct,
    read_json_text,
    role_of,
)

LOSS_KEYS = ("weight", "train", "trainable", "loss", "loss_mask", "step_loss_mask")
"""Keys of a message by which OpenAI, axolotl, LLaMA-Factory, slime and veRL leave it out of the loss."""
LOSS_LIKE = re.compile(r"loss(?:es)?|(?:un|no)?(?:train|mask|learn)\w*|weights?|supervis\w*|ignored?|skip\w*")
SWITCH_LIKE = re.compile(r"(?:ex|in)clud\w*|omit\w*|target|grad|backprop\w*|finetun\w*")  # of messages
OFF = ("false", "no", "0")
SWITCHES = (*OFF, "true", "yes", "1", "")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")  # of a key such as loss_mask or lossMask


def read_turns(value: list, where: str) -> tuple[Message, ...]:
    """Return messages of any roles."""
    return tuple(_message(item, f"{where}[{i}]") for i, item in enumerate(value))


def checked_turns(value: list, where: str) -> tuple[Message, ...]:
    """Return messages of any roles, with valid tool calls (`with_checked_calls`)."""
    return with_checked_calls(read_turns(value, where), where)


def read_messages(value: list, where: str) -> tuple[Message, ...]:
    """Return a chat; raises RowError if it has no text for the policy to answer."""
    messages = read_turns(value, where)
    if not any(m["content"].strip() for m in messages if m["role"] != "assistant"):
        raise RowError(f"{where} is empty: no message of a user, the system or a tool has any text")
    return messages


def with_checked_calls(messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """Return the messages of a row, whose tool calls must have an object as arguments, or JSON text of one.

    Other text would be learned as a quoted string. Messages of a rollout are not checked, as a policy may
    write broken calls.

    Raises:
        RowError: names the message, the function and the problem.
    """
    for i, message in enumerate(messages):
        calls = [message.get(key) for key in CALL_KEYS]
        for call in (call for group in calls for call in (group if isinstance(group, list) else [group])):
            inner = call.get("function", call) if isinstance(call, dict) else None
            given = [inner.get(key) for key in ("arguments", "parameters")] if isinstance(inner, dict) else []
            problems = (_arguments_problem(value) for value in given if value is not None)
            if problem := next(filter(None, problems), ""):
                raise RowError(
                    f"{where}[{i}]: the arguments of {inner.get('name', 'a call')!s:.80} are {problem}. "
                    "Write an object or JSON text of one; put text to learn as it stands into content"
                )
    return messages


def _arguments_problem(arguments: Any) -> str:
    """Return why the arguments of a call are not an object or JSON text of one, or ""."""
    if not isinstance(arguments, str):
        return "" if isinstance(arguments, dict) else f"of type {type(arguments).__name__}"
    shown = f"{arguments!r:.80}, which is not JSON text of an object"
    try:
        value = json.loads(arguments.strip() or "{}", object_pairs_hook=distinct)
        if isinstance(value, dict):
            check_row(value, "arguments")
            check_json(value, "arguments")
            return ""
    except RecursionError:
        return f"{shown}: nested too deeply"
    except ValueError as error:  # RowError too
        return f"{shown}: {error!s:.100}"
    return shown


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise RowError(f"{where} must be an object with role and content, got {type(item).__name__}")
    # Role and calls, in the formats of OpenAI, ShareGPT and LLaMA-Factory.
    item = {key: value for key, value in item.items() if value is not None}
    role = role_of(item)
    if not role:
        given = {key: item[key] for key in ("role", "from") if key in item}
        raise RowError(f"{where} has no known role: its keys are {column_names(item)}, {given!r:.100}")
    check_text(role, f"{where}.role")
    if (item.get("role") or item.get("from")) in CALL_ROLES:
        key = "content" if "content" in item else "value"
        item["tool_calls"] = _spoken_calls(item.pop(key, None), f"{where}.{key}")
    if calls := _tool_calls(item.pop("tool_calls", None), f"{where}.tool_calls"):
        item["tool_calls"] = calls
    # Text, and the keys beside it.
    silent = any(item.get(key) for key in (*CALL_KEYS, "refusal"))
    content = item.get("content", item.get("value", "" if silent else None))
    for key in ("value", "text"):
        if item.get(key, content) != content:
            raise RowError(f"{where}: content and {key} are two texts: keep one of them")
    if isinstance(content, list):
        content = _join_parts(content, where)
    check_text(content, f"{where}.content")
    if media := [key for key in MEDIA_KEYS if item.get(key)]:
        raise RowError(f"{where}.{media[0]} would be left out, as the model reads text alone")
    others = {key: value for key, value in item.items() if key not in ("role", "from", "content", "value")}
    check_json(others, where)
    learned = _is_learned(others, role, where)
    others = {key: value for key, value in others.items() if key not in LOSS_KEYS}
    return {"role": role, "content": content, **others} | ({} if learned else {"weight": 0})


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the tool calls of a message, or None; tables may store them as JSON text."""
    calls = read_json_text(value, where)
    check_json(calls, where)
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise RowError(f"{where} must be a list of tool calls, got {value!r:.100}")
    return calls


def _spoken_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the tool calls that a role of CALL_ROLES writes as JSON text."""
    calls = read_json_text(value, where)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RowError(f"{where} must be JSON text of a call with name and arguments, got {value!r:.100}")
    return [{"type": "function", "function": call} for call in calls]


def _is_learned(keys: dict[str, Any], role: str, where: str) -> bool:
    """Return whether an assistant's message is learned, by its keys; True without such keys."""
    is_switch = lambda value: type(value) is not str or value.lower() in SWITCHES
    given = {
        key: value
        for key, value in keys.items()
        if key in LOSS_KEYS or (has_word(key, LOSS_LIKE, SWITCH_LIKE) and is_switch(value))
    }
    for key, value in given.items():
        if key not in LOSS_KEYS:
            raise RowError(
                f"{where}.{key} is unknown, but seems to select the learned part. A message with weight 0 is "
                "left out of the loss"
            )
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RowError(f"{where}.{key} must be 0 or 1, true or false, got {value!r:.100}")
        if value and role != "assistant":
            raise RowError(f"{where}.{key} is {value}, but text of the role {role} is never learned")
    if len({bool(value) for value in given.values()}) > 1:
        raise RowError(f"{where}: {', '.join(given)} contradict each other")
    return role != "assistant" or all(given.values())


def has_word(key: str, *patterns: re.Pattern) -> bool:
    """Return whether a pattern matches a whole word of a key."""
    return any(pattern.fullmatch(word.lower()) for word in WORD.findall(key) for pattern in patterns)


def message_text(message: Message, where: str) -> str:
    """Return the text of a message. Raises RowError if the message has more than text."""
    if more := [key for key in message if (key in CALL_KEYS or THOUGHT_KEY.fullmatch(key)) and message[key]]:
        raise RowError(
            f"{where}: {', '.join(more)} of a message would be lost: it is read as plain text here"
        )
    return message["content"]


def _join_parts(parts: list, where: str) -> str:
    """Return the text of a message whose content is a list of parts."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    kinds = {part["type"] for part in parts if isinstance(part, dict) and isinstance(part.get("type"), str)}
    if not all(isinstance(text, str) for text in texts) or any(not kind.endswith("text") for kind in kinds):
        raise RowError(f"{where}.content has parts that are not text")
    return "".join(texts)


SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def argument_forms(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the chat with the arguments of its tool calls as objects, then with them as JSON text.

    OpenAI writes JSON text, transformers documents objects, and templates accept one or both. Returns one
    form if no message has arguments.
    """
    objects, texts = ([_with_calls(m, form) for m in messages] for form in (parsed_arguments, _as_text))
    return [objects] if objects == texts else [objects, texts]


def accepted_forms(forms: Sequence[list[Message]]) -> Iterator[list[Message]]:
    """Yield chats in the order in which a template is asked to render them: `forms`, then with short ids."""
    yield from forms
    if any(_calls(message) or message["role"] == "tool" for message in forms[0]):
        yield from map(with_short_ids, forms)


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the chat with ids of nine letters and digits, which Mistral's templates require.

    A longer id is cut to its last nine characters, as in vLLM. An answer without an id gets the id of its
    call.
    """
    new, open_ids, count = [], [], 0
    for message in messages:
        if calls := _calls(message):
            open_ids = [_short_id(call.get("id") or count + k) for k, call in enumerate(calls)]
            count += len(calls)
            named = zip(calls, open_ids, strict=True)
            message = {**message, "tool_calls": [{**call, "id": own} for call, own in named]}
        elif message["role"] == "tool":
            first = open_ids.pop(0) if open_ids else count
            message = {**message, "tool_call_id": _short_id(message.get("tool_call_id") or first)}
        new.append(message)
    return new


def with_null(messages: list[Message]) -> list[Message]:
    """Return a chat with null for empty text beside tool calls: some templates show calls only then."""
    silent = lambda message: bool(message.get("tool_calls")) and message["content"] == ""
    return [message | {"content": None} if silent(message) else message for message in messages]


def in_parts(messages: list[Message]) -> list[Message]:
    """Return a chat with its texts as lists of parts, which templates of vision models need."""
    parts = lambda text: [{"type": "text", "text": text}] if text else []
    return [{**message, "content": parts(message["content"])} for message in messages]


def _short_id(id: Any) -> str:
    """Return an id of nine letters and digits; a number stands for a call without an id."""
    if isinstance(id, int):
        return f"call{id:05d}"
    short = str(id)[-9:]
    return short if SHORT_ID.fullmatch(short) else hashlib.sha256(str(id).encode()).hexdigest()[:9]


def _calls(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a message; [] unless they are a list of objects."""
    calls = message.get("tool_calls")
    is_list = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    return calls if is_list else []


def _with_calls(message: Message, form: Callable[[Any], Any]) -> Message:
    """Return a message with the arguments of its tool calls in another form."""
    calls = _calls(message)
    return {**message, "tool_calls": [_with_arguments(call, form) for call in calls]} if calls else message


def _with_arguments(call: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], form)}
    return {**call, "arguments": form(call["arguments"])} if "arguments" in call else call


def parsed_arguments(arguments: Any) -> Any:
    """Parse JSON text of the arguments of a call, an object; no text is one without keys, other values are
    returned unchanged."""
    try:
        value = json.loads(arguments.strip() or "{}")
        check_row(value, "arguments")
    except (AttributeError, ValueError, RecursionError):  # an object already, or none that can be
        return arguments
    return value


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
