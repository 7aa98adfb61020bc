"""Thought and answer in the text of a response, for all that rewards or shows it. Imports nothing of ours.

A text has the marks that the policy wrote: <think>..</think> and its like, or gpt-oss's channels (harmony).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

MARKS = {
    "<think>": "</think>",  # DeepSeek-R1, Qwen3, GLM-4.5, SmolLM3 and most others
    "[THINK]": "[/THINK]",  # Magistral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
    "<|begin_of_thought|>": "<|end_of_thought|>",  # Sky-T1
    "<unused94>thought": "<unused95>",  # MedGemma
    "\u25c1think\u25b7": "\u25c1/think\u25b7",  # Kimi-VL
    "<thought>": "</thought>",  # EXAONE Deep
    "<thinking>": "</thinking>",  # prompts that ask for it
    "<reasoning>": "</reasoning>",
}
"""Opening mark of a thought -> its closing mark."""
# Command A, Sky-T1, GLM-4.5V
AROUND_ANSWER = re.compile(r"<\|(?:START_RESPONSE|END_RESPONSE|(?:begin|end)_of_(?:solution|box))\|>")
MARK = re.compile("|".join(map(re.escape, [*MARKS, *MARKS.values()])))
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
BORDER = re.compile(r"<\|(?:start|end|call|return)\|>")
NAME = re.compile(r"<\|channel\|>\s*(\w+)")
OPENED = (*MARKS, f"{CHANNEL}analysis{MESSAGE}")
"""Ends of a prompt whose response begins inside a thought."""


class Parts(NamedTuple):
    """A response taken apart."""

    thought: str
    answer: str  # the text after the thought; "" if the thought is unfinished


def split_thought(text: str, opened: bool | None = None) -> Parts:
    """Return thought and answer of a response; several thoughts are joined by line breaks.

    Args:
        opened: the prompt ends with the opening mark of a thought. A closing mark without an opening one ends
            such a thought, too.
    """
    if has_channels(text):
        return _split_channels(text, opened)
    thoughts, shown, begin = [], [], 0
    closing = "" if opened else None  # the mark that ends the thought; "" = any, None = no thought
    for match in MARK.finditer(text):
        mark, is_opening = match.group(), match.group() in MARKS
        if closing == "" and is_opening and not text[begin : match.start()].strip():
            begin = match.end()  # the prompt has opened it already
        if closing is not None and (is_opening or (closing and mark != closing)):
            continue  # a word of the thought
        part, begin = text[begin : match.start()], match.end()
        if is_opening:
            shown.append(part)
        elif closing is None:  # the thought began in the prompt
            thoughts += [*shown, part]
            shown = []
        else:
            thoughts.append(part)
        closing = MARKS[mark] if is_opening else None
    (shown if closing is None else thoughts).append(text[begin:])
    answer = "".join(shown).strip() if thoughts else text
    answer = AROUND_ANSWER.sub("", answer).strip() if AROUND_ANSWER.search(answer) else answer
    return Parts(_joined(thoughts), answer if closing is None else "")


def has_channels(text: str) -> bool:
    """Return whether a text is written in gpt-oss's channels."""
    return CHANNEL in text


def opens_thought(prompt: str) -> bool:
    """Return whether a response to the prompt begins inside a thought."""
    return prompt.rstrip().endswith(OPENED)


def visible_response(text: str) -> str:
    """Return a response as reward functions read it: of channels the final one, else the text as it is."""
    return split_thought(text).answer if has_channels(text) else text


def as_message(text: str) -> dict[str, Any]:
    """Return a response as the chat message that a template renders: of channels content and thinking."""
    if not has_channels(text):
        return {"role": "assistant", "content": text}
    thought, answer = split_thought(text)
    return {"role": "assistant", "content": answer, **({"thinking": thought} if thought else {})}


def readable(text: str) -> str:
    """Return a response for people: channels become the thought in <think>..</think> and the answer after it.

    The text only grows with further tokens, so that it can be streamed.
    """
    if not has_channels(text):
        return text
    pieces = [piece.partition(MESSAGE) for piece in BORDER.split(text)]
    shown = []
    for i, (head, marked, content) in enumerate(pieces):
        name, ended = NAME.search(head), i + 1 < len(pieces)
        if name and name[1] == "analysis":
            shown.append(f"<think>{content}" + "</think>\n" * ended)
        elif marked:
            shown.append(content if name and name[1] == "final" else f"{head.strip()}: {content}\n")
    return "".join(shown)


def _split_channels(text: str, opened: bool | None) -> Parts:
    """Return the channel analysis as thought and the channel final as answer; calls are neither."""
    thoughts, answers = [], []
    pieces = [piece for piece in BORDER.split(text) if piece]
    for i, piece in enumerate(pieces):
        head, marked, content = piece.partition(MESSAGE)
        name = NAME.search(head)
        if not marked and i == 0 and CHANNEL not in piece:  # its head is in the prompt
            (thoughts if opened or len(pieces) > 1 else answers).append(piece)
        elif marked and name and name[1] == "analysis":
            thoughts.append(content)
        elif marked and name and name[1] == "final":
            answers.append(content)
    return Parts(_joined(thoughts), _joined(answers))


def _joined(parts: list[str]) -> str:
    return "\n".join(part.strip() for part in parts if part.strip())
