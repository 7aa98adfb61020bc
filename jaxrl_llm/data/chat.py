"""Examples as token ids and, for supervised training, the mask of the learned tokens.

A rendered chat is split at the start and end of the policy's turns, and each piece is tokenized separately.
So a prompt has the same ids in supervised training and in a rollout, and the mask is exact. Assistant text
has the ids of transformers, including control tokens; in other roles' text, control tokens stay plain text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.messages import message_text
from jaxrl_llm.data.parts import TAG, Rendered, messages_of_blocks, tool_name
from jaxrl_llm.data.preference import conversation_text
from jaxrl_llm.data.rows import RESPONSE_KEYS, Example, Message, RowError, template_columns, without_reference
from jaxrl_llm.data.template import ChatRenderer, end_tokens, read_options, token_ids
from jaxrl_llm.errors import UserError

OTHER_KEY = "(--data.train.0.response_key names another column)"
Encoded = tuple[np.ndarray, np.ndarray]
"""ids int32 [.], mask int8 [.] with 1 = learned."""


def encode_prompt(tokenizer: Any, example: Example, config: ChatConfig) -> np.ndarray:
    """Return prompt token ids, int32 [.], up to the start of the policy's turn.

    Assistant turns at the end of a chat are references for supervised training and are left out.
    """
    messages = prompt_messages(example, config)
    if messages is None:
        ids = _plain_ids(tokenizer, example, config)
    else:
        chat = ChatRenderer(tokenizer, messages, example, config)
        ids = chat.tokenize(chat.render_whole(generation_prompt=True).text)
    if not ids:
        raise RowError(f"{example.where}: the prompt has no tokens")
    return np.asarray(ids, np.int32)


def encode_conversation(tokenizer: Any, example: Example, config: ChatConfig) -> np.ndarray:
    """Return the ids of a whole chat, including assistant turns, int32 [.].

    Raises:
      RowError: the example is plain text, or the template refuses it.
    """
    messages = chat_messages(example, config)
    if messages is None:
        raise RowError(f"{example.where}: not a chat: the row needs messages")
    chat = ChatRenderer(tokenizer, messages, example, config)
    return np.asarray(chat.tokenize(chat.render_whole().text), np.int32)


def encode_supervised(tokenizer: Any, example: Example, config: ChatConfig) -> Encoded:
    """Return (ids, mask) of an example to imitate; mask 1 = learned: `config.loss` and ends of turns.

    The last learned token is the last token. If the example has a `response`, only the response is learned.

    Raises:
      RowError: nothing to learn, or the template does not separate the turns of the chat.
      UserError: no template.
    """
    messages = chat_messages(example, config)
    if messages is not None and config.loss == "chat" and not _has_target(example):
        ids = encode_conversation(tokenizer, example, config)
        return ids, np.ones(len(ids), np.int8)
    if messages is None:
        pieces = [(_plain_ids(tokenizer, example, config), 0), (_plain_target(tokenizer, example, config), 1)]
    else:
        pieces = list(_chat_pieces(tokenizer, messages, example, config))
    ids = [token for piece, _ in pieces for token in piece]
    mask = [learned for piece, learned in pieces for _ in piece]
    return np.asarray(ids, np.int32), np.asarray(mask, np.int8)


def _has_target(example: Example) -> bool:
    """Return whether the row marks its learned part: by a target beside its chat, or messages with weight
    0."""
    columns = [example.columns.get(key) for key in RESPONSE_KEYS]
    weighted = any(message.get("weight") == 0 for message in example.messages or ())
    return example.response is not None or bool(example.turns) or any(columns) or weighted


def encode_steps(tokenizer: Any, example: Example, config: ChatConfig) -> tuple[np.ndarray, ...]:
    """Return (ids, mask, labels float32), each [.]: mask 1 and the label at the token that follows a step.

    The state that predicts this token has read the whole step; the end token follows the last step.
    """
    if not example.steps:
        raise RowError(f"{example.where}: no steps: a row needs prompt, completions and labels")
    has_prompt = example.messages is not None or example.text
    ids = encode_prompt(tokenizer, example, config).tolist() if has_prompt else []
    ends, before = [], "\n" * bool(has_prompt)
    for text, _ in example.steps:
        ids += token_ids(tokenizer, text, example.where, after=before)
        ends.append(len(ids))
        before = text
    mask, labels = np.zeros(len(ids) + 1, np.int8), np.zeros(len(ids) + 1, np.float32)
    mask[ends], labels[ends] = 1, [label for _, label in example.steps]
    return np.asarray([*ids, _end_id(tokenizer)], np.int32), mask, labels


def prompt_messages(example: Example, config: ChatConfig) -> list[Message] | None:
    """Return the chat up to the policy's turn; None if no template is used."""
    messages = chat_messages(example, config)
    return None if messages is None else without_reference(messages)


def chat_messages(example: Example, config: ChatConfig) -> list[Message] | None:
    """Return the chat that the template renders, without `response`; None if no template is used."""
    if config.render == "plain" or (config.render == "auto" and example.messages is None):
        return None
    messages = list(example.messages or ({"role": "user", "content": example.text},))
    system = example.system or config.system_prompt
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def prompt_row(example: Example, config: ChatConfig) -> dict[str, Any]:
    """Return the prompt as a row of a data file that gives the same ids with a default `ChatConfig`.

    A chat becomes {"prompt": text of the last message, "messages": [{"role", "content"}, ...]} with the
    system prompt, and with `tools` and `chat_template_kwargs` if the template uses any; without a template
    the row is {"prompt": text}. The ids are the same if `chat_template`, `date` and `parse_control_tokens`
    are.
    """
    messages = prompt_messages(example, config)
    if messages is None:
        return {"prompt": _plain_text(example, config)}
    tools, options = template_columns(example.columns, example.where)
    given = {"tools": tools, "chat_template_kwargs": {**read_options(config), **options}}
    present = {key: value for key, value in given.items() if value}
    return {"prompt": messages[-1]["content"], "messages": messages, **present}


def question_text(example: Example, config: ChatConfig) -> str:
    """Return the prompt as text for a judge; a chat of several messages includes their roles."""
    messages = prompt_messages(example, config)
    return _plain_text(example, config) if messages is None else conversation_text(messages)


def plain_text_warning(
    tokenizer: Any, examples: Iterable[Example], config: ChatConfig, flag: str = "--data.chat.render"
) -> str:
    """Return a warning of a prompt in plain text for a chat model, or "".

    Args:
      flag: of `ChatConfig.render` on the command line of the program that warns.
    """
    if config.render != "auto" or not tokenizer.chat_template:
        return ""
    plain = next((example for example in examples if example.text), None)
    if plain is None:
        return ""
    return (
        f"{plain.where}: the prompt is plain text and gets no chat template, but the model's tokenizer has "
        f'one. For a chat model give rows with "messages", or {flag} chat; {flag} plain is for base models '
        "and turns off this warning"
    )


def _chat_pieces(
    tokenizer: Any, messages: list[Message], example: Example, config: ChatConfig
) -> Iterator[tuple[list[int], int]]:
    """Yield (ids, 1 = learned) of each piece of a chat, up to the end of its last learned turn."""
    target = example.turns
    if example.response is not None:
        thought = dict.fromkeys(("reasoning_content", "thinking"), example.thought) if example.thought else {}
        target = ({"role": "assistant", "content": example.response, **thought},)
    learned = _learned_turns([*messages, *target], len(messages) if target else 0, example, config)
    messages = [*messages, *target][: learned[-1] + 1]
    chat = ChatRenderer(tokenizer, messages, example, config)
    whole, ends = chat.render_whole(learned=learned), end_tokens(tokenizer)
    if chat.marks_generation:
        spans = _marked_spans(whole, messages, learned, example)
    else:
        spans = _spans(chat, whole, learned, example, ends=ends)
    position = 0
    for start, end in _with_ends(whole.text, spans, chat.controls, ends):
        yield chat.tokenize(whole.text[position:start], whole.text[:position]), 0
        yield chat.tokenize(whole.text[start:end], whole.text[:start]), 1
        position = end
    if position == 0:
        raise RowError(f"{example.where}: the chat template's {{% generation %}} marks nothing in this chat")
    if not _ends_turn(whole.text[:position], messages[-1]["content"], chat.controls, ends):
        yield [_end_id(tokenizer)], 1


def _learned_turns(messages: list[Message], target: int, example: Example, config: ChatConfig) -> list[int]:
    """Return the indices of the assistant turns to learn, from the message `target` on.

    Raises:
        RowError: the chat has no turn to learn.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= target]
    if not turns:
        raise RowError(
            f"{example.where}: nothing to learn: no assistant turn, completion, response or output "
            f"{OTHER_KEY}"
        )
    turns = turns[-1:] if config.loss == "last" else turns
    learned = [i for i in turns if messages[i].get("weight") != 0]
    if not learned:
        last = "the last assistant turn has" if config.loss == "last" else "all assistant turns have"
        raise RowError(f"{example.where}: nothing to learn: {last} weight 0, which leaves a turn out")
    return learned


def _marked_spans(
    chat: Rendered, messages: list[Message], learned: list[int], example: Example
) -> list[tuple[int, int]]:
    """Return the spans of {% generation %} in the learned turns; adjacent spans are merged."""
    roles = [message["role"] for message in messages]
    blocks = chat.blocks
    if len(learned) < roles.count("assistant"):
        if chat.places is None:
            raise RowError(
                f"{example.where}: the chat template writes another text if a message has one more "
                "letter, so the turns to learn cannot be told from the others; all of them can be learned"
            )
        owners = messages_of_blocks(chat, roles)
        blocks = [block for block, owner in zip(blocks, owners, strict=True) if owner in learned]
    spans: list[tuple[int, int]] = []
    for start, end in blocks:
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return [(start, end) for start, end in spans if end > start]


def _spans(
    chat: ChatRenderer, rendered: Rendered, turns: list[int], example: Example, *, ends: tuple[str, ...]
) -> list[tuple[int, int]]:
    """Return the span of each of `turns`: the text that the turn adds to the rendered chat.

    Raises:
        RowError: the template moves or changes a turn, so that its span is unknown.
    """
    text = rendered.text
    rest = chat.render_cuts([cut for turn in turns for cut in ((turn, True), (turn + 1, False))])
    spans = []
    for turn, before, after in zip(turns, rest[::2], rest[1::2], strict=True):
        after = _as_within(text, after, ends)
        if text.startswith(after) and after.startswith(before):
            spans.append((len(before), len(after)))
        elif span := _span_without_thought(chat, rendered, turn, before=before, ends=ends):
            spans.append(span)
        else:
            raise RowError(
                f"{example.where}: the chat template renders message {turn} in another way once its answer "
                "or more turns follow, so the policy's text cannot be located. Mark it in the template "
                "with {% generation %} (--data.chat.chat_template FILE), or try --data.chat.loss last"
            )
    return spans


def _span_without_thought(
    chat: ChatRenderer, rendered: Rendered, turn: int, *, before: str, ends: tuple[str, ...]
) -> tuple[int, int] | None:
    """Return the span of a turn whose prompt begins a thought that the chat lacks; None = not found.

    The span starts where chat and prompt begin to differ, before a tag or control token there. It ends with
    the text that ends the turn if no message follows.

    Args:
        before: the prompt of the turn.
    """
    alone, text = chat.render_marked(turn + 1), rendered.text
    earlier = [place for place, message in rendered.places or () if message < turn]
    places, places_alone = (
        [place for place, message in shown.places or () if message == turn] for shown in (rendered, alone)
    )
    if not places or not places_alone:
        return None
    same = (a == b for a, b in zip(before, text, strict=False))
    start = len(list(itertools.takewhile(bool, same)))
    tag = re.compile("|".join([*map(re.escape, chat.controls), TAG.pattern]))
    for shown in (before, text):
        spans = (match.span() for match in tag.finditer(shown))
        start = min([start, *(begin for begin, end in spans if begin < start < end)])
    tail = _as_within(text, alone.text[places_alone[-1] :], ends, start=places[-1])
    if not max(earlier, default=0) <= start < places[0] or not text.startswith(tail, places[-1]):
        return None
    if opened := before[start:]:
        chat.warn_of_prompt(opened)
    return start, places[-1] + len(tail)


def _as_within(text: str, part: str, ends: tuple[str, ...], *, start: int = 0) -> str:
    """Return the end of a shorter chat as it is within a longer one, whose text goes on from `start`.

    Phi-3's template ends a chat, not a turn, with the end token.
    """
    if text.startswith(part, start):
        return part
    return next((part.removesuffix(end) for end in ends if part.endswith(end)), part)


def _with_ends(
    text: str, spans: list[tuple[int, int]], controls: tuple[str, ...], ends: tuple[str, ...]
) -> Iterator[tuple[int, int]]:
    """Extend or trim each span to its end token: drop white space after it, include an end token just past
    it.

    The token that ends a turn may begin the next message, as in GLM-4.5's `<|user|>`, if it ends a response.
    """
    tail = text[spans[-1][1] :] if spans else ""  # no turn follows the last: a control token there ends it
    closing = (*ends, *(token for token in controls if tail.startswith(token)))
    for start, end in spans:
        trimmed = text[start:end].rstrip()
        follows = next((token for token in closing if text.startswith(token, end)), "")
        if trimmed.endswith(controls) and not follows:
            end = start + len(trimmed)
        yield start, end + len(follows)


def _ends_turn(text: str, content: str, controls: tuple[str, ...], ends: tuple[str, ...]) -> bool:
    """Return whether a rendered turn has an end token that is not part of its content."""
    return text.endswith(ends) or (text.endswith(controls) and not (content and text.endswith(content)))


def _plain_text(example: Example, config: ChatConfig) -> str:
    """Return a prompt without a template."""
    text = example.text if example.messages is None else _joined(example)
    system = example.system or config.system_prompt
    has_system = example.messages is not None and example.messages[0]["role"] == "system"
    return f"{system}\n\n{text}" if system and not has_system else text


def _plain_ids(tokenizer: Any, example: Example, config: ChatConfig) -> list[int]:
    """Return ids of a prompt without a template; [] or the start token for an empty text."""
    text = _plain_text(example, config)
    tools = None if example.tools_of_run else template_columns(example.columns, example.where)[0]
    if unread := [name for name in map(tool_name, tools or ()) if name not in text]:
        raise RowError(
            f"{example.where}: no template shows the tools {', '.join(unread)}: give messages, or "
            "--data.chat.render chat"
        )
    parses = config.parse_control_tokens or example.parses_controls
    first = text if parses else "" if text else example.response or ""
    start = not first.startswith(tokenizer.bos_token or "\0")
    ids = token_ids(tokenizer, text, example.where, not parses, start=start)
    return ids[:-1] if ids and start and _appends_end(tokenizer) else ids


def _appends_end(tokenizer: Any) -> bool:
    """Return whether the tokenizer appends its end token to every text; a prompt must not have it."""
    ids = tokenizer("a", verbose=False)["input_ids"]
    return bool(ids) and ids[-1] == tokenizer.eos_token_id


def _plain_target(tokenizer: Any, example: Example, config: ChatConfig) -> list[int]:
    if example.response is None:
        raise RowError(
            f"{example.where}: nothing to learn: the row has no completion, response or output {OTHER_KEY}"
        )
    if example.thought:
        raise RowError(
            f"{example.where}: the thought in a column of its own would be left out, as no template writes "
            "it: put it into the response, or --data.chat.render chat"
        )
    before, response = _plain_text(example, config), example.response
    ids = token_ids(tokenizer, response, example.where, after=before)
    return ids if response.endswith(end_tokens(tokenizer)) else [*ids, _end_id(tokenizer)]


def _joined(example: Example) -> str:
    """Return the contents of a chat of one question, without a template."""
    messages = without_reference(example.messages)
    if any(message["role"] == "assistant" for message in messages):
        raise RowError(f"{example.where}: a chat of several turns needs a template: --data.chat.render chat")
    return "\n\n".join(message_text(message, example.where) for message in messages)


def _end_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token: set it in its tokenizer_config.json")
    return tokenizer.eos_token_id
