"""One row of any known shape -> one `Example`. No jax here: reward workers import this module.

Accepted as they are (the first key of a row that is present decides):

    conversations                      ShareGPT: list of {from, value}
    messages                           RL2, TRL, OpenAI: list of {role, content}
    prompt (text or messages)          veRL, TRL, RL2, OpenRLHF
    question                           GSM8K
    problem                            MATH, NuminaMath, DeepScaleR
    instruction [+ input]              Alpaca
    input (text or messages)           OpenRLHF
    text                               plain text, all of it learned

The ground truth is the first of `ANSWER_KEYS`, the supervised target the first of `RESPONSE_KEYS`. Pairs,
steps, judgements and scores are read by jaxrl_llm/data/read.py, which ends here.
`prompt_key`, `answer_key` and `response_key` of the source come first; dots reach into nested columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.errors import UserError

PROMPT_KEYS = ("conversations", "messages", "prompt", "question", "problem", "instruction", "input", "text")
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
RESPONSE_KEYS = ("completion", "response", "output")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
SURROGATE = re.compile(r"[\ud800-\udfff]")
Message = dict[str, Any]


@dataclass(frozen=True)
class SourceConfig:
    """One source of examples, and how to read its rows."""

    path: str = ""
    """A file (.json .jsonl .csv .parquet .arrow; .gz of the text ones), a folder of them, a saved Hugging
    Face dataset, or hub:OWNER/NAME, task:NAME (generated here), gym:NAME (reasoning-gym)."""
    split: str = "train"
    """Split of a folder, hub dataset or generated task (there anything but train is the held-out part)."""
    subset: str = ""
    """Configuration of a hub dataset (gsm8k: main), or sub-folder of a folder."""
    weight: float = 1.0
    """Share of the examples drawn from this source, relative to the other sources."""
    options: str = ""
    """Settings of a task: or gym: source, as a JSON object: '{"digits": 2}'."""
    prompt_key: str = ""
    """Column that holds the prompt (text or messages); empty: the usual names. Dots reach into columns."""
    answer_key: str = ""
    """Column that holds the ground truth; empty: the usual names."""
    response_key: str = ""
    """Column that holds the supervised target, or the chosen response; empty: the usual names."""
    rejected_key: str = ""
    """Column that holds the rejected response; empty: rejected."""
    input_template: str = ""
    """Wraps a prompt that is plain text: 'Question: {}\\nAnswer:'. Only {} is replaced."""
    step_mark: str = ""
    """Text after each step of a solution (the placeholder of Math-Shepherd and OpenRLHF); it is taken out."""
    judge: bool = False
    """Ask for a judgement of the row's responses instead: which of a pair is better (A or B), whether a
    labelled one is right (Yes or No)."""
    score_key: str = ""
    """Column of a score that is told at the end of the prompt: " <rm_score>: 5.00" (conditional SFT)."""
    score_mean: float = 0.0
    """Subtracted from the score first."""
    score_std: float = 1.0
    """Divides it then."""
    teacher: int = 0
    """Which of the teachers (--algo.teachers) speaks of this source's rows, counted from 0."""
    name: str = ""
    """Names the rows' verifier where a row has no data_source; empty: the path."""


@dataclass(frozen=True)
class Example:
    """One problem. Exactly one of `messages` and `text` is not None."""

    messages: tuple[Message, ...] | None  # a chat; for supervised training it may hold assistant turns
    text: str | None  # a prompt in plain text; "" where all of `response` is learned text
    response: str | None = None  # supervised target
    answer: Any = None  # ground truth, what the verifier compares
    source: str = ""  # data_source or name of the source: picks the verifier
    columns: dict[str, Any] = field(default_factory=dict)  # the other columns, for reward functions
    where: str = ""  # "file.jsonl:12"
    rejected: Example | None = None  # the same prompt with a worse response than this one's
    margin: float = 0.0  # by how much it is worse
    steps: tuple[tuple[str, float], ...] = ()  # of a worked solution: text, and whether it is right (0 to 1)
    teacher: int = 0  # which of the teachers speaks of it
    turns: tuple[Message, ...] = ()  # supervised target of several turns, in place of `response`

    def __post_init__(self):
        assert (self.messages is None) != (self.text is None), self.where


def normalise(row: Any, where: str, config: SourceConfig) -> Example:
    """One row of a known shape as an `Example`.

    Raises:
      ValueError: unknown shape, wrong type, empty prompt, NUL byte or lone surrogate; says where and why.
    """
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be an object with named columns, got {kind(row)}")
    present = {key: value for key, value in row.items() if value is not None}
    key, prompt = _prompt(present, where, config)
    messages, text = _chat_or_text(key, prompt, present, where, config)
    answer, worked = _answer(present, where, config)
    response, turns = _response(present, where, config)
    if turns and messages is None:
        raise UserError(f"{where}: the target is a list of messages but the prompt is plain text")
    if turns:
        messages = (*messages, *turns)
    if text is not None and key == "text" and not config.prompt_key:
        text, response = "", text
    return Example(
        messages=messages,
        text=text,
        response=response or worked or None,
        answer=answer,
        source=str(present.get("data_source") or config.name or _source_name(config.path)),
        columns={name: value for name, value in row.items() if name != key},
        where=where,
        teacher=config.teacher,
    )


def lookup(row: dict, key: str) -> Any:
    """Column `key`, where dots reach into nested columns; None where there is none."""
    if key in row:
        return row[key]
    head, _, rest = key.partition(".")
    inner = row.get(head) if rest else None
    return lookup(inner, rest) if isinstance(inner, dict) else None


def final_answer(text: str) -> str:
    """What follows the last '####' (GSM8K), without thousands separators."""
    return text.rsplit("####", 1)[1].strip().replace(",", "")


def _prompt(row: dict, where: str, config: SourceConfig) -> tuple[str, Any]:
    keys = (config.prompt_key,) if config.prompt_key else PROMPT_KEYS
    for key in keys:
        value = lookup(row, key)
        if value is not None:
            return key, value
    wanted = f"prompt_key {config.prompt_key!r}" if config.prompt_key else f"one of {', '.join(PROMPT_KEYS)}"
    raise UserError(f"{where}: no prompt: the columns are {names(row)}, wanted {wanted}")


def _chat_or_text(
    key: str, prompt: Any, row: dict, where: str, config: SourceConfig
) -> tuple[tuple[Message, ...] | None, str | None]:
    """(messages, None) or (None, text)."""
    if isinstance(prompt, list):
        messages = _messages(prompt, f"{where}: {key}")
        if key == "conversations" and isinstance(row.get("system"), str) and row["system"]:
            messages = ({"role": "system", "content": row["system"]}, *messages)
        return messages, None
    check_text(prompt, f"{where}: {key}")
    if not prompt.strip():
        raise UserError(f"{where}: {key} is empty")
    if key == "instruction" and row.get("input"):
        check_text(row["input"], f"{where}: input")
        prompt = f"{prompt}\n\n{row['input']}"
    if config.input_template:
        return None, config.input_template.replace("{}", prompt)
    if key in ("question", "problem", "instruction"):
        return ({"role": "user", "content": prompt},), None
    return None, prompt


def _answer(row: dict, where: str, config: SourceConfig) -> tuple[Any, str | None]:
    """(ground truth, worked solution where the same column holds one)."""
    keys = (config.answer_key,) if config.answer_key else ANSWER_KEYS
    found = [lookup(row, key) for key in keys]
    answer = next((value for value in found if value is not None), None)
    if answer is None and config.answer_key:
        raise UserError(f"{where}: no answer_key {config.answer_key!r}: the columns are {names(row)}")
    worked = row.get("solution") if isinstance(row.get("solution"), str) else None
    if isinstance(answer, str):
        check_text(answer, f"{where}: answer")
        if "####" in answer:
            return final_answer(answer), answer
    return answer, worked


def _response(row: dict, where: str, config: SourceConfig) -> tuple[str | None, tuple[Message, ...]]:
    """(supervised target, ()) or, where the target is several messages, (None, messages)."""
    keys = (config.response_key,) if config.response_key else RESPONSE_KEYS
    for key in keys:
        value = lookup(row, key)
        if isinstance(value, list):
            turns = _turns(value, f"{where}: {key}")
            single = len(turns) == 1 and turns[0]["role"] == "assistant"
            return (turns[0]["content"], ()) if single else (None, turns)
        if value is not None:
            check_text(value, f"{where}: {key}")
            return value, ()
    if config.response_key:
        raise UserError(f"{where}: no response_key {config.response_key!r}: the columns are {names(row)}")
    return None, ()


def _turns(value: list, where: str) -> tuple[Message, ...]:
    return tuple(_message(item, f"{where}[{i}]") for i, item in enumerate(value))


def _messages(value: list, where: str) -> tuple[Message, ...]:
    """A chat in which somebody besides the policy speaks."""
    messages = _turns(value, where)
    if not any(m["content"].strip() for m in messages if m["role"] != "assistant"):
        raise UserError(f"{where} is empty: no message of a user, the system or a tool has any text")
    return messages


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise UserError(f"{where} must be an object with role and content, got {kind(item)}")
    item = {key: value for key, value in item.items() if value is not None}
    role = item.pop("role", None) or SHAREGPT_ROLES.get(item.get("from"))
    if not isinstance(role, str):
        raise UserError(f"{where} has no known role: its keys are {sorted(item)}, from={item.get('from')!r}")
    content = item.pop("content", item.get("value", "" if item.get("tool_calls") else None))
    if isinstance(content, list):
        content = _join_parts(content, where)
    check_text(content, f"{where}.content")
    others = {key: value for key, value in item.items() if key not in ("from", "value")}
    return {"role": role, "content": content, **others}


def _join_parts(parts: list, where: str) -> str:
    """Text of a message whose content is a list of parts."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}.content has parts that are not text")
    return "".join(texts)


def check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"{where} must be text, got {kind(value)}")
    if "\0" in value:
        raise UserError(f"{where} holds a NUL character")
    if SURROGATE.search(value):
        raise UserError(f"{where} holds a lone surrogate or bytes that are not UTF-8")


def names(row: dict) -> str:
    return ", ".join(sorted(map(str, row)))


def kind(value: Any) -> str:
    return type(value).__name__


def _source_name(path: str) -> str:
    if path.startswith(("task:", "gym:")):
        return path
    return path.removeprefix("hub:") if path.startswith("hub:") else ""
