"""Texts, thoughts and tool calls of messages, looked up in the rendered chat.

A template may strip, escape, move or leave out parts of a message. So a chat is rendered a second time with a
mark (a private-use character) in each part. If this text without its marks equals the first text, it contains
exactly the parts whose marks it contains, at the positions of the marks.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.rows import CALL_KEYS, THOUGHT_KEY, Message, RowError
from jaxrl_llm.thoughts import MARKS as THOUGHT_MARKS

THOUGHT_END = re.compile("|".join(map(re.escape, THOUGHT_MARKS.values())))
THOUGHT_START = re.compile(rf"\s*(?:{'|'.join(map(re.escape, THOUGHT_MARKS))})")
TAG = re.compile(r"</?[^<>\s]{1,40}>|\[/?[A-Z_]{2,40}\]|/\w+")  # what templates look for in a text
LETTER = re.compile(rf"(?=((?:{TAG.pattern}|\W)*))\1\w")  # up to the first letter outside tags
MARKS = range(0xF0000, 0x10FFFE)  # private-use characters that do not hide control tokens
CALL_FIELDS = ("function", "name", "arguments", "parameters")


class ChatPart(NamedTuple):
    """A text, thought or tool call of a message."""

    message: int  # index of the message
    kind: str  # "text", "thought", "name", "tool call" or "tool"
    text: str  # of a tool and its calls the name
    mark: str  # the character that stands for it
    id: str = ""  # other text that stands for it: some templates write a call's id in place of the name


class Rendered(NamedTuple):
    """A rendered chat."""

    text: str
    blocks: list[tuple[int, int]]  # character spans inside {% generation %}
    lost: list[ChatPart]  # the parts of messages that are not in the text
    places: list[tuple[int, int]] | None  # (place, index of the message) of each mark; None = unknown


def mark_parts(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, taken: str
) -> tuple[list[Message], list[dict[str, Any]] | None, list[ChatPart]]:
    """Return (messages with a mark in each part, tools with a mark in each name, the parts).

    Args:
        taken: text whose characters may not be marks.
    """
    marks = _Marks(taken)
    marked = [
        {key: marks.of_value(i, message, key, value=value) for key, value in message.items()}
        for i, message in enumerate(messages)
    ]
    names = tools and [
        _with_marked_name(tool, lambda name: marks.part(0, "tool", text=name, id=name).mark) for tool in tools
    ]
    return marked, names, marks.parts


class _Marks:
    """The parts of a chat, with a mark for each; see `mark_parts`."""

    def __init__(self, taken: str):
        used = set(taken)
        self.parts: list[ChatPart] = []
        self._free = (char for char in map(chr, MARKS) if char not in used)
        self._thoughts: dict[tuple[int, str], ChatPart] = {}  # several keys may hold the same thought

    def part(self, message: int, kind: str, *, text: str, id: str = "") -> ChatPart:
        if kind == "thought" and (message, text) in self._thoughts:
            return self._thoughts[message, text]
        if not (mark := next(self._free, "")):
            raise RowError(f"a chat of more than {len(MARKS):,} texts, calls and tools")
        self.parts.append(ChatPart(message, kind, text, mark, id=id))
        if kind == "thought":
            self._thoughts[message, text] = self.parts[-1]
        return self.parts[-1]

    def of_value(self, i: int, message: Message, key: str, *, value: Any) -> Any:
        """Return the value of a key of message i with a mark in each of its parts."""
        kind = "thought" if THOUGHT_KEY.fullmatch(key) else "name" if key == "name" else ""
        if kind == "name" and message["role"] in ("tool", value):
            return value  # the call that is answered says which tool it is
        if kind == "thought" and isinstance(value, list):  # OpenRouter's reasoning_details; no template's
            texts = (item.get("text") for item in value if isinstance(item, dict))
            self.of_value(i, message, key, value="\n".join(t for t in texts if isinstance(t, str)))
        elif kind and isinstance(value, str) and not is_said(_plain(value), message["content"]):
            return _marked(value, self.part(i, kind, text=_plain(value)).mark)
        elif key in ("tools", "functions") and value:  # of a system message, as in OLMo 3
            return _marked_calls(value, lambda name, _: self.part(i, "tool", text=name, id=name).mark)
        elif key in CALL_KEYS and value:
            return _marked_calls(value, lambda name, id: self.part(i, "tool call", text=name, id=id).mark)
        elif key in ("content", "refusal") and isinstance(value, str):
            return self._said(i, message["role"], value)
        elif key == "content" and isinstance(value, list):
            return [item | {"text": self._said(i, message["role"], item["text"])} for item in value]
        return value

    def _said(self, i: int, role: str, text: str) -> str:
        """Return the text of message i with a mark in each of its thoughts, and in each text around them."""
        pieces = thoughts_and_texts(text) if role == "assistant" else [("text", text)]
        return "".join(
            _marked(piece, self.part(i, kind, text=_plain(piece)).mark) if _plain(piece) else piece
            for kind, piece in pieces
        )


def find_parts(
    text: str, marked: str, parts: Sequence[ChatPart]
) -> tuple[list[ChatPart], list[tuple[int, int]] | None]:
    """Return (parts missing from a rendered text, `Rendered.places`).

    Args:
        marked: the text with marks; "" = the template refused them.
    """
    by_mark = {part.mark: part for part in parts}
    # As ranges: re looks through a list of such characters one by one.
    runs = itertools.groupby(enumerate(by_mark), lambda pair: ord(pair[1]) - pair[0])
    ranges = "".join(f"{run[0][1]}-{run[-1][1]}" for run in (list(run) for _, run in runs))
    pieces = re.split(f"([{ranges}])", marked) if parts else [marked]
    ends = itertools.accumulate(map(len, pieces[::2]))
    exact = "".join(pieces[::2]) == text
    found = set(pieces[1::2])
    places = [(end, by_mark[mark].message) for end, mark in zip(ends, pieces[1::2], strict=False)]
    flat = "" if exact else _squeezed(text)
    lost = [
        part
        for part in parts
        if part.mark not in found
        and not _stands_in(part, text)
        and (exact or not any(_squeezed(t) in flat for t in (part.text, json.dumps(part.text)[1:-1])))
    ]
    return lost, places if exact else None


def messages_of_blocks(chat: Rendered, roles: Sequence[str]) -> list[int]:
    """Return the index of the message that each block of {% generation %} belongs to.

    A block belongs to the assistant's message whose mark it contains. A block without a mark, such as an end
    token, belongs to the preceding message, or if that is not the assistant's, to the assistant's next
    message.
    """
    turns = [i for i, role in enumerate(roles) if role == "assistant"]
    owners = []
    for start, end in chat.blocks:
        inside = [m for place, m in chat.places if start < place <= end and m in turns]
        before = next((m for place, m in reversed(chat.places) if place <= start), -1)
        owners.append((inside or [turn for turn in turns if turn >= before] or turns[-1:])[0])
    return owners


def tool_name(tool: dict[str, Any]) -> str:
    """Return the name in a tool's schema; "" = it has none."""
    inner = tool["function"] if isinstance(tool.get("function"), dict) else tool
    return inner["name"] if isinstance(inner.get("name"), str) else ""


def strings_of(value: Any) -> Iterator[str]:
    """Yield the text of keys and values at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from strings_of(list(value.values()))
    elif isinstance(value, list):
        for inner in value:
            yield from strings_of(inner)


def map_strings(value: Any, change: Callable[[str], str], keys: bool = True) -> Any:
    """Return the value with the text at any depth changed.

    Args:
        keys: change the names of keys too.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(k) if keys else k: map_strings(v, change, keys) for k, v in value.items()}
    return [map_strings(inner, change, keys) for inner in value] if isinstance(value, list) else value


def _marked_calls(calls: Any, mark_of: Callable[[str, str], str]) -> Any:
    if isinstance(calls, list):
        return [_marked_calls(call, mark_of) for call in calls]
    inner = calls.get("function", calls) if isinstance(calls, dict) else calls
    name, id = (inner.get("name"), calls.get("id")) if isinstance(inner, dict) else (calls, "")
    mark = mark_of(str(name), str(id or ""))
    change = lambda text: _marked(text, mark) if text.strip() else text
    if not isinstance(calls, dict):
        return map_strings(calls, change)
    return {k: map_strings(v, change, keys=False) if k in CALL_FIELDS else v for k, v in calls.items()}


def _with_marked_name(tool: dict[str, Any], mark_of: Callable[[str], str]) -> dict[str, Any]:
    if not (name := tool_name(tool)):
        return tool
    if isinstance(tool.get("function"), dict):
        return tool | {"function": _with_marked_name(tool["function"], mark_of)}
    return tool | {"name": _marked(name, mark_of(name))}


def _stands_in(part: ChatPart, text: str) -> bool:
    """Return whether the replacement text of a part is in the text; a tool's name must be a whole word."""
    if part.kind == "tool":
        return re.search(rf"(?<!\w){re.escape(part.id)}(?!\w)", text) is not None
    return bool(part.id) and part.id in text


def _marked(text: str, mark: str) -> str:
    letter = LETTER.match(text)
    place = letter.end() if letter else len(text.rstrip())
    return text[:place] + mark + text[place:]


def thoughts_and_texts(text: str) -> list[tuple[str, str]]:
    """Split an assistant's text into ("thought", with its tags) and ("text", between thoughts).

    The first thought may have started in the prompt, and the last one may lack its end.
    """
    pieces, position = [], 0
    for end in [*(match.end() for match in THOUGHT_END.finditer(text)), len(text)]:
        start = THOUGHT_START.search(text, position, end)
        begin = start.start() if start else position if not position and end < len(text) else end
        pieces += [("text", text[position:begin]), ("thought", text[begin:end])]
        position = end
    return [(kind, piece) for kind, piece in pieces if piece]


def is_said(words: str, content: Any) -> bool:
    """Return whether the text of a message contains other words, as thoughts in SWE-agent's trajectories."""
    pattern = rf"(?<!\w){re.escape(words)}(?!\w)"
    return not words or any(re.search(pattern, text) for text in strings_of(content))


def _plain(text: str) -> str:
    return TAG.sub("", text).strip()


def _squeezed(text: str) -> str:
    return "".join(text.split())
