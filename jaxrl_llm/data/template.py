"""One chat through a template to token ids; control tokens in users' and tools' texts stay plain text."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.data.config import ChatConfig, template_options_problem
from jaxrl_llm.data.messages import accepted_forms, argument_forms, in_parts, with_null
from jaxrl_llm.data.parts import ChatPart, Rendered, find_parts, map_strings, mark_parts, strings_of
from jaxrl_llm.data.rendering import TemplateProcess
from jaxrl_llm.data.rows import MAX_CHARACTERS, SURROGATE, Example, Message, RowError, template_columns
from jaxrl_llm.errors import UserError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
WRITES_PARTS = re.compile(r"""['"]type['"]: ['"]text['"]""")  # a list of parts as it is in Python or JSON
SPACES = ("\u2581", "\u0120")  # of tokens of SentencePiece and of byte-level BPE
MAX_TEMPLATE = 1 << 20  # characters; large models have ten thousand
log = logging.getLogger(__name__)
PROCESS = TemplateProcess()
"""Renders all chats of this process; started by the first."""


class ChatRenderer:
    """One chat, rendered in parts and tokenized.

    Control tokens in the assistant's text are kept; in other roles' text they are hidden from the tokenizer.

    Args:
        config: of the model that the tokenizer belongs to.
        own: False: the assistant is another model, and its control tokens are hidden too.
    """

    def __init__(
        self,
        tokenizer: Any,
        messages: list[Message],
        example: Example,
        config: ChatConfig,
        *,
        own: bool = True,
    ):
        # The template of the chat's tools and options.
        self.controls = control_tokens(tokenizer)
        self._tokenizer, self._where = tokenizer, example.where or "a chat"
        tools, options = template_columns(example.columns, self._where)
        self.template = find_template(tokenizer, config, tools)
        shown = lambda message: own and message["role"] == "assistant"
        said = [message for message in messages if shown(message)]
        forms = argument_forms(messages)
        others = [[{} if shown(message) else message for message in form] for form in forms]
        contents, self._hidden = hide([others, tools, options], self.controls, self._where, said)
        others, tools, options = contents
        self._forms = list(
            accepted_forms(
                [
                    [message if shown(message) else other for message, other in zip(*both, strict=True)]
                    for both in zip(forms, others, strict=True)
                ]
            )
        )
        self._name, self._date = template_name(tokenizer, config), config.date
        options = {**read_options(config), **options}
        self._options = {**tokenizer.special_tokens_map, **options, "tools": tools}
        self._own_tools = None if example.tools_of_run else tools

    @property
    def marks_generation(self) -> bool:
        """True for a template with {% generation %}."""
        return GENERATION.search(self.template) is not None

    def render(self, count: int | None = None, generation_prompt: bool = False) -> str:
        """Return the text of the first `count` messages (None: of all)."""
        return self.render_cuts([(count, generation_prompt)])[0]

    def render_cuts(self, cuts: list[tuple[int | None, bool]]) -> list[str]:
        """Return the text of each (count, generation_prompt) as `render` does."""
        header = self._first_header() if (0, True) in cuts else ""
        asked = [cut for cut in cuts if not header or cut != (0, True)]
        shown = iter(self._render([(n, {"add_generation_prompt": g}) for n, g in asked]))
        return [header if header and cut == (0, True) else next(shown)[0] for cut in cuts]

    def _first_header(self) -> str:
        """Return the text before the policy's turn that begins a chat; "" = not found.

        Many templates need a message, or write the start of a text with the first one.
        """
        said = {"role": "user", "content": "Hi"}
        form = in_parts([said]) if isinstance(self._forms[0][0]["content"], list) else [said]
        first = self.render(1)
        try:
            (before, _), (after, _) = self._ask([(form, {"add_generation_prompt": g}) for g in (False, True)])
        except RowError:
            return ""
        header = after.removeprefix(before)
        return first[: first.index(header)] + header if header and header in first else ""

    def render_whole(
        self, generation_prompt: bool = False, learned: Sequence[int] = (), first: int = 0
    ) -> Rendered:
        """Render the whole chat and check that no part of its messages is lost.

        If the template loses a part, other forms of the same messages are tried; the first that loses none is
        used from then on.

        Args:
            learned: indices of messages that are to be learned.
            first: index of the first message whose parts must be in the text.

        Raises:
            RowError: the template leaves out a text, a thought or a tool call.
        """
        problems, given = [], self._forms
        for form in (list, with_null, in_parts):
            self._forms = [form(messages) for messages in given]
            if form is not list and self._forms == given:
                continue
            try:
                chat = self.render_marked(None, generation_prompt)
            except RowError as refusal:
                problems.append((len(given[0]), len(problems), refusal))
                continue
            lost = [part for part in chat.lost if part.message >= first and self._is_missed(part, learned)]
            if lost:
                problems.append((len({part.message for part in lost}), len(problems), self._error(lost[0])))
            elif not problems or not WRITES_PARTS.search(chat.text):
                return chat
        raise min(problems)[2]

    def tokenize(self, text: str, before: str = "") -> list[int]:
        """Return ids of rendered text: control tokens become tokens, hidden ones become text.

        Args:
            before: the rendered text before it.
        """
        parts = re.split("(" + "|".join(map(re.escape, self._hidden)) + ")", text) if self._hidden else [text]
        ids = []
        for part in filter(None, parts):
            shown, literal = self._hidden.get(part, part), part in self._hidden
            ids += token_ids(self._tokenizer, shown, self._where, literal, after=before)
            before = part
        return ids

    def warn_of_prompt(self, opened: str) -> None:
        """Warn once that learned turns lack a text with which the template ends a prompt."""
        _warn_once(
            f"{self._name} ends a prompt with {opened!r} and leaves it out of turns without a thought, which "
            "are learned so. A setting of the template, such as enable_thinking, may change this "
            "(--data.chat.template_options)"
        )

    def render_marked(self, count: int | None, generation_prompt: bool = False) -> Rendered:
        """Render the first `count` messages, and locate their parts in the text."""
        options = {"add_generation_prompt": generation_prompt}
        tracked = {"return_assistant_tokens_mask": True} if self.marks_generation else {}
        messages = self._forms[0][:count]
        taken = "".join(strings_of([messages, self._own_tools]))
        marked, tools, parts = mark_parts(messages, self._own_tools, taken)
        with_marks = marked, options | ({"tools": tools} if tools else {})
        try:
            (text, blocks), (shown, _) = self._ask([(messages, options | tracked), with_marks])
        except RowError:
            ((text, blocks),) = self._render([(count, options | tracked)])
            if messages != self._forms[0][:count]:
                return self.render_marked(count, generation_prompt)
            shown = ""  # the template refuses the marks
        lost, places = find_parts(text, shown, parts)
        return Rendered(text, blocks, lost, places)

    def _is_missed(self, part: ChatPart, learned: Sequence[int]) -> bool:
        """Return whether the template must not lose a part.

        Many templates leave out the assistant's thoughts in earlier turns, as in a rollout. If such a turn
        should be learned, a warning is logged once.
        """
        number, messages = part.message, self._forms[0]
        if part.kind == "name":
            _warn_once(f"{self._name} leaves out the names of messages (key name)")
            return False
        if messages[number]["role"] != "assistant" or part.kind == "tool":
            return True
        answered = any(message["role"] == "user" for message in messages[number + 1 :])
        if part.kind == "thought" and answered and number not in learned:
            return False
        if number == len(messages) - 1 or part in self.render_marked(number + 1, False).lost:
            return True
        if number in learned:
            _warn_once(
                f"{self._name} leaves out the {part.kind} of a turn once more turns follow, so it is not "
                "learned there: --data.chat.loss last learns each row's last turn alone, another template "
                "(--data.chat.chat_template FILE) may keep it"
            )
        return False

    def _error(self, part: ChatPart) -> RowError:
        role = self._forms[0][part.message]["role"]
        what = {"text": f"what the role {role} says", "thought": "what the assistant thinks"}
        place = f"{what.get(part.kind, 'the tool call')} in message {part.message}"
        if part.kind == "tool":
            place = "a tool"
        text = "".join(self._hidden.get(char, char) for char in part.text[:40])
        return RowError(
            f"{self._where}: {self._name} leaves out {place} ({text!r}), so the model would "
            "neither read nor learn it. Give a template that writes it (--data.chat.chat_template FILE), or "
            "change or remove it in the rows"
        )

    def _render(self, cuts: list[tuple[int | None, dict[str, bool]]]) -> list[tuple[str, list]]:
        """Render each cut of the first form of the chat that the template accepts."""
        refusals: list[RowError] = []
        for i, messages in enumerate(self._forms):
            try:
                rendered = self._ask([(messages[:n], options) for n, options in cuts])
            except RowError as refusal:
                refusals.append(refusal)
            else:
                self._forms = self._forms[i:]  # a template that refused objects need not be asked again
                return rendered
        raise refusals[0]

    def _ask(self, chats: list[tuple[list[Message], dict[str, Any]]]) -> list[tuple[str, list]]:
        """Render messages with options, each of the chats."""
        calls = [{"conversations": [chat], **self._options, **options} for chat, options in chats]
        return PROCESS.render(self.template, calls, self._name, self._where, date=self._date)


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def token_ids(
    tokenizer: Any, text: str, where: str, literal: bool = False, *, start: bool = False, after: str = ""
) -> list[int]:
    """Return the ids of a text.

    Args:
        where: the row, for messages.
        literal: control tokens in the text are text.
        start: add the tokenizer's special tokens around the text.
        after: the text before it, if any.

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
    return _within(tokenizer, text, list(ids), literal, after=after) if after else list(ids)


def _within(tokenizer: Any, text: str, ids: list[int], literal: bool, *, after: str) -> list[int]:
    """Return the ids of a text within another.

    A tokenizer that adds a space before a text adds none within a text, except after a control token. A
    control token may absorb the white space after it (`rstrip`).

    Args:
        ids: of the text alone.
    """
    first = tokenizer.convert_ids_to_tokens(ids[0]) if ids else ""
    if not first.startswith(SPACES) and not text[0].isspace():
        return ids
    said = after.rstrip()
    controls = () if literal else control_tokens(tokenizer)
    token = next((token for token in controls if said.endswith(token)), "")
    leads = [after[len(said) - len(token) :]] if token else []
    read = functools.partial(tokenizer, add_special_tokens=False, split_special_tokens=literal, verbose=False)
    for lead in leads + ["\n", "a"] * first.startswith(SPACES):  # the first that does not merge with the text
        before, both = (list(read(part)["input_ids"]) for part in (lead, lead + text))
        if both[: len(before)] == before:
            return both[len(before) :]
    return ids


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return every string that the tokenizer turns into a control token."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(sorted({*added, *tokenizer.all_special_tokens} - {""}))


def end_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the tokens that end a response, longest first: the tokenizer's end token, and the tokens of its
    folder's generation_config.json, which `jaxrl_llm.hf.tokenizer` stores as `end_ids`."""
    ids = {tokenizer.eos_token_id, *getattr(tokenizer, "end_ids", ())} - {None}
    tokens = map(str, tokenizer.convert_ids_to_tokens(sorted(ids)))
    return tuple(sorted(tokens, key=len, reverse=True))


def hide(
    contents: Any, controls: tuple[str, ...], where: str, beside: Any = ()
) -> tuple[Any, dict[str, str]]:
    """Return (contents with their control tokens replaced, replacement -> control token).

    The replacements are private-use characters, which pass through any template unchanged.

    Args:
        beside: other values that are rendered with the contents, unchanged.

    Raises:
        RowError: the contents are too long, or leave no private-use character.
    """
    text, more = ("\n".join(strings_of(part)) for part in (contents, list(beside)))
    if len(text) + len(more) > MAX_CHARACTERS:
        raise RowError(
            f"{where}: the chat has {len(text) + len(more):,} characters, more than {MAX_CHARACTERS:,}"
        )
    present = [token for token in controls if token in text]
    if not present:
        return contents, {}
    free = [char for char in map(chr, range(0xE000, 0xF900)) if char not in text and char not in more]
    if len(free) < len(present):
        raise RowError(
            f"{where}: holds control tokens, and all private-use characters that could stand for them"
        )
    names = dict(zip(present, free, strict=False))
    pattern = re.compile("|".join(map(re.escape, sorted(present, key=len, reverse=True))))
    hidden = map_strings(contents, lambda text: pattern.sub(lambda match: names[match.group()], text))
    return hidden, {name: token for token, name in names.items()}


def find_template(tokenizer: Any, config: ChatConfig, tools: Any = None) -> str:
    """Return the Jinja text of the file that the config names, else of the tokenizer.

    Raises:
        UserError: the template is missing, not text, or too large.
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
    """Store the config's template in the tokenizer, so that an exported model has it.

    Raises:
        UserError: the file is missing, not text, or too large.
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
    """Return the text of a file; cached until the file is modified."""
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
    """Return `template_options` as a dict. Raises UserError for a problem of `ChatConfig.problems`."""
    if problem := template_options_problem(config.template_options):
        raise UserError(f"data.chat.template_options {problem}")
    return json.loads(config.template_options or "{}")
