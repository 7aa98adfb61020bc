"""Observations of conversations as token ids: added to the context, or followed by a rewritten one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.chat import prompt_messages
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.rows import Example, Message
from jaxrl_llm.data.template import ChatRenderer, token_ids
from jaxrl_llm.errors import UserError
from jaxrl_llm.forks import common_length
from jaxrl_llm.thoughts import MARKS, as_message

PLACEHOLDER = "turn f3a94c of the policy"  # in no conversation


class RewrittenHistory(UserError):
    """The chat template renders earlier turns in another way once more messages follow."""


def observe(
    tokenizer: Any,
    example: Example,
    messages: list[Message],
    turn: int,
    *,
    config: ChatConfig,
    history: str,
    context: Sequence[int],
    end: str,
) -> tuple[list[int], int | None]:
    """Return (ids that the policy reads after a turn, tokens of the context that they follow; None = all).

    Where the template changes earlier turns, it renders the conversation again, as it does outside training.

    Args:
      history: `EnvConfig.history`.
      context: ids that the policy has read and written so far.
      The others are as in `encode_observation`.

    Raises:
      RewrittenHistory: the template changes earlier turns, and `history` is "strict".
    """
    strict = history != "keep"
    try:
        ids = encode_observation(tokenizer, example, messages, turn, config=config, end=end, strict=strict)
        return ids, None
    except RewrittenHistory:
        if history == "strict":
            raise
    # The whole conversation once more, and how much of it the policy has read.
    turns = [{**m, **as_message(m["content"])} if m["role"] == "assistant" else m for m in messages]
    chat = ChatRenderer(tokenizer, turns, example, config)
    ids = chat.tokenize(chat.render_whole(generation_prompt=True, first=turn + 1).text)
    length = min(len(ids), len(context))
    keep = common_length(np.asarray(ids[:length]) == np.asarray(context[:length]))
    return ids[keep:], keep


def encode_observation(
    tokenizer: Any,
    example: Example,
    messages: list[Message],
    turn: int,
    *,
    config: ChatConfig,
    end: str,
    strict: bool = True,
) -> list[int]:
    """Return the ids after a turn of the policy: the replies to it and the start of the next turn.

    The template adds them after the turn, so earlier ids do not change.

    Args:
      messages: the conversation; messages[turn] is the policy's turn, and later messages are the observation.
      end: the control token that ended the policy's turn; "" = none. The token that closes a turn is not
          repeated; the token of the next role is included, unless the policy wrote it already.
      strict: refuse a template that changes earlier turns. Otherwise the observation follows the turn as
        the policy wrote it.

    Raises:
      RewrittenHistory: the template changes earlier turns.
    """
    prompt = prompt_messages(example, config)
    if prompt is None:
        text = "".join(message["content"] for message in messages[turn + 1 :])
        return token_ids(tokenizer, text, example.where, literal=True, after=messages[turn]["content"])
    # Render with placeholders for the policy's turns, and take the text after the last one.
    written = [i for i in range(len(prompt), len(messages)) if messages[i]["role"] == "assistant"]
    thoughts = any(_marks_of_thought(messages[i]["content"]) for i in written)
    thinks = thoughts and not _closes_thought(ChatRenderer(tokenizer, prompt, example, config))
    replaced = [_with_placeholder(m, thinks) if i in written else m for i, m in enumerate(messages)]
    chat = ChatRenderer(tokenizer, replaced, example, config)
    text = chat.render_whole(generation_prompt=True, first=turn + 1).text
    before = chat.render(turn, generation_prompt=True) + replaced[turn]["content"]
    if text.startswith(before):
        rest = text[len(before) :]
    elif PLACEHOLDER in text and not strict:
        rest = text[text.rindex(PLACEHOLDER) + len(PLACEHOLDER) :]
    else:
        raise RewrittenHistory(
            "the chat template rewrites earlier turns once more follow, so the policy would not read its own "
            "tokens. Train each turn after the context that it had (--env.history exact), keep the tokens "
            "(--env.history keep), or give a template that leaves earlier turns as they are "
            "(--data.chat.chat_template FILE)"
        )
    # Leave out an end token that the policy wrote already.
    first = next((token for token in chat.controls if rest.startswith(token)), "") if end else ""
    if first != end and not chat.render(turn + 1)[len(before) :].startswith(first):
        first = ""  # it belongs to the next role, as GLM-4.5's <|observation|>
    rest = rest[len(first) :]
    return chat.tokenize(rest, text.removesuffix(rest))


def _marks_of_thought(text: str) -> tuple[str, ...]:
    """Return the marks around the thought of a text whose thought has ended; () = there is none."""
    return next((marks for marks in MARKS.items() if marks[1] in text), ())


def _closes_thought(prompt: ChatRenderer) -> bool:
    """Return whether the template writes an empty thought before the policy's turn, which then has none."""
    return prompt.render(generation_prompt=True).rstrip().endswith(tuple(MARKS.values()))


def _with_placeholder(message: Message, thinks: bool) -> Message:
    """Replace the text of a policy's turn: its tokens exist already, and rendering might change them."""
    marks = _marks_of_thought(message["content"]) if thinks else ()
    thought = "{}\nthought\n{}\n\n".format(*marks) if marks else ""
    return {**message, "content": f"{thought}{PLACEHOLDER}"}
