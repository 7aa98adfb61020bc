"""Rows of the known shapes as `Example`s.

Accepted shapes (the first of these columns in a row decides):

    conversations                      ShareGPT: list of {from, value}
    messages                           RL2, TRL, OpenAI: list of {role, content}
    prompt (text or messages)          veRL, TRL, RL2, OpenRLHF
    question                           GSM8K
    problem                            MATH, NuminaMath, DeepScaleR
    instruction [+ input]              Alpaca
    input (text or messages)           OpenRLHF
    text                               plain text, all of it learned

The ground truth is the first of `ANSWER_KEYS`, the supervised target the first of `RESPONSE_KEYS`.
`prompt_key`, `answer_key` and `response_key` of the source come first; dots reach into nested columns.
Pairs, steps, judgements and scores: jaxrl_llm/data/preference.py. Imports no jax.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_llm.data.config import SourceConfig
from jaxrl_llm.data.messages import (
    LOSS_KEYS,
    LOSS_LIKE,
    OFF,
    checked_turns,
    has_word,
    read_messages,
    read_turns,
    with_checked_calls,
)
from jaxrl_llm.data.parts import is_said
from jaxrl_llm.data.rows import (
    MEDIA_KEYS,
    PROMPT_KEYS,
    RESPONSE_KEYS,
    THOUGHT_KEY,
    Example,
    Message,
    RowError,
    check_json,
    check_text,
    column_names,
    first_column,
    is_null,
    lookup,
    no_column,
    template_columns,
    without_reference,
)

ANSWER_KEYS = (
    "reward_model.ground_truth",  # veRL
    "ground_truth",
    "answer",
    "label",  # OpenRLHF
    "solution",
    "target",
    "extra_info.answer",  # RL2
    "extra_info.ground_truth",
)
SYSTEM_KEYS = ("system", "system_prompt", "system_message")
BESIDE = re.compile(
    r"choices|options|contexts?|passages?|paragraphs?|articles?|documents?|story|input|knowledge|"
    r"(?:system_)?instructions?|prompt|question|problem|query|conversation|dialog(?:ue)?|text|"
    r"evidences?|facts?|background|premise|hypothesis|tables?|(?:db_)?schema|starter_code|prefix|suffix|"
    r"(?:(?:chat|conversation|dialog(?:ue)?)_)?history|search_results|retrieved_\w+|"
    r"[A-E]|op[a-e]|(?:option|choice)_?[A-Ea-e1-5]"
)
"""Columns that belong to the question of well-known datasets; C-Eval and MedMCQA have one a choice."""
FUNCTIONS = re.compile(r"(?:(?:available|candidate)_)?functions|(?:available|candidate)_tools|tool_list")
MEDIA = re.compile(r"<(?:image|video|audio)>")
NAMED_RESPONSE = "(--data.train.0.response_key COLUMN)"
CHOICE = re.compile(r"[A-Z]")  # the letter of a choice, not its text
SEPARATOR = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)  # of thousands


def read_prompt_row(row: dict[str, Any], where: str, config: SourceConfig) -> Example:
    """Read a row with a prompt, checked by `check_row`, as an `Example`.

    Raises:
      RowError: unknown shape, wrong type, empty prompt, NUL character or lone surrogate.
    """
    present = {key: None if is_null(value) else value for key, value in row.items()}
    key, prompt = _prompt(present, where, config)
    system = _system(present, where)
    # Prompt, ground truth and target.
    messages, text = _chat_or_text(key, prompt, present, where, config=config)
    answer, worked = _answer(present, where, config)
    response, turns = _response(present, where, config)
    if not config.prompt_key:
        asked = messages or ({"role": "user", "content": text},)
        said = ({"role": "assistant", "content": response},) if response else turns
        check_chats({**present, key: None}, [asked, (*asked, *said)], where)
    if messages and messages[-1]["role"] == "assistant" and not config.response_key:
        response, worked = _beside_answer(response, messages[-1]["content"], where), None
    if turns and messages is None:
        raise RowError(f"{where}: the target is a list of messages but the prompt is plain text")
    if messages is not None:
        messages = _with_system(messages, system, where)
    # Earlier turns and a target of several messages belong to the chat.
    asked = [m for m in messages or () if m["role"] != "system"]
    if len(asked) == 1 and (history := _history(present, where)):
        messages, present["history"] = (*messages[:-1], *history, *asked), None
        if response and first_column(present, RESPONSE_KEYS[:-1]) is None:  # LLaMA-Factory learns all turns
            messages, response = (*messages, {"role": "assistant", "content": response}), None
    if turns:
        messages = (*(m | {"weight": 0} if m["role"] == "assistant" else m for m in messages), *turns)
    # Refuse columns that would be left out.
    if messages is not None:
        template_columns(row, where)
    _check_columns(present, where, chat=messages is not None)
    said = text or "\n".join(message["content"] for message in messages or ())
    _check_media(present, said, bool(config.prompt_key), where)
    if not config.prompt_key:
        named = {name: value for name, value in present.items() if BESIDE.fullmatch(name) and name != key}
        check_beside(named, said, where, response=response)
    if text is not None and key == "text" and not config.prompt_key:
        text, response = "", text
        if system.strip() not in response:
            raise RowError(f"{where}: the column system is not part of text, which is learned as a whole")
    # The example, and its source.
    source = "" if present.get("data_source") is None else present["data_source"]
    check_text(source, f"{where}: data_source")
    return Example(
        messages=messages,
        text=text,
        response=response or worked or None,
        answer=answer,
        source=source or config.name or (config.path[4:] if config.path.startswith("hub:") else ""),
        columns={name: value for name, value in row.items() if name != key},
        where=where,
        teacher=config.teacher,
        system=system if text else "",
        thought=_thought(present, response or worked or "", where),
    )


def _thought(row: dict, response: str, where: str) -> str:
    """Return the thought in a column beside a response that lacks it, or "".

    A single word is a setting, such as "on".
    """
    given = {
        value.strip(): key
        for key, value in row.items()
        if THOUGHT_KEY.fullmatch(key) and isinstance(value, str) and len(value.split()) > 1
    }
    given = {thought: key for thought, key in given.items() if response and not is_said(thought, response)}
    if len(given) > 1:
        raise RowError(f"{where}: {' and '.join(given.values())} are two thoughts: keep one of them")
    for thought, key in given.items():
        check_text(thought, f"{where}: {key}")
    return next(iter(given), "")


def _check_columns(row: dict, where: str, *, chat: bool) -> None:
    """Refuse columns that would be left out: learned text, and tools of a chat under an old name."""
    for key in (key for key in row if has_word(key, LOSS_LIKE)):
        items = row[key] if isinstance(row[key], list) else [row[key]]
        values = [0 if str(value).lower() in OFF else value for value in _leaves(items)]
        if items is not row[key] and not (key == "weight" or (key in LOSS_KEYS and 0 in values)):
            continue  # such as a loss that was measured
        if any(isinstance(item, dict) for item in items):
            continue  # such as the examples of an ARC task
        shares = all(isinstance(value, bool | int | float) and 0 <= value <= 1 for value in values)
        if shares and any(value != 1 for value in values):
            advice = "give each message a weight" if chat else "leave out such rows"
            raise RowError(f"{where}: the column {key} would be left out: {advice}")
    functions = [key for key in row if FUNCTIONS.fullmatch(key) and row[key]]
    if chat and functions and not row.get("tools"):
        raise RowError(f"{where}: the column {functions[0]} would be left out: name it tools")


def final_answer(text: str) -> str:
    """Return the text after the last '####' (GSM8K), without thousands separators."""
    return SEPARATOR.sub("", text.rsplit("####", 1)[1].strip())


def _prompt(row: dict, where: str, config: SourceConfig) -> tuple[str, Any]:
    keys = (config.prompt_key,) if config.prompt_key else PROMPT_KEYS
    for key in keys:
        value = lookup(row, key)
        if value is not None:
            return key, value
    if config.prompt_key:
        raise no_column(where, "prompt_key", config.prompt_key, row)
    near = [name for name in map(str, row) if difflib.get_close_matches(name, PROMPT_KEYS, 1, cutoff=0.7)]
    another = f"{near[0]} takes that column" if near else "names another"
    expected = f"one of {', '.join(PROMPT_KEYS)}; --data.train.0.prompt_key {another} in training"
    raise RowError(f"{where}: no prompt: the columns are {column_names(row)}, expected {expected}")


def _chat_or_text(
    key: str, prompt: Any, row: dict, where: str, *, config: SourceConfig
) -> tuple[tuple[Message, ...] | None, str | None]:
    """Return (messages, None) or (None, text)."""
    if isinstance(prompt, list):
        return with_checked_calls(read_messages(prompt, f"{where}: {key}"), f"{where}: {key}"), None
    check_text(prompt, f"{where}: {key}")
    if not prompt.strip():
        raise RowError(f"{where}: {key} is empty")
    if key == "instruction" and (name := "input" if row.get("input") else "context") and row.get(name):
        check_text(row[name], f"{where}: {name}")
        prompt = f"{prompt}\n\n{row[name]}"
    if config.input_template:
        return None, config.input_template.replace("{}", prompt)
    if key in ("question", "problem", "instruction"):
        return ({"role": "user", "content": prompt},), None
    return None, prompt


def _system(row: dict, where: str) -> str:
    """Return the system prompt in a row's columns, or ""."""
    given = {}
    for key in SYSTEM_KEYS:
        if row.get(key):
            check_text(row[key], f"{where}: {key}")
            given[row[key].strip()] = row[key]
    if len(given) > 1:
        raise RowError(f"{where}: {' and '.join(SYSTEM_KEYS)} are two system prompts: keep one of them")
    return next((text for stripped, text in given.items() if stripped), "")


def _with_system(messages: tuple[Message, ...], system: str, where: str) -> tuple[Message, ...]:
    given = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    if not system or given == system.strip():
        return messages
    if given:
        raise RowError(
            f"{where}: the column of the system prompt and the first message are two system prompts: keep one"
        )
    return ({"role": "system", "content": system}, *messages[messages[0]["role"] == "system" :])


def _history(row: dict, where: str) -> list[Message]:
    """Return the earlier turns of an Alpaca row: pairs of question and answer, or messages."""
    history = row.get("history")
    if not history or not isinstance(history, list):
        return []
    if all(isinstance(item, dict) for item in history):
        return list(checked_turns(history, f"{where}: history"))
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError(f"{where}: history must be a list of messages or of pairs of question and answer")
    texts = [text for pair in history for text in pair]
    for i, text in enumerate(texts):
        check_text(text, f"{where}: history[{i // 2}]")
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _check_media(row: dict, prompt: str, named: bool, where: str) -> None:
    """Refuse a row with images, video or audio; if the source names the prompt's column, only a prompt that
    mentions them."""
    for name in MEDIA_KEYS:
        if any(_leaves(row.get(name))) and (not named or MEDIA.search(prompt)):
            raise RowError(f"{where}: the column {name} would be left out, as the model reads text alone")


def check_beside(columns: dict, prompt: str, where: str, *, response: str | None = None) -> None:
    """Refuse a row with columns of its question that are not in the prompt.

    The column text may also be the whole row, rendered.
    """
    words = " ".join(prompt.split())
    rendered = " ".join(str(columns.get("text")).split())
    lines = [" ".join(line.split()) for line in f"{prompt}\n{response or ''}".splitlines()]
    whole = {"text"} if all(line in rendered for line in lines) else set()
    for name in (name for name in columns if name not in whole):
        texts = [" ".join(str(leaf).split()) for leaf in _leaves(columns[name])]
        texts = [text for text in texts if not CHOICE.fullmatch(text)]
        least = 2 if name in ("choices", "options") else 1
        if len(texts) >= least and not all(
            re.search(rf"(?<!\w){re.escape(text)}(?!\w)", words) for text in texts
        ):
            raise RowError(
                f"{where}: the column {name} is not in the prompt, so the model would not read it. Put its "
                "text into the prompt, or name the column that is all of the prompt "
                "(--data.train.0.prompt_key COLUMN)"
            )


def check_chats(row: dict, chats: Sequence[Sequence[Message]], where: str) -> None:
    """Refuse a row with a second chat that is neither one of `chats`, nor the beginning up to its answer."""
    for name in ("conversations", "messages"):
        if not isinstance(row.get(name), list) or not row[name]:
            continue
        given = read_turns(row[name], f"{where}: {name}")
        known = [plain for chat in chats for plain in (chat, without_reference(chat))]
        if not any(_same_chat(given, chat) for chat in known):
            raise RowError(
                f"{where}: the column {name} is another chat than the one that is read, and would be left "
                "out. Remove one of them, or name the column that counts (--data.train.0.prompt_key COLUMN)"
            )


def _same_chat(chat: Sequence[Message], other: Sequence[Message]) -> bool:
    """Return whether two chats say the same; a system prompt of the second one may be a column's."""
    plain = [
        [{k: v.strip() if k == "content" else v for k, v in m.items() if v or k == "content"} for m in each]
        for each in (chat, other)
    ]
    has_system = bool(other) and other[0]["role"] == "system"
    return plain[0] == plain[1] or (has_system and plain[0] == plain[1][1:])


def check_responses(row: dict, response: Any, where: str, fix: str) -> None:
    """Refuse a row with a second response that differs from the one that is learned.

    Args:
        response: text or messages, of which the last one's text counts.
        fix: ends the message.
    """
    for key in RESPONSE_KEYS:
        if not is_null(row.get(key)) and _last_text(row[key]) != _last_text(response):
            raise RowError(f"{where}: the column {key} is another response, and would be left out. {fix}")


def _last_text(response: Any) -> Any:
    last = response[-1] if isinstance(response, list) and response else response
    text = last.get("content", last.get("value")) if isinstance(last, dict) else last
    return text.strip() if isinstance(text, str) else text


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values in lists and objects at any depth, but no null, role or label of a choice (ARC)."""
    if isinstance(value, dict):
        value = [inner for key, inner in value.items() if key not in ("label", "role", "from")]
    if isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None and value != "":
        yield value


def _answer(row: dict, where: str, config: SourceConfig) -> tuple[Any, str | None]:
    """Return (ground truth, worked solution if the same column has one)."""
    answer = first_column(row, (config.answer_key,) if config.answer_key else ANSWER_KEYS)
    if answer is None and config.answer_key:
        raise no_column(where, "answer_key", config.answer_key, row)
    if isinstance(answer, bytes):  # a binary column
        answer = answer.decode(errors="surrogateescape")
    worked = row.get("solution") if isinstance(row.get("solution"), str) else None
    if worked is not None:
        check_text(worked, f"{where}: solution")
    if isinstance(answer, str | list | dict):
        check_json(answer, f"{where}: answer")
    if isinstance(answer, str) and "####" in answer:
        return final_answer(answer), answer
    return answer, worked


def _response(row: dict, where: str, config: SourceConfig) -> tuple[str | None, tuple[Message, ...]]:
    """Return (supervised target, ()), or (None, messages) if the target is several messages."""
    keys = (config.response_key,) if config.response_key else RESPONSE_KEYS
    for key in keys:
        value = lookup(row, key)
        if value is not None and not config.response_key:
            check_responses(row, value, where, f"Keep one, or name it {NAMED_RESPONSE}")
        if isinstance(value, list):
            turns = checked_turns(value, f"{where}: {key}")
            single = len(turns) == 1 and turns[0].keys() == {"role", "content"}
            single = single and turns[0]["role"] == "assistant"
            return (turns[0]["content"], ()) if single else (None, turns)
        if value is not None:
            check_text(value, f"{where}: {key}")
            return value, ()
    if config.response_key:
        raise no_column(where, "response_key", config.response_key, row)
    return None, ()


def _beside_answer(response: str | None, last: str, where: str) -> None:
    """Accept a response only if it repeats the last turn of a whole chat; else raise RowError."""
    if response and response.strip() != last.strip():
        raise RowError(
            f"{where}: the chat ends with an answer, and a column of {', '.join(RESPONSE_KEYS)} has another: "
            f"remove one of them, or name the one that follows the chat {NAMED_RESPONSE}"
        )
