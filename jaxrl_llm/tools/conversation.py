"""Conversations of samples.jsonl, turn by turn, for the page of `view` and for ATIF."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.data.messages import parsed_arguments

Message = dict[str, Any]
Span = tuple[int, int]  # tokens start to end - 1, numbered from the prompt's first one


@dataclass
class SampleTurn:
    """One turn of the policy."""

    number: int  # 0, 1, ... in the order in which turns were sampled
    after: int  # number of the turn that its conversation continues; -1 = it begins one
    under: int | None = None  # turn that it branches off from, or in whose answer it begins; None = neither
    inputs: list[Message] = field(default_factory=list)  # that the policy read after the turn `after`
    text: Message | None = None  # the turn; None = not known as a message
    calls: list[dict[str, Any]] = field(default_factory=list)  # as `report.samples`, with "answer", a Message
    tools: list[Any] = field(default_factory=list)  # schemas, of a conversation that a program begins
    tokens: Span | None = None
    read: list[Span] = field(default_factory=list)
    rewritten: bool = False  # the policy read `after` in other tokens than it wrote
    reward: float | None = None
    trained: int | None = None  # tokens in the loss


def sample_turns(row: dict[str, Any]) -> list[SampleTurn]:
    """Return the turns of a row; a row without a usable "tree" has the assistant's messages, in a line."""
    prompt = row.get("messages") or [{"role": "prompt", "content": row.get("prompt", "")}]
    messages = row.get("turns") or [{"role": "assistant", "content": row.get("response", "")}]
    prompt, messages = as_messages(prompt), as_messages(messages)
    try:
        turns = _turns_of_tree(row["tree"], prompt, messages)
    except (LookupError, TypeError, ValueError, AttributeError):
        turns = list(_turns_of_messages(prompt, messages))
    _place_branches(turns)
    _pair_answers(turns)
    return turns


def as_messages(chat: Any) -> list[Message]:
    """Return messages as dicts; other values become their content."""
    chat = chat if isinstance(chat, list) else [chat]
    return [message if isinstance(message, dict) else {"content": message} for message in chat]


def as_text(value: Any) -> str:
    """Return a text as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _turns_of_tree(
    tree: Sequence[dict[str, Any]], prompt: list[Message], messages: list[Message]
) -> list[SampleTurn]:
    turns, before = [], 0
    for number, row in enumerate(tree):
        after, place, opening = row["after"], row.get("message"), row.get("opening") or {}
        if type(after) is not int or not -1 <= after < number:
            raise ValueError(f"turn {number} follows turn {after}")
        if place is None and len(tree) == len(messages) == 1:
            place = 0
        turn = SampleTurn(number, after, reward=row.get("reward"), trained=row.get("trained"))
        turn.inputs = prompt if number == 0 else messages[before:place] if place is not None else []
        if opening:
            turn.inputs, turn.tools = as_messages(opening["messages"]), list(opening.get("tools", ()))
        if place is not None:
            turn.text, before = messages[place], place + 1
        turn.calls = [dict(call) for call in row.get("calls", ())]
        turn.tokens, turn.read = _span(row["tokens"]), [_span(span) for span in row["read"]]
        turn.rewritten = row.get("rewritten") is True
        turns.append(turn)
    if not turns:
        raise ValueError("no turn")
    return turns


def _span(value: Any) -> Span:
    start, end = value
    if type(start) is not int or type(end) is not int or not 0 <= start <= end:
        raise ValueError(f"{value!r} is not a span")
    return start, end


def _turns_of_messages(prompt: list[Message], messages: list[Message]) -> Iterator[SampleTurn]:
    number, inputs = 0, list(prompt)
    for message in messages:
        if message.get("role", "assistant") != "assistant":
            inputs.append(message)
            continue
        calls = [_openai_call(call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
        yield SampleTurn(number, number - 1, inputs=inputs, text=message, calls=calls)
        number, inputs = number + 1, []


def _openai_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call.get("function"), dict) else call
    arguments = parsed_arguments(function.get("arguments"))
    return {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}


def _place_branches(turns: list[SampleTurn]) -> None:
    """Set `under`: the first continuation of a turn is its conversation, later ones are branches."""
    conversation, continued = list[int](), set[int]()
    for turn in turns:
        number, after = turn.number, turn.after
        conversation.append(conversation[after] if after >= 0 else number)
        if after >= 0:
            turn.under = after if after in continued else None
            continued.add(after)
        elif number:
            # The program started it when it had the answer of the first conversation's newest turn.
            turn.under = max(i for i in range(number) if conversation[i] == 0)


def _pair_answers(turns: list[SampleTurn]) -> None:
    """Give each tool call its answer, out of the inputs of the turn that follows."""
    for turn in turns:
        following = next((t for t in turns if t.after == turn.number), None)
        if not turn.calls or following is None:
            continue
        answers = [message for message in following.inputs if message.get("role") == "tool"]
        by_id = {call["id"]: call for call in turn.calls if call.get("id")}
        pairs = [(by_id.get(message.get("tool_call_id")), message) for message in answers]
        if not by_id and len(answers) == len(turn.calls):
            pairs = list(zip(turn.calls, answers, strict=True))
        for call, message in pairs:
            if call is not None:
                call["answer"] = message
        paired = [call.get("answer") for call in turn.calls]
        following.inputs = [m for m in following.inputs if not any(m is answer for answer in paired)]
