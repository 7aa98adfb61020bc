"""Judgements to imitate: a language model as reward model (arXiv 2306.05685; 2408.15240).

Supervised training on them makes a generative reward model; `jaxrl_llm.rewards.verdict` reads what it says.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

from jaxrl_llm.data.preference import label_of
from jaxrl_llm.data.rows import Example, Message
from jaxrl_llm.errors import UserError

SOURCE = "judgement"
ONE = "Question:\n{question}\n\nAnswer:\n{answer}\n\nIs the answer right? Reply with Yes or No."
TWO = (
    "Question:\n{question}\n\nAnswer A:\n{a}\n\nAnswer B:\n{b}\n\nWhich answer is better? Reply with A or B."
)


def judgement(example: Example) -> Example:
    """The question which response of a pair is better, or whether a labelled one is right, with the verdict.

    The better one of a pair is A in half of the rows, chosen by the rows' names.
    """
    if example.rejected is None:
        verdict = "Yes" if label_of(example) else "No"
        asked = ask_one(_question(example), _response(example))
    else:
        responses = [_response(example), _response(example.rejected)]
        verdict = "AB"[zlib.crc32(f"{example.where} {responses}".encode()) % 2]
        asked = ask_two(_question(example), *(responses if verdict == "A" else responses[::-1]))
    return dataclasses.replace(
        example,
        messages=({"role": "user", "content": asked},),
        text=None,
        response=verdict,
        answer=verdict,
        source=SOURCE,  # not that of the question: what is asked now is a verdict
        columns={},
        rejected=None,
    )


def ask_one(question: str, answer: str) -> str:
    """Whether an answer is right: Yes or No."""
    return ONE.format(question=question, answer=answer)


def ask_two(question: str, a: str, b: str) -> str:
    """Which of two answers is better: A or B."""
    return TWO.format(question=question, a=a, b=b)


def conversation_text(messages: Sequence[Message]) -> str:
    """Return a chat as text: a lone message as it is, several with their roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _question(example: Example) -> str:
    """The prompt as text."""
    if example.messages is None:
        return example.text
    return conversation_text(example.messages if example.response is not None else example.messages[:-1])


def _response(example: Example) -> str:
    if example.response is not None:
        return example.response
    if example.messages is None or example.messages[-1]["role"] != "assistant":
        raise UserError(f"{example.where}: nothing to judge: the row has no response")
    return example.messages[-1]["content"]
