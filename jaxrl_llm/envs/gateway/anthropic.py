"""Anthropic's messages: POST /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.data.messages import read_messages
from jaxrl_llm.data.rows import Message
from jaxrl_llm.envs.gateway.call import (
    Answer,
    Call,
    CallError,
    event,
    function_tool,
    offers_tools,
    read_limit,
    read_stop,
    text_of_parts,
)

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesApi:
    """Messages, with tool use and thinking."""

    reads = ("messages", "system", "tools", "max_tokens", "stop_sequences", "stream")

    def read(self, body: dict[str, Any]) -> Call:
        """Return the call of a request. Raises CallError (400) or RowError."""
        given = body.get("messages")
        if not isinstance(given, list) or not given:
            raise CallError(400, "messages must be a list with at least one message")
        messages = [m for i, item in enumerate(given) for m in _messages(item, f"messages[{i}]")]
        if system := body.get("system"):
            messages.insert(0, {"role": "system", "content": text_of_parts(system, "system")})
        tools = (body.get("tools") or []) if offers_tools(body) else []
        if not isinstance(tools, list) or not all(isinstance(t, dict) and "input_schema" in t for t in tools):
            raise CallError(400, "tools must be a list of tools with name and input_schema")
        return Call(
            list(read_messages(messages, "messages")),
            tools=[function_tool(t.get("name"), t.get("description"), t["input_schema"]) for t in tools],
            max_tokens=read_limit(body, "max_tokens"),
            stop=read_stop(body.get("stop_sequences")),
        )

    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return the reply."""
        stopped = bool(answer.stopped_by) and answer.finish == "stop"
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": _blocks(answer),
            "stop_reason": "stop_sequence" if stopped else REASONS[answer.finish],
            "stop_sequence": answer.stopped_by if stopped else None,
            "usage": {"input_tokens": answer.num_context, "output_tokens": len(answer.ids)},
        }

    def events(self, call: Call, answer: Answer) -> Iterator[str]:
        """Yield the events of a stream: each block begins, gets its text in one delta, and ends."""
        send = lambda kind, **more: event({"type": kind, **more}, kind)
        message = self.write(call, answer)
        blocks, usage = message["content"], message["usage"]
        begun = message | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield send("message_start", message=begun | {"usage": usage | {"output_tokens": 0}})
        for index, block in enumerate(blocks):
            match block["type"]:
                case "text":
                    begin, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
                case "thinking":
                    begin, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
                case _:
                    begin = {"input": {}}
                    delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield send("content_block_start", index=index, content_block=block | begin)
            yield send("content_block_delta", index=index, delta=delta)
            yield send("content_block_stop", index=index)
        ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield send("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]})
        yield send("message_stop")


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.thought:
        blocks.append({"type": "thinking", "thinking": answer.thought, "signature": ""})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in answer.calls
    ]


def _messages(item: Any, where: str) -> Iterator[Message]:
    """Yield the chat messages of a message: results of tools become messages of the role tool."""
    if not isinstance(item, dict) or item.get("role") not in ("user", "assistant", "system"):
        raise CallError(400, f"{where} must be an object with the role user or assistant, and content")
    content = item.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise CallError(400, f"{where}.content must be a text or a list of blocks")
    # Results of tools come first; the rest joins into one message.
    texts, calls, thoughts = [], [], []
    for block in blocks:
        match block.get("type"):
            case "text" if isinstance(block.get("text"), str):
                texts.append(block["text"])
            case "tool_result":
                text = text_of_parts(block.get("content") or "", where)
                if block.get("is_error") and not text.lower().startswith("error"):
                    text = f"error: {text}"  # as of our own tools; no chat template has a field for it
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case kind:
                raise CallError(400, f"{where} has a block of the type {kind!r:.40}, which is not read here")
    if texts or calls or thoughts or not blocks:
        message: Message = {"role": item["role"], "content": "".join(texts)}
        message |= {"tool_calls": calls} if calls else {}
        yield message | ({"reasoning_content": "".join(thoughts)} if thoughts else {})
