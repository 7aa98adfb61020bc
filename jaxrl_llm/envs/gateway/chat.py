"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxrl_llm.data.messages import read_messages
from jaxrl_llm.envs.gateway.call import (
    Answer,
    Call,
    CallError,
    as_logprobs,
    event,
    function_tool,
    model_of,
    offers_tools,
    read_choices,
    read_limit,
    read_stop,
    read_stream,
    usage_of,
)


class ChatApi:
    """Chat completions."""

    reads = ("messages", "tools", "max_completion_tokens", "max_tokens", "stop", "stream", "n", "best_of")

    def read(self, body: dict[str, Any]) -> Call:
        """Return the call of a request. Raises CallError (400) or RowError."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise CallError(400, "messages must be a list with at least one message")
        # The role "developer" is OpenAI's newer name of "system".
        named = [
            {**m, "role": "system"} if isinstance(m, dict) and m.get("role") == "developer" else m
            for m in messages
        ]
        return Call(
            list(read_messages(named, "messages")),
            tools=read_tools(body.get("tools")) if offers_tools(body) else [],
            max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
            stop=read_stop(body.get("stop")),
            stream=read_stream(body),
            choices=read_choices(body),
            body=body,
        )

    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return the reply."""
        choice = {"index": 0, "message": _message(answer), "finish_reason": answer.finish}
        choice["logprobs"] = {"content": as_logprobs(answer)} if call.body.get("logprobs") else None
        return {**_head(call, answer, "chat.completion"), "choices": [choice], "usage": usage_of(answer)}

    def events(self, call: Call, answer: Answer) -> Iterator[str]:
        """Yield the reply as chunks: the whole turn in one, then its end."""
        head = _head(call, answer, "chat.completion.chunk")
        delta = _message(answer)
        for index, tool_call in enumerate(delta.get("tool_calls", ())):
            tool_call["index"] = index
        first = {"index": 0, "delta": delta, "finish_reason": None}
        if call.body.get("logprobs"):
            first["logprobs"] = {"content": as_logprobs(answer)}
        yield event({**head, "choices": [first]})
        yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
        options = call.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield event({**head, "choices": [], "usage": usage_of(answer)})
        yield event("[DONE]")


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Return OpenAI's list of functions."""
    if tools is None:
        return []
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools or ()]
    if not isinstance(tools, list) or not all(isinstance(function, dict) for function in functions):
        raise CallError(400, 'tools must be a list of {"type": "function", "function": {...}}')
    return [function_tool(f.get("name"), f.get("description"), f.get("parameters")) for f in functions]


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.thought:
        message["reasoning_content"] = answer.thought
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in answer.calls
        ]
    return message


def _head(call: Call, answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": model_of(call)}
