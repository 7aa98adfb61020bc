"""Rendering one chat with a tokenizer's template, so that control tokens in its contents stay text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrl_llm.data.rows import Example, Message
from jaxrl_llm.errors import UserError


@dataclass(frozen=True)
class ChatConfig:
    """How an example becomes tokens."""

    render: Literal["auto", "chat", "plain"] = "auto"
    """auto: messages go through the chat template, plain text as it is. chat: plain text becomes a user
    message. plain: no template, the contents joined by blank lines (base models)."""
    system_prompt: str = ""
    """System message put before chats that have none."""
    chat_template: str = ""
    """File with a Jinja chat template; empty: the tokenizer's own."""
    template_options: str = ""
    """Arguments of the chat template, as a JSON object: '{"enable_thinking": false}'."""
    loss: Literal["all", "last"] = "all"
    """Supervised training learns all assistant turns, or the last."""
    parse_control_tokens: bool = False
    """True: plain-text prompts are rendered already, so '<|im_start|>' in them is the control token."""


class Chat:
    """One chat ready to be rendered, with the control tokens of its contents hidden from the tokenizer."""

    def __init__(self, tokenizer: Any, messages: list[Message], example: Example, config: ChatConfig):
        options = {
            **read_options(config.template_options),
            **(example.columns.get("chat_template_kwargs") or {}),
        }
        self.template = find_template(tokenizer, config, example.columns.get("tools"))
        self._options = {**tokenizer.special_tokens_map, **options, "tools": example.columns.get("tools")}
        self.controls = control_tokens(tokenizer)
        self._tokenizer, self._where = tokenizer, example.where
        self._messages, self._hidden = hide(messages, self.controls)

    def render(self, count: int | None = None, generation_prompt: bool = False) -> str:
        """Text of the first `count` messages (None: of all)."""
        return self._render(count, add_generation_prompt=generation_prompt)[0]

    def render_marked(self) -> tuple[str, list[tuple[int, int]]]:
        """(text, character spans inside {% generation %})."""
        return self._render(None, return_assistant_tokens_mask=True)

    def tokenise(self, text: str) -> list[int]:
        """Ids of rendered text: the template's control tokens are tokens, those of the contents are text."""
        if not self._hidden:
            return self._ids(text)
        parts = re.split("(" + "|".join(map(re.escape, self._hidden)) + ")", text)
        return [
            token
            for part in parts
            for token in (
                self._ids(self._hidden[part], literal=True) if part in self._hidden else self._ids(part)
            )
        ]

    def _ids(self, text: str, literal: bool = False) -> list[int]:
        encode = functools.partial(self._tokenizer, add_special_tokens=False, verbose=False)
        return list(encode(text, split_special_tokens=literal)["input_ids"]) if text else []

    def _render(self, count: int | None, **arguments: Any) -> tuple[str, list[tuple[int, int]]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = self._messages[:count]
        try:
            texts, spans = render_jinja_template(
                [messages], chat_template=self.template, **self._options, **arguments
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"{self._where}: the chat template cannot render this chat: {error}") from error
        return texts[0], [tuple(span) for span in spans[0]] if spans else []


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Every string that the tokenizer turns into a control token."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(sorted({*added, *tokenizer.all_special_tokens}))


def hide(messages: list[Message], controls: tuple[str, ...]) -> tuple[list[Message], dict[str, str]]:
    """(messages with each control token in their contents replaced, what each replacement stands for).

    The replacements are private-use characters, which pass through any template unchanged.
    """
    contents = "\n".join(_strings(messages))
    found = [token for token in controls if token in contents]
    if not found:
        return messages, {}
    free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in contents)
    names = {token: next(free) for token in found}
    pattern = re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))))
    hidden = _map_strings(messages, lambda text: pattern.sub(lambda match: names[match.group()], text))
    return hidden, {name: token for token, name in names.items()}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_strings(inner, change) for key, inner in value.items()}
    return [_map_strings(inner, change) for inner in value] if isinstance(value, list) else value


def find_template(tokenizer: Any, config: ChatConfig, tools: Any = None) -> str:
    """The Jinja text. Raises ValueError with the fix where there is none."""
    if config.chat_template:
        return _read_template(config.chat_template)
    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template: give one with --data.chat.chat_template FILE, or train on "
            "plain text with --data.chat.render plain"
        )
    return tokenizer.get_chat_template(tools=tools)


@functools.lru_cache(maxsize=8)
def _read_template(path: str) -> str:
    if not Path(path).is_file():
        raise UserError(f"data.chat.chat_template: there is no file {path}")
    return Path(path).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=8)
def read_options(text: str) -> dict[str, Any]:
    """`template_options` as a dict. Raises ValueError where it is not a JSON object."""
    try:
        options = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise UserError(f"data.chat.template_options is not JSON: {text!r}: {error}") from error
    if not isinstance(options, dict):
        raise UserError(f"data.chat.template_options must be a JSON object, got {text!r}")
    return options
