"""The format of tool calls that a chat template writes: found by rendering a call and reading it back."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.data.chat import prompt_messages
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.template import ChatRenderer
from jaxrl_llm.envs.calls import check_arguments, parse_calls, render_call
from jaxrl_llm.envs.formats import FORMATS, ToolCall
from jaxrl_llm.errors import UserError

SAMPLE_CALL = ToolCall(
    "weather", {"city": "Oslo", "days": 3, "units": ["mm", "C"], "detail": {"hourly": True}}
)
"""A call with an argument of each type that formats write differently."""
SAMPLE_TYPES = {"city": "string", "days": "integer", "units": "array", "detail": "object"}
SAMPLE_SCHEMA = {
    "name": SAMPLE_CALL.name,
    "description": "The forecast.",
    "parameters": {
        "type": "object",
        "properties": {name: {"type": type, "description": name} for name, type in SAMPLE_TYPES.items()},
        "required": ["city"],
    },
}
SAMPLE_CONTENT = "turn 7d20e1 of the policy"  # in no template
MAX_SHOWN = 300  # characters of a call in a message


def detect_format(tokenizer: Any, chat: ChatConfig) -> tuple[str, str]:
    """Return (format of the tool calls of a chat template, a call in it).

    A template whose own calls no format reads may show its prompt's reader an example of one that is known
    (Llama 4's asks for a list of Python calls and writes earlier ones without the list).

    Raises:
        UserError: no format reads the call that the template writes; shows the call.
    """
    prompt, turn = _written_call(tokenizer, chat)
    for name in FORMATS:
        calls = parse_calls(turn, name)
        if [check_arguments(c, SAMPLE_SCHEMA) if isinstance(c, ToolCall) else c for c in calls] == [
            SAMPLE_CALL
        ]:
            return name, turn
    for name, known in FORMATS.items():
        if known.example in prompt:
            return name, render_call(SAMPLE_CALL, name)
    written = f"it writes {turn[:MAX_SHOWN]!r}" if SAMPLE_CALL.name in turn else "it writes none"
    raise UserError(
        "the chat template shows no format of tool calls that is known here: for a call of the tool weather "
        f"{written}. Name the format that the model uses, one of {', '.join(FORMATS)}"
    )


def shows_tools(tokenizer: Any, chat: ChatConfig) -> bool:
    """Return whether the policy reads the tools of a run in its prompts."""
    if chat.render == "plain":
        return False
    try:
        return SAMPLE_CALL.name in _written_call(tokenizer, chat)[0]
    except UserError:  # it refuses this chat, and may take others
        return True


def _written_call(tokenizer: Any, chat: ChatConfig) -> tuple[str, str]:
    """Return (a prompt with a tool, the turn that answers it with a call), as the template writes them."""
    question = ({"role": "user", "content": "Is it warm outside?"},)
    columns = {"tools": [{"type": "function", "function": SAMPLE_SCHEMA}]}
    example = Example(question, None, columns=columns, where="a tool call")
    asked = prompt_messages(example, chat) or list(question)
    function = {"name": SAMPLE_CALL.name, "arguments": SAMPLE_CALL.arguments}
    calls = [{"type": "function", "id": "call00000", "function": function}]
    called, said = (
        ChatRenderer(tokenizer, [*asked, {"role": "assistant", **turn}], example, chat)
        for turn in ({"content": "", "tool_calls": calls}, {"content": SAMPLE_CONTENT})
    )
    text, header = called.render(), said.render().partition(SAMPLE_CONTENT)[0]
    start = next((i for i, (a, b) in enumerate(zip(header, text, strict=False)) if a != b), len(header))
    if start < len(header):  # the call has another header: not from the middle of a token
        start = max(text.rfind(end, 0, start) for end in "\n>") + 1
    turn = text[start:].rstrip()
    while end := next((token for token in called.controls if turn.endswith(token)), ""):
        turn = turn.removesuffix(end).rstrip()
    return called.render(len(asked), generation_prompt=True), turn
