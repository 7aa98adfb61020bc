"""OpenAI's responses: POST /v1/responses. Nothing is stored: each call brings the whole conversation."""

from __future__ import annotations

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
    text_of_parts,
)


class ResponsesApi:
    """Responses, with function calls and reasoning."""

    reads = ("input", "instructions", "tools", "max_output_tokens", "stream")

    def read(self, body: dict[str, Any]) -> Call:
        """Return the call of a request. Raises CallError (400) or RowError."""
        items = body.get("input")
        items = [{"role": "user", "content": items}] if isinstance(items, str) else items
        if not isinstance(items, list) or not items:
            raise CallError(400, "input must be a text or a list with at least one item")
        messages = _messages(items)
        if instructions := body.get("instructions"):
            messages.insert(0, {"role": "system", "content": text_of_parts(instructions, "instructions")})
        tools = body.get("tools") or []
        known = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"]
        if not isinstance(tools, list) or len(known) < len(tools):
            raise CallError(400, 'tools must be functions, {"type": "function", "name": ...}; no others run')
        functions = [function_tool(t.get("name"), t.get("description"), t.get("parameters")) for t in known]
        return Call(
            list(read_messages(messages, "input")),
            tools=functions if offers_tools(body) else [],
            max_tokens=read_limit(body, "max_output_tokens"),
        )

    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return the reply."""
        status = "incomplete" if answer.finish == "length" else "completed"
        return _response(call, answer, _items(call, answer), status)

    def events(self, call: Call, answer: Answer) -> Iterator[str]:
        """Yield the events of a stream: each item begins, gets its text in one delta, and ends."""
        numbered = iter(range(1 << 30))
        send = lambda kind, **more: event({"type": kind, "sequence_number": next(numbered), **more}, kind)
        begun = _response(call, answer, [], "in_progress")
        yield send("response.created", response=begun)
        yield send("response.in_progress", response=begun)
        for index, item in enumerate(_items(call, answer)):
            place = {"item_id": item["id"], "output_index": index}
            yield send("response.output_item.added", output_index=index, item=item | _empty(item))
            if item["type"] == "message":
                part = item["content"][0]
                inner = {**place, "content_index": 0}
                shown = {**inner, "logprobs": part["logprobs"]}
                yield send("response.content_part.added", **inner, part=part | {"text": "", "logprobs": []})
                yield send("response.output_text.delta", **shown, delta=part["text"])
                yield send("response.output_text.done", **shown, text=part["text"])
                yield send("response.content_part.done", **inner, part=part)
            elif item["type"] == "function_call":
                name, text = item["name"], item["arguments"]
                yield send("response.function_call_arguments.delta", **place, delta=text)
                yield send("response.function_call_arguments.done", **place, name=name, arguments=text)
            yield send("response.output_item.done", output_index=index, item=item)
        done = self.write(call, answer)
        yield send(f"response.{done['status']}", response=done)


def _messages(items: list[Any]) -> list[Message]:
    """Return chat messages of input items; the policy's reasoning, text and calls join into one message."""
    messages: list[Message] = []

    def own() -> Message:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    # Each item by its type.
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise CallError(400, f"{where} must be an object")
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                message = own()
                message["content"] += text_of_parts(item.get("content"), where)
            case "message":
                role = "system" if item.get("role") == "developer" else item.get("role")
                messages.append({"role": role, "content": text_of_parts(item.get("content"), where)})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                own().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = text_of_parts(item.get("output"), where)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "reasoning":
                thought = text_of_parts(item.get("content") or item.get("summary") or "", where)
                if thought:
                    own()["reasoning_content"] = thought
            case kind:
                raise CallError(400, f"{where} has the type {kind!r:.40}, which is not known here")
    return messages


def _items(call: Call, answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.thought:
        content = [{"type": "reasoning_text", "text": answer.thought}]
        items.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": content})
    if answer.content or not answer.calls:
        include = call.body.get("include")
        asked = isinstance(include, list) and "message.output_text.logprobs" in include
        logprobs = answer.logprob_rows if asked else []
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": logprobs}
        message = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**message, "content": [text]})
    items += [
        {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in answer.calls
    ]
    return items


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that an item of a stream begins without."""
    empty = {"message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"content": []}}
    return empty[item["type"]] | ({} if item["type"] == "reasoning" else {"status": "in_progress"})


def _response(call: Call, answer: Answer, items: list[dict[str, Any]], status: str) -> dict[str, Any]:
    read, written = answer.num_context, len(answer.ids)
    usage = {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }
    return {
        **{name: call.body.get(name) for name in ("instructions", "metadata")},
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": call.model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto" if offers_tools(call.body) else "none",
        "tools": call.body.get("tools") or [],
        "usage": None if status == "in_progress" else usage,
    }
