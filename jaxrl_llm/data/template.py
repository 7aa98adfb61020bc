"""One chat through a tokenizer's template to token ids; control tokens in its contents stay text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.data.config import ChatConfig, template_options_problem
from jaxrl_llm.data.rendering import Rendered, TemplateProcess
from jaxrl_llm.data.rows import (
    MAX_CHARACTERS,
    SURROGATE,
    Example,
    Message,
    RowError,
    template_columns,
)
from jaxrl_llm.data.tool_messages import accepted_forms, argument_forms
from jaxrl_llm.errors import UserError

SPACE = "\u2581"  # of SentencePiece's tokens
MAX_TEMPLATE = 1 << 20  # characters; those of large models have ten thousand
PROCESS = TemplateProcess()
"""Renders all chats of this process; started by the first."""


class ChatRenderer:
    """One chat, rendered in parts and tokenized; what looks like a control token in its contents is hidden
    from the tokenizer.

    Args:
        config: of the model that the tokenizer belongs to.
    """

    def __init__(self, tokenizer: Any, messages: list[Message], example: Example, config: ChatConfig):
        self.controls = control_tokens(tokenizer)
        self._tokenizer, self._where = tokenizer, example.where or "a chat"
        tools, options = template_columns(example.columns, self._where)
        self.template = find_template(tokenizer, config, tools)
        contents = [argument_forms(messages), tools, options]
        (forms, tools, options), self._hidden = hide(contents, self.controls, self._where)
        self._forms = list(accepted_forms(forms))
        self._name, self._date = template_name(tokenizer, config), config.date
        options = {**read_options(config), **options}
        self._options = {**tokenizer.special_tokens_map, **options, "tools": tools}

    def render(self, count: int | None = None, generation_prompt: bool = False) -> str:
        """Return the text of the first `count` messages (None: of all)."""
        return self.render_cuts([(count, generation_prompt)])[0]

    def render_cuts(self, cuts: list[tuple[int | None, bool]]) -> list[str]:
        """Return the text of each (count, generation_prompt) as `render` does."""
        return [text for text, _ in self._render([(n, {"add_generation_prompt": g}) for n, g in cuts])]

    def render_marked(self) -> Rendered:
        """Return (text, character spans inside {% generation %})."""
        return self._render([(None, {"return_assistant_tokens_mask": True})])[0]

    def tokenize(self, text: str, before: str = "") -> list[int]:
        """Return ids of rendered text; the template's control tokens are tokens, those of contents text.

        Args:
            before: the rendered text that it follows.
        """
        parts = re.split("(" + "|".join(map(re.escape, self._hidden)) + ")", text) if self._hidden else [text]
        ids = []
        for part in filter(None, parts):
            shown, literal = self._hidden.get(part, part), part in self._hidden
            ids += token_ids(self._tokenizer, shown, self._where, literal, after=before)
            before = part
        return ids

    def _render(self, cuts: list[tuple[int | None, dict[str, bool]]]) -> list[Rendered]:
        """Return what the template makes of each cut of the first form of the chat that it accepts."""
        refusals: list[RowError] = []
        for i, messages in enumerate(self._forms):
            calls = [{"conversations": [messages[:n]], **self._options, **cut} for n, cut in cuts]
            try:
                rendered = PROCESS.render(self.template, calls, self._name, self._where, self._date)
            except RowError as refusal:
                refusals.append(refusal)
            else:
                self._forms = self._forms[i:]  # a template that refused objects need not be asked again
                return rendered
        raise refusals[0]


def token_ids(
    tokenizer: Any, text: str, where: str, literal: bool = False, start: bool = False, after: str = ""
) -> list[int]:
    """Return the ids of a text.

    Args:
        where: the row, for messages.
        literal: control tokens in the text are text.
        start: add the special tokens that the tokenizer puts around a text.
        after: the text that it follows, if any.

    Raises:
        RowError: the tokenizer cannot read the text.
    """
    if not text and not start:
        return []
    if SURROGATE.search(text):
        raise RowError(f"{where}: the text holds a lone surrogate")
    try:
        ids = tokenizer(text, add_special_tokens=start, split_special_tokens=literal, verbose=False)[
            "input_ids"
        ]
    except Exception as error:  # tokenizers raises a bare Exception for a character that it has no token for
        raise RowError(f"{where}: the tokenizer cannot read the text: {error!s:.300}") from error
    return _without_space(tokenizer, text, list(ids), literal, after) if after else list(ids)


def _without_space(tokenizer: Any, text: str, ids: list[int], literal: bool, after: str) -> list[int]:
    """Return the ids of a text within another, where SentencePiece puts no space in front of it.

    Args:
        ids: of the text by itself.
    """
    if not (ids and tokenizer.convert_ids_to_tokens(ids[0]).startswith(SPACE)):
        return ids
    controls = () if literal else control_tokens(tokenizer)
    lead = next((token for token in controls if after.endswith(token)), "\n")
    options = {"add_special_tokens": False, "split_special_tokens": literal, "verbose": False}
    before, both = (list(tokenizer(part, **options)["input_ids"]) for part in (lead, lead + text))
    return both[len(before) :] if both[: len(before)] == before else ids


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return every string that the tokenizer turns into a control token."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(sorted({*added, *tokenizer.all_special_tokens} - {""}))


def hide(contents: Any, controls: tuple[str, ...], where: str) -> tuple[Any, dict[str, str]]:
    """Return (contents with each control token in their text replaced, what each replacement stands for).

    The replacements are private-use characters, which pass through any template unchanged.

    Raises:
        RowError: the contents are too long, or leave no private-use character.
    """
    text = "\n".join(_strings(contents))
    if len(text) > MAX_CHARACTERS:
        raise RowError(f"{where}: the chat has {len(text):,} characters, more than {MAX_CHARACTERS:,}")
    present = [token for token in controls if token in text]
    if not present:
        return contents, {}
    free = [chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text]
    if len(free) < len(present):
        raise RowError(
            f"{where}: holds control tokens, and all private-use characters that could stand for them"
        )
    names = dict(zip(present, free, strict=False))
    pattern = re.compile("|".join(map(re.escape, sorted(present, key=len, reverse=True))))
    hidden = _map_strings(contents, lambda text: pattern.sub(lambda match: names[match.group()], text))
    return hidden, {name: token for token, name in names.items()}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(inner, change) for key, inner in value.items()}
    return [_map_strings(inner, change) for inner in value] if isinstance(value, list) else value


def find_template(tokenizer: Any, config: ChatConfig, tools: Any = None) -> str:
    """Return the Jinja text of the file that the config names, else of the tokenizer.

    Raises:
        UserError: there is none, or it is no text of usual size.
    """
    if config.chat_template:
        path = Path(config.chat_template)
        if not path.is_file():
            raise UserError(f"data.chat.chat_template: there is no file {path}")
        status = path.stat()
        return _read_template(path, status.st_mtime_ns, status.st_size)
    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template: give one with --chat.chat_template FILE, or read messages "
            "as plain text by --chat.render plain; in training --data.chat.chat_template and .render"
        )
    name = template_name(tokenizer, config)
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:  # several templates, none of them the default
        raise UserError(f"{name} is ambiguous: {error}") from error
    return _checked_template(template, name)


def set_template(tokenizer: Any, config: ChatConfig) -> None:
    """Make the template that the config names the tokenizer's own, so that an exported model has it.

    Raises:
        UserError: there is no such file, or it is no text of usual size.
    """
    if config.chat_template:
        tokenizer.chat_template = find_template(tokenizer, config)


def template_name(tokenizer: Any, config: ChatConfig) -> str:
    """Return the name of a template, for messages."""
    if config.chat_template:
        return f"the chat template {config.chat_template}"
    folder = getattr(tokenizer, "name_or_path", "")
    return f"the chat template of {folder}" if folder else "the tokenizer's chat template"


@functools.lru_cache(maxsize=8)
def _read_template(path: Path, modified: int, size: int) -> str:
    """Return the text of a file, read again when it has been modified."""
    name = f"the chat template {path}"
    if size > 4 * MAX_TEMPLATE:
        raise UserError(f"{name} has {size:,} bytes, more than {MAX_TEMPLATE:,}")
    try:
        return _checked_template(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name} cannot be read: {error}") from error


def _checked_template(template: Any, name: str) -> str:
    if not isinstance(template, str):
        raise UserError(f"{name} must be text, got {type(template).__name__}")
    if len(template) > MAX_TEMPLATE:
        raise UserError(f"{name} has {len(template):,} characters, more than {MAX_TEMPLATE:,}")
    return template


def read_options(config: ChatConfig) -> dict[str, Any]:
    """Return `template_options` as a dict. Raises UserError where `ChatConfig.problems` finds one."""
    if problem := template_options_problem(config.template_options):
        raise UserError(f"data.chat.template_options {problem}")
    return json.loads(config.template_options or "{}")
