"""Example -> token ids and, for supervised training, the mask of what is learned.

A rendered chat is tokenised piece by piece, cut where the policy begins and ends to write. So the prompt of
a supervised example has the very ids that the same prompt has in a rollout, and the mask is exact.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxrl_llm.data.rows import Example, Message
from jaxrl_llm.data.template import Chat, ChatConfig, read_options
from jaxrl_llm.errors import UserError

STAND_IN = "turn f3a94c of the policy"  # what nobody says
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_prompt(tokenizer: Any, example: Example, config: ChatConfig) -> np.ndarray:
    """Prompt token ids, int32 [.], up to where the policy starts to write.

    Assistant turns at the end of a chat are references for supervised training and are left out.
    """
    messages = prompt_messages(example, config)
    if messages is None:
        ids = _plain_ids(tokenizer, example, config)
    else:
        chat = Chat(tokenizer, messages, example, config)
        ids = chat.tokenise(chat.render(generation_prompt=True))
    if not ids:
        raise UserError(f"{example.where}: the prompt has no tokens")
    return np.asarray(ids, np.int32)


def encode_observation(
    tokenizer: Any,
    example: Example,
    messages: list[Message],
    turn: int,
    config: ChatConfig,
    ended: bool,
    strict: bool = True,
) -> list[int]:
    """Ids that follow a turn of the policy: what was said to it, and the start of its next turn.

    They are what the template adds after the turn, so all ids before them stay as they are.

    Args:
      messages: the conversation; messages[turn] is the policy's turn, those after it the observation.
      ended: whether the policy wrote the end token of its turn, which then does not come again.
      strict: refuse a template that writes what was there before in another way. Otherwise what it writes
        after the turn follows the turn as the policy wrote it.

    Raises:
      ValueError: the template writes what was there before in another way.
    """
    if prompt_messages(example, config) is None:
        return _literal_ids(tokenizer, "".join(message["content"] for message in messages[turn + 1 :]))
    written = len(prompt_messages(example, config))
    shown = [_stand_in(m) if i >= written and m["role"] == "assistant" else m for i, m in enumerate(messages)]
    chat = Chat(tokenizer, shown, example, config)
    before = chat.render(turn, generation_prompt=True) + shown[turn]["content"]
    text = chat.render(generation_prompt=True)
    if text.startswith(before):
        rest = text[len(before) :]
    elif STAND_IN in text and not strict:
        rest = text[text.rindex(STAND_IN) + len(STAND_IN) :]
    else:
        raise UserError(
            "the chat template rewrites earlier turns once more follow, so the policy would not read what it "
            "wrote. Give one that leaves them as they are (--data.chat.chat_template FILE), or keep them as "
            "they were written (--env.history keep)"
        )
    end = next((token for token in chat.controls if rest.startswith(token)), "") if ended else ""
    return chat.tokenise(rest[len(end) :])


def _stand_in(message: Message) -> Message:
    """A turn in simple words: the policy's own are tokens already, and rendering might change them."""
    thought = "<think>\nthought\n</think>\n\n" if "</think>" in message["content"] else ""
    return {**message, "content": f"{thought}{STAND_IN}"}


def encode_supervised(tokenizer: Any, example: Example, config: ChatConfig) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 [.], mask int8 [.]); mask 1 = learn to write this token (assistant turns and their ends).

    Nothing follows the last learned token. Where the example has a `response`, only that is learned.

    Raises:
      ValueError: nothing to learn, no template, or a template whose turns cannot be told apart.
    """
    messages = chat_messages(example, config)
    if messages is None:
        pieces = [(_plain_ids(tokenizer, example, config), 0), (_plain_target(tokenizer, example), 1)]
    else:
        pieces = list(_chat_pieces(tokenizer, messages, example, config))
    ids = [token for piece, _ in pieces for token in piece]
    mask = [learned for piece, learned in pieces for _ in piece]
    return np.asarray(ids, np.int32), np.asarray(mask, np.int8)


def prompt_messages(example: Example, config: ChatConfig) -> list[Message] | None:
    """The chat up to where the policy starts to write; None where there is no template."""
    messages = chat_messages(example, config)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def prompt_record(example: Example, config: ChatConfig) -> dict[str, Any]:
    """Return the prompt as a row of a data file.

    From this row `encode_prompt` makes the same ids with the default ChatConfig: system prompt, earlier
    turns, tools and options of the template are in it. (A template of its own, `chat_template`, is not.)

    Returns: {"prompt": the last message, "messages": all of them, ...} of a chat; {"prompt": all of the text}
        where there is no template.
    """
    messages = prompt_messages(example, config)
    if messages is None:
        return {"prompt": _plain_text(example, config)}
    options = {
        **read_options(config.template_options),
        **(example.columns.get("chat_template_kwargs") or {}),
    }
    further = {"chat_template_kwargs": options, "tools": example.columns.get("tools")}
    present = {name: value for name, value in further.items() if value}
    return {"prompt": messages[-1]["content"], "messages": messages, **present}


def chat_messages(example: Example, config: ChatConfig) -> list[Message] | None:
    """The chat that goes through the template, without `response`; None where there is no template."""
    if config.render == "plain" or (config.render == "auto" and example.messages is None):
        return None
    messages = list(example.messages or ({"role": "user", "content": example.text},))
    if config.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def _chat_pieces(
    tokenizer: Any, messages: list[Message], example: Example, config: ChatConfig
) -> Iterator[tuple[list[int], int]]:
    """(ids, 1 = learned) of each piece of a chat, in order, up to the end of its last assistant turn."""
    target = example.turns
    if example.response is not None:
        target = ({"role": "assistant", "content": example.response},)
    messages = [*messages, *target]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UserError(
            f"{example.where}: nothing to learn: no assistant turn, completion, response or output"
        )
    learned = sum(message["role"] == "assistant" for message in target) or len(turns)
    learned = 1 if config.loss == "last" else learned
    chat = Chat(tokenizer, messages[: turns[-1] + 1], example, config)
    marked = GENERATION.search(chat.template) is not None
    text, spans = chat.render_marked() if marked else _spans(chat, turns[-learned:], example)
    position = 0
    for start, end in _with_ends(text, spans[-learned:], chat.controls):
        yield chat.tokenise(text[position:start]), 0
        yield chat.tokenise(text[start:end]), 1
        position = end
    if position == 0:
        raise UserError(f"{example.where}: the chat template's {{% generation %}} marks nothing in this chat")
    if not text[:position].endswith(chat.controls):
        yield [_end_id(tokenizer)], 1


def _spans(chat: Chat, turns: list[int], example: Example) -> tuple[str, list[tuple[int, int]]]:
    """(text, span of each of `turns`), found as what each turn adds to the text before it."""
    text, spans = chat.render(), []
    for turn in turns:
        before = chat.render(turn, generation_prompt=True)
        after = chat.render(turn + 1)
        if not (text.startswith(after) and after.startswith(before)):
            raise UserError(
                f"{example.where}: the chat template writes message {turn} in another way once its answer or "
                "more turns follow, so what the policy writes cannot be told apart. Mark it in the template "
                "with {% generation %} (--data.chat.chat_template FILE), or try --data.chat.loss last"
            )
        spans.append((len(before), len(after)))
    return text, spans


def _with_ends(
    text: str, spans: list[tuple[int, int]], controls: tuple[str, ...]
) -> Iterator[tuple[int, int]]:
    """Each span up to its end token: without the template's newline after it, with the token just past it."""
    tail = text[spans[-1][1] :] if spans else ""  # no turn follows the last: a control token there ends it
    end_token = next((token for token in controls if tail.startswith(token)), None)
    for start, end in spans:
        trimmed = text[start:end].rstrip()
        if trimmed.endswith(controls):
            yield start, start + len(trimmed)
        elif end_token and text.startswith(end_token, end):
            yield start, end + len(end_token)
        else:
            yield start, end


def _plain_ids(tokenizer: Any, example: Example, config: ChatConfig) -> list[int]:
    """Ids of a prompt without a template; [] or the start token where the text is empty."""
    text = _plain_text(example, config)
    start = not (config.parse_control_tokens and text.startswith(tokenizer.bos_token or "\0"))
    encode: Callable = functools.partial(tokenizer, add_special_tokens=start, verbose=False)
    ids = list(encode(text, split_special_tokens=not config.parse_control_tokens)["input_ids"])
    return ids[:-1] if ids and start and _appends_end(tokenizer) else ids


def _plain_text(example: Example, config: ChatConfig) -> str:
    """A prompt without a template."""
    text = example.text if example.messages is None else _joined(example)
    has_system = example.messages is not None and example.messages[0]["role"] == "system"
    return f"{config.system_prompt}\n\n{text}" if config.system_prompt and not has_system else text


def _appends_end(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its end token after every text, which no prompt may have."""
    ids = tokenizer("a", verbose=False)["input_ids"]
    return bool(ids) and ids[-1] == tokenizer.eos_token_id


def _plain_target(tokenizer: Any, example: Example) -> list[int]:
    if example.response is None:
        raise UserError(f"{example.where}: nothing to learn: the row has no completion, response or output")
    return [*_literal_ids(tokenizer, example.response), _end_id(tokenizer)]


def _literal_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of text in which control tokens are text."""
    encode = functools.partial(tokenizer, add_special_tokens=False, verbose=False)
    return list(encode(text, split_special_tokens=True)["input_ids"]) if text else []


def _joined(example: Example) -> str:
    """Contents of a chat of one question, without a template."""
    messages = list(example.messages)
    while messages[-1]["role"] == "assistant":
        messages.pop()
    if any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{example.where}: a chat of several turns needs a template: --data.chat.render chat")
    return "\n\n".join(message["content"] for message in messages)


def _end_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token: set it in its tokenizer_config.json")
    return tokenizer.eos_token_id
