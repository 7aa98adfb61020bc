"""OpenAI's completions, without a chat template: POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxrl_llm.data.rows import check_text
from jaxrl_llm.envs.gateway.call import (
    Answer,
    Call,
    CallError,
    event,
    model_of,
    read_choices,
    read_limit,
    read_stop,
    read_stream,
    usage_of,
)


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
        return Call(
            [],
            prompt=prompt,
            max_tokens=read_limit(body, "max_tokens"),
            stop=read_stop(body.get("stop")),
            stream=read_stream(body),
            choices=read_choices(body),
            body=body,
        )

    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return the reply."""
        choices = [self._choice(call, answer)]
        return {**self._head(call, answer), "choices": choices, "usage": usage_of(answer)}

    def events(self, call: Call, answer: Answer) -> Iterator[str]:
        """Yield the reply as one chunk."""
        yield event(self.write(call, answer))
        yield event("[DONE]")

    def _head(self, call: Call, answer: Answer) -> dict[str, Any]:
        head = {"id": f"cmpl-{answer.id}", "object": "text_completion", "created": answer.created}
        return {**head, "model": model_of(call)}

    def _choice(self, call: Call, answer: Answer) -> dict[str, Any]:
        logprobs = None
        if call.body.get("logprobs") is not None:
            logprobs = {"tokens": answer.tokens, "token_logprobs": answer.logprobs, "top_logprobs": None}
        choice = {"index": 0, "text": answer.content, "finish_reason": answer.finish}
        return {**choice, "logprobs": logprobs, "token_ids": answer.ids}
