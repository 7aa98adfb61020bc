"""One call of a program, which every protocol is read into, and the answer that its reply is written from."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl_llm.data.parts import strings_of
from jaxrl_llm.data.rows import Message
from jaxrl_llm.envs.calls import schema_problem

MODEL = "policy"
MAX_CHOICES = 128


class CallError(Exception):
    """A call that is refused: an HTTP status and a message for the program.

    Clients repeat 408, 409, 429 and 5xx by themselves, so refusals that would come again have another status.
    """

    def __init__(self, status: int, message: str, code: str = "", *, param: str = ""):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True)
class ToolUse:
    """A tool call of the policy."""

    id: str
    name: str
    arguments: str  # a JSON object as text


@dataclass(frozen=True)
class Answer:
    """A turn of the policy, as programs read it."""

    id: str
    content: str  # without thought, tool calls, end token and the string that stopped it
    thought: str
    calls: tuple[ToolUse, ...]
    finish: str  # "stop", "length" or "tool_calls"
    stopped_by: str  # the string that stopped it, or ""
    ids: list[int]
    logprobs: list[float]  # nats
    tokens: list[str]  # text of each of `ids`
    num_context: int  # tokens that the policy read before
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, int]:
        """The counts of tokens as OpenAI's chat and completions name them."""
        read, written = self.num_context, len(self.ids)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    @property
    def logprob_rows(self) -> list[dict[str, Any]]:
        """The log-probs as OpenAI's chat API lists them."""
        return [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(self.tokens, self.logprobs, strict=True)
        ]


@dataclass(eq=False)
class Call:
    """A call that waits for its turn of the policy."""

    messages: list[Message]  # OpenAI's; [] for a prompt in plain text
    prompt: str | list[int] = ""  # of the completions API: text or token ids, no template
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int = 0  # 0 = as many as the response may have
    stop: tuple[str, ...] = ()
    stream: bool = False
    choices: int = 1
    body: dict[str, Any] = field(default_factory=dict)
    # Of the trajectory and the server.
    turn: int = 0  # its number in the trajectory
    id: str = ""  # of the reply
    answer: asyncio.Future[Answer] | None = None
    is_lost: Any = None  # tells whether the connection was cut before the answer was written

    @property
    def model(self) -> str:
        """Name of the model that the program has asked for."""
        model = self.body.get("model")
        return model if isinstance(model, str) else MODEL


class ApiProtocol(Protocol):
    """One HTTP API.

    Attributes:
        reads: fields of a body that have an effect; `unused_settings` looks at the others.
    """

    reads: Sequence[str]

    def read(self, body: dict[str, Any]) -> Call:
        """Return the call of a request. Raises CallError (400) or RowError."""

    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return the reply."""

    def events(self, call: Call, answer: Answer) -> Iterator[str]:
        """Yield the reply as server-sent events."""


def read_call(protocol: ApiProtocol, body: dict[str, Any]) -> Call:
    """Return the call of a request, with the settings that all protocols have. Raises as `read`."""
    call = protocol.read(body)
    call.body, call.stream = body, _read_stream(body)
    call.choices = _read_choices(body) if "n" in protocol.reads else 1
    return call


def _read_choices(body: dict[str, Any]) -> int:
    """Return `n`: each choice is a turn of the policy, and the beginning of a conversation that may go on."""
    n = read_limit(body, "n") or 1
    if n > MAX_CHOICES or body.get("best_of") not in (None, n):
        raise CallError(400, f"n must be at most {MAX_CHOICES}, and best_of, if given, the same number")
    if n > 1 and _read_stream(body):
        raise CallError(400, "n must be 1 in a stream")
    return n


def joined(replies: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one reply with the choices of all."""
    if len(replies) == 1:
        return replies[0]
    usage = dict(replies[0]["usage"])
    usage["completion_tokens"] = sum(reply["usage"]["completion_tokens"] for reply in replies)
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    choices = [{**reply["choices"][0], "index": i} for i, reply in enumerate(replies)]
    return {**replies[0], "choices": choices, "usage": usage}


def read_limit(body: dict[str, Any], *names: str) -> int:
    """Return the smallest of these limits of tokens that the body has; 0 = none."""
    limits = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise CallError(400, f"{name} must be a whole number of at least 1, not {value!r:.40}")
    return min(limits.values(), default=0)


def _read_stream(body: dict[str, Any]) -> bool:
    """Return `stream`."""
    stream = body.get("stream")
    if stream not in (None, False, True):
        raise CallError(400, f"stream must be true or false, not {stream!r:.40}")
    return bool(stream)


def read_stop(value: Any) -> tuple[str, ...]:
    """Return stop strings: a text, a list of at most 16 texts, or null."""
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= 1000 for s in stops):
        raise CallError(400, "stop must be a text or a list of texts of 1 to 1000 characters")
    if len(stops) > 16:
        raise CallError(400, f"stop has {len(stops)} strings; at most 16 are allowed")
    return tuple(stops)


def text_of_parts(value: Any, where: str) -> str:
    """Return the text of a text, or of a list of parts that have one."""
    if isinstance(value, str):
        return value
    texts = [part.get("text") if isinstance(part, dict) else None for part in value or ()]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in texts):
        raise CallError(400, f"{where} must be a text, or a list of parts that are text")
    return "".join(texts)


def event(value: Any, name: str = "") -> str:
    """Return one server-sent event."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def offers_tools(body: dict[str, Any]) -> bool:
    """Return whether the policy may call tools in this turn (`tool_choice`)."""
    return body.get("tool_choice") not in ("none", {"type": "none"})


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool as chat templates read it."""
    if not isinstance(name, str) or not name:
        raise CallError(400, "each tool must have a name")
    parameters = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    if problem := schema_problem(parameters):
        raise CallError(400, f"the parameters of the tool {name:.80}: {problem}")
    function = {"name": name, "description": str(description or ""), "parameters": parameters}
    return {"type": "function", "function": function}


def check_size(call: Call, max_characters: int) -> None:
    """Refuse a call that cannot be short enough, before it is rendered and tokenized.

    These take seconds of a thread for the largest bodies.

    Args:
        max_characters: that the run's limits of tokens hold.

    Raises:
        CallError: it has more (400).
    """
    contents = [message["content"].strip() for message in call.messages]
    size = sum(map(len, strings_of([*contents, call.prompt, call.tools])))
    if size > max_characters:
        limit = f"the run's limits hold {max_characters:,}"
        raise too_long(f"messages and tools have {size:,} characters, and {limit}")


def too_long(reason: str) -> CallError:
    """Return the refusal that clients know as a context that is too long."""
    text = f"the conversation exceeds the maximum context length: {reason}"
    return CallError(400, text, "context_length_exceeded")
