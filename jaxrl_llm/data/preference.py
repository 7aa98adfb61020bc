"""Read rows of pairs, labels, steps, judgements and scores as `Example`s; `read_example` reads any known row.

chosen, rejected [, margin]                       messages, or text beside a prompt (TRL, RL2, OpenRLHF)
prompt, completion, label                         KTO: true or false, 1 or 0
prompt, completions [...], labels [...]           steps of a solution (TRL); labels in [0, 1]
input, label with a mark after each step          steps (Math-Shepherd, OpenRLHF); label a list or +/-

Settings of the source turn them into judgements to imitate, for a language model as reward model
(arXiv 2306.05685; 2408.15240), or put a score at the end of the prompt (conditional SFT like SteerLM's,
arXiv 2310.05344).
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.config import SourceConfig
from jaxrl_llm.data.messages import checked_turns, message_text
from jaxrl_llm.data.prompt_rows import check_beside, check_chats, check_responses, read_prompt_row
from jaxrl_llm.data.rows import (
    PROMPT_KEYS,
    RESPONSE_KEYS,
    Example,
    Message,
    RowError,
    check_row,
    check_text,
    column_names,
    first_column,
    lookup,
    read_chat_text,
    role_of,
)

LABEL_KEYS = ("labels", "label", "values", "value")
SIGNS = {"+": 1.0, "-": 0.0}
NAMED_PAIR = "name both of the pair (--data.train.0.response_key and .rejected_key)"
PYTHON_CHAT = re.compile(r"\s*\[\s*\{\s*'(?:role|content|from|value)'\s*:")
"""A list of messages in a CSV column of pandas."""
NOTHING_TO_JUDGE = "nothing to judge: the row has no response"
JUDGEMENT = "judgement"
"""Data source of judgements; `jaxrl_llm.rewards` scores them by this name."""
POINTWISE_TEMPLATE = (
    "Question:\n{question}\n\nAnswer:\n{answer}\n\nIs the answer right? Reply with Yes or No."
)
PAIRWISE_TEMPLATE = (
    "Question:\n{question}\n\nAnswer A:\n{a}\n\nAnswer B:\n{b}\n\nWhich answer is better? Reply with A or B."
)


def read_example(row: Any, where: str, config: SourceConfig) -> Example:
    """Return a row of any known shape as an `Example`, by the settings of its source.

    Raises:
      RowError: the row has no known shape, lacks a column, or a column has the wrong type.
    """
    check_row(row, where)
    row = _with_chats(row, where, config)
    check_row(row, where)
    if has_pair(row, config):
        example = read_pair(row, where, config)
    elif has_steps(row, config):
        example = read_steps(row, where, config)
    else:
        example = read_prompt_row(row, where, config)
    if config.judge:
        example = judgement(example)
    return _with_score(example, row, config) if config.score_key else example


def _with_chats(row: dict, where: str, config: SourceConfig) -> dict:
    """Parse chats that are stored as JSON text, except a response, which may be JSON text itself."""
    for key in (*PROMPT_KEYS[:-1], config.prompt_key, *_pair_keys(config)):
        if isinstance(row.get(key), str) and PYTHON_CHAT.match(row[key]):
            raise RowError(f"{where}: {key} is a chat as Python prints it: write JSON, json.dumps(chat)")
    chats = lambda keys: {
        key: chat for key in keys if (chat := read_chat_text(row.get(key))) is not row.get(key)
    }
    asked = chats((*PROMPT_KEYS[:-1], config.prompt_key))
    return row | asked | chats(_pair_keys(config)) | (chats(RESPONSE_KEYS) if asked else {})


def has_pair(row: dict, config: SourceConfig) -> bool:
    """Return whether a row, by its columns or its source's settings, has a chosen and a rejected response."""
    chosen, rejected = _pair(row, config)
    return bool(config.rejected_key) or (chosen is not None and rejected is not None)


def read_pair(row: dict, where: str, config: SourceConfig) -> Example:
    """Return the chosen response as an example to imitate, with the rejected one in `rejected`.

    Without a prompt column, the common beginning of both is the prompt: messages, or text up to the last
    white space before they differ.
    """
    chosen, rejected = _pair(row, config)
    if chosen is None or rejected is None:
        keys = " and ".join(_pair_keys(config))
        raise RowError(f"{where}: a pair needs {keys}: the columns are {column_names(row)}")
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise RowError(
            f"{where}: chosen and rejected must both be text or both messages, got "
            f"{type(chosen).__name__} and {type(rejected).__name__}"
        )
    if chosen == rejected:
        raise RowError(f"{where}: chosen and rejected are the same")
    # Move the common beginning to the prompt.
    begins = False  # the prompt is the beginning of text that is learned
    others = {key: value for key, value in row.items() if key not in _pair_keys(config)}
    if not config.rejected_key:
        check_responses(others, chosen, where, f"Remove it, or {NAMED_PAIR}")
    if isinstance(chosen, list) and (shared := _shared_messages(chosen, rejected)):
        _check_prompts(others, chosen, shared, where=where, config=config)
        others |= {"conversations": None, "messages": chosen[:shared]}
        chosen, rejected = chosen[shared:], rejected[shared:]
        config = dataclasses.replace(config, prompt_key=config.prompt_key and "messages")
    elif isinstance(chosen, str) and _prompt(row, config) is None:
        cut = _shared_text(chosen, rejected)
        others["prompt"], chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
        config = dataclasses.replace(config, prompt_key=config.prompt_key and "prompt")
        begins = True
    # Read each side as a row with one response.
    config = dataclasses.replace(config, response_key="completion", rejected_key="")
    sides = []
    for name, response in (("chosen", chosen), ("rejected", rejected)):
        side = read_prompt_row({**others, "completion": response}, where, config)
        if side.response is None and not (side.messages and side.messages[-1]["role"] == "assistant"):
            raise RowError(f"{where}: the {name} response is empty")
        if side.thought:
            raise RowError(f"{where}: the thought of neither response is a column: put it into one of them")
        sides.append(dataclasses.replace(side, parses_controls=begins))
    return dataclasses.replace(sides[0], rejected=sides[1], margin=_margin(row, where))


def _check_prompts(row: dict, chosen: list, shared: int, *, where: str, config: SourceConfig) -> None:
    """Refuse a row whose other columns hold another prompt than the first `shared` messages of chosen."""
    turns = checked_turns(chosen, f"{where}: chosen")
    if not config.prompt_key:
        check_chats(row, [turns[:shared], turns], where)
    elif (named := lookup(row, config.prompt_key)) is not None:
        said = "\n".join(message["content"] for message in turns[:shared])
        check_beside({config.prompt_key: named}, said, where)


def has_steps(row: dict, config: SourceConfig) -> bool:
    """Return whether a row, by its columns or its source's settings, is a solution in steps."""
    return bool(config.step_mark) or (isinstance(row.get("completions"), list) and "labels" in row)


def read_steps(row: dict, where: str, config: SourceConfig) -> Example:
    """Return a solution in steps. With a mark the question belongs to the first step's text."""
    keys = (config.answer_key,) if config.answer_key else LABEL_KEYS
    labels = first_column(row, keys)
    if labels is None:
        raise RowError(f"{where}: steps need one of {', '.join(keys)}: the columns are {column_names(row)}")
    if config.step_mark:
        text = _prompt(row, config)
        check_text(text, f"{where}: the solution")
        *texts, _ = text.split(config.step_mark)
        example = Example(None, "", columns=dict(row), where=where, teacher=config.teacher)
    else:
        texts = row["completions"]
        for i, step in enumerate(texts):
            check_text(step, f"{where}: completions[{i}]")
        texts = [t if t.endswith("\n") or i == len(texts) - 1 else t + "\n" for i, t in enumerate(texts)]
        config = dataclasses.replace(config, answer_key="")
        example = read_prompt_row(row, where, config)
    if isinstance(labels, str):
        labels = _signs(texts, labels, where)
    if not isinstance(labels, list):
        raise RowError(f"{where}: the labels of steps must be a list, got {type(labels).__name__}")
    if not texts or len(labels) != len(texts):
        raise RowError(f"{where}: {len(texts)} steps and {len(labels)} labels: each step needs one")
    steps = zip(texts, [to_label(label, where, soft=True) for label in labels], strict=True)
    return dataclasses.replace(example, steps=tuple(steps))


def to_label(value: Any, where: str, soft: bool = False) -> float:
    """Return 1.0 or 0.0 for true, false, 1, 0, "+", "-"; any number in between if `soft`."""
    value = SIGNS.get(value, value) if isinstance(value, str) else value
    expected = "a number from 0 to 1" if soft else "true or false, 1 or 0"
    is_number = isinstance(value, bool | int | float | np.bool_)
    if not is_number or not (0 <= value <= 1 if soft else value in (0, 1)):
        raise RowError(f"{where}: a label must be {expected}, got {value!r:.100}")
    return float(value)


def label_of(example: Example) -> float:
    """Return 1.0 if the response of a row without a rejected one is desirable, else 0.0."""
    label = example.columns.get("label", example.answer)
    if label is None:
        raise RowError(
            f"{example.where}: no label: a row needs prompt, completion and label, or chosen and rejected"
        )
    return to_label(label, example.where)


def judgement(example: Example) -> Example:
    """Return the question which response of a pair is better, or whether a labelled one is right.

    The verdict is the response to imitate. The better one of a pair is A in half of the rows, by a hash of
    the row's place.
    """
    if example.thought:
        raise RowError(f"{example.where}: the column of the thought would be left out of the judged response")
    prompt, response = split_response(example, NOTHING_TO_JUDGE)
    if example.rejected is None:
        verdict = "Yes" if label_of(example) else "No"
        question = pointwise_prompt(_question(prompt), response)
    else:
        responses = [response, split_response(example.rejected, NOTHING_TO_JUDGE)[1]]
        verdict = "AB"[zlib.crc32(f"{example.where} {responses}".encode(errors="replace")) % 2]
        question = pairwise_prompt(_question(prompt), *(responses if verdict == "A" else responses[::-1]))
    return dataclasses.replace(
        example,
        messages=({"role": "user", "content": question},),
        text=None,
        response=verdict,
        thought="",
        answer=verdict,
        source=JUDGEMENT,  # not the row's source: the answer is now a verdict
        columns={},
        rejected=None,
    )


def pointwise_prompt(question: str, answer: str) -> str:
    """Return the prompt that asks whether an answer is right, Yes or No."""
    return POINTWISE_TEMPLATE.format(question=question, answer=answer)


def pairwise_prompt(question: str, a: str, b: str) -> str:
    """Return the prompt that asks which of two answers is better, A or B."""
    return PAIRWISE_TEMPLATE.format(question=question, a=a, b=b)


def conversation_text(messages: Sequence[Message]) -> str:
    """Return a chat as text: the content of a single message, or several messages with their roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def split_response(example: Example, problem: str) -> tuple[Example, str]:
    """Return (the prompt alone, text of the response): its column, or the last turn of the chat.

    Args:
        problem: message for a row without a response.
    """
    if example.response is not None:
        return dataclasses.replace(example, response=None, rejected=None), example.response
    if example.messages is None or len(example.messages) < 2 or example.messages[-1]["role"] != "assistant":
        raise RowError(f"{example.where}: {problem}")
    *messages, last = example.messages
    prompt = dataclasses.replace(example, messages=tuple(messages), rejected=None)
    return prompt, message_text(last, example.where)


def _question(prompt: Example) -> str:
    if prompt.messages is None:
        return "\n\n".join(filter(None, (prompt.system, prompt.text)))
    return conversation_text(prompt.messages)


def _with_score(example: Example, row: dict, config: SourceConfig) -> Example:
    """Return the example with the row's score at the end of its prompt, and of the rejected response's."""
    score = _number(lookup(row, config.score_key))
    if score is None:
        raise RowError(
            f"{example.where}: score_key {config.score_key!r} must hold a number, got "
            f"{lookup(row, config.score_key)!r:.100}; the columns are {column_names(row)}"
        )
    suffix = score_text(score)
    rejected = example.rejected and with_suffix(example.rejected, suffix)
    return dataclasses.replace(with_suffix(example, suffix), rejected=rejected)


def score_text(score: float) -> str:
    """Return the text of a score at the end of a prompt."""
    return f" <rm_score>: {score:.2f}"


def with_suffix(example: Example, suffix: str) -> Example:
    """Return the example with text added to its prompt: to the last message that is not the assistant's."""
    if example.messages is None:
        return dataclasses.replace(example, text=example.text + suffix)
    messages = list(example.messages)
    last = max(i for i, message in enumerate(messages) if message["role"] != "assistant")
    messages[last] = {**messages[last], "content": messages[last]["content"] + suffix}
    return dataclasses.replace(example, messages=tuple(messages))


def _pair_keys(config: SourceConfig) -> tuple[str, str]:
    return config.response_key if config.rejected_key else "chosen", config.rejected_key or "rejected"


def _pair(row: dict, config: SourceConfig) -> tuple[Any, Any]:
    chosen, rejected = _pair_keys(config)
    return lookup(row, chosen), lookup(row, rejected)


def _prompt(row: dict, config: SourceConfig) -> Any:
    """Return the prompt column, or None."""
    return first_column(row, (config.prompt_key,) if config.prompt_key else PROMPT_KEYS)


def _shared_messages(chosen: list, rejected: list) -> int:
    """Return the number of common leading messages; 0 if they begin with the assistant's."""
    shortest = min(len(chosen), len(rejected))
    count = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    answers = bool(chosen) and isinstance(chosen[0], dict) and role_of(chosen[0]) == "assistant"
    return 0 if answers else max(min(count, shortest - 1), 0)


def _shared_text(chosen: str, rejected: str) -> int:
    """Return the length of the common leading text, without its last word and the spaces before it."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    while same and not chosen[same - 1].isspace():
        same -= 1
    return len(chosen[:same].rstrip(" "))


def _margin(row: dict, where: str) -> float:
    if row.get("margin") is None:
        return 0.0
    margin = _number(row["margin"])
    if margin is None:
        raise RowError(f"{where}: margin must be a number, got {row['margin']!r:.100}")
    return margin


def _number(value: Any) -> float | None:
    """Return the value as a float; None if it is not a number that float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return None
    return float(value)


def _signs(texts: Sequence[str], labelled: str, where: str) -> list[str]:
    """Return the + or - that `labelled` has in place of the mark after each text."""
    signs = []
    for i, text in enumerate(texts):
        if not labelled.startswith(text) or labelled[len(text) : len(text) + 1] not in SIGNS:
            raise RowError(
                f"{where}: the label must repeat the steps, + or - for each mark; step {i} does not"
            )
        signs.append(labelled[len(text)])
        labelled = labelled[len(text) + 1 :]
    return signs


def mismatched(
    samples: Sequence[tuple[np.ndarray, np.ndarray]], other: Sequence[int], max_tokens: int | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the prompt of each sample (ids, mask) with the response of sample number `other`, cut."""
    results = []
    for (ids, mask), index in zip(samples, other, strict=True):
        start, (other_ids, other_mask) = int(mask.argmax()), samples[index]
        begin = int(other_mask.argmax())
        joined = np.concatenate([ids[:start], other_ids[begin:]])[:max_tokens]
        learned = np.concatenate([mask[:start], other_mask[begin:]])[:max_tokens]
        results.append((joined, learned))
    return results
