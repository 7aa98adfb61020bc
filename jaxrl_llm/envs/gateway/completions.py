"""OpenAI's completions: of a chat, POST /v1/chat/completions; without a template, POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxrl_llm.data.messages import read_messages
from jaxrl_llm.data.rows import check_text
from jaxrl_llm.envs.gateway.call import (
    Answer,
    Call,
    CallError,
    event,
    function_tool,
    offers_tools,
    read_limit,
    read_stop,
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
        )

    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return the reply."""
        choice = {"index": 0, "message": _message(answer), "finish_reason": answer.finish}
        choice["logprobs"] = {"content": answer.logprob_rows} if call.body.get("logprobs") else None
        head = _head(call, answer, "chatcmpl", "chat.completion")
        return {**head, "choices": [choice], "usage": answer.usage}

    def events(self, call: Call, answer: Answer) -> Iterator[str]:
        """Yield the reply as chunks: the whole turn in one, then its end."""
        head = _head(call, answer, "chatcmpl", "chat.completion.chunk")
        delta = _message(answer)
        for index, tool_call in enumerate(delta.get("tool_calls", ())):
            tool_call["index"] = index
        first = {"index": 0, "delta": delta, "finish_reason": None}
        if call.body.get("logprobs"):
            first["logprobs"] = {"content": answer.logprob_rows}
        yield event({**head, "choices": [first]})
        yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
        options = call.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield event({**head, "choices": [], "usage": answer.usage})
        yield event("[DONE]")


class CompletionsApi:
    """Completions of a text, or of token ids."""

    reads = ("prompt", "max_tokens", "stop", "stream", "n", "best_of")

    def read(self, body: dict[str, Any]) -> Call:
        """Return the call of a request. Raises CallError (400) or RowError."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list):
            if not prompt or not all(type(i) is int and i >= 0 for i in prompt):
                raise CallError(400, "prompt must be one text, or one list of token ids")
        else:
            check_text(prompt, "prompt")
        limit, stop = read_limit(body, "max_tokens"), read_stop(body.get("stop"))
        return Call([], prompt=prompt, max_tokens=limit, stop=stop)

    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return the reply."""
        logprobs = None
        if call.body.get("logprobs") is not None:
            logprobs = {"tokens": answer.tokens, "token_logprobs": answer.logprobs, "top_logprobs": None}
        choice = {"index": 0, "text": answer.content, "finish_reason": answer.finish}
        choice |= {"logprobs": logprobs, "token_ids": answer.ids}
        head = _head(call, answer, "cmpl", "text_completion")
        return {**head, "choices": [choice], "usage": answer.usage}

    def events(self, call: Call, answer: Answer) -> Iterator[str]:
        """Yield the reply as one chunk."""
        yield event(self.write(call, answer))
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


def _head(call: Call, answer: Answer, prefix: str, kind: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{answer.id}", "object": kind, "created": answer.created, "model": call.model}
