"""Messages in the forms that chat templates accept: arguments and ids of tool calls, null, lists of parts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl_llm.data.rows import Message, check_row

SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def argument_forms(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the chat with the arguments of its tool calls as objects, then with them as JSON text.

    OpenAI writes JSON text, transformers documents objects, and templates accept one or both. One form is
    returned where no message has arguments.
    """
    objects, texts = ([_with_calls(m, form) for m in messages] for form in (_as_object, _as_text))
    return [objects] if objects == texts else [objects, texts]


def accepted_forms(forms: Sequence[list[Message]]) -> Iterator[list[Message]]:
    """Yield chats in the order in which a template is asked to render them: `forms`, then with short ids."""
    yield from forms
    if any(_calls(message) or message["role"] == "tool" for message in forms[0]):
        yield from map(with_short_ids, forms)


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the chat with ids of nine letters and digits, as Mistral's templates require them.

    Of a longer id these are its last nine characters, as in vLLM. An answer without an id gets that of the
    call that it follows.
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
    """Return an id of nine letters and digits; a number is that of a call without an id."""
    if isinstance(id, int):
        return f"call{id:05d}"
    short = str(id)[-9:]
    return short if SHORT_ID.fullmatch(short) else hashlib.sha256(str(id).encode()).hexdigest()[:9]


def _calls(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a message; [] where they are no list of objects."""
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


def _as_object(arguments: Any) -> Any:
    """Return the object that JSON text holds; anything else as it is."""
    try:
        value = json.loads(arguments)
        check_row(value, "arguments")
    except (TypeError, ValueError, RecursionError):  # an object already, or none that can be
        return arguments
    return value


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
