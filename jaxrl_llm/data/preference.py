"""Pairs, labels and steps: from rows to examples, from examples to tokens. No jax here.

chosen, rejected [, margin]                       messages, or text beside a prompt (TRL, RL2, OpenRLHF)
prompt, completion, label                         KTO: true or false, 1 or 0
prompt, completions [...], labels [...]           steps of a solution (TRL); labels in [0, 1]
input, label with a mark after each step          steps (Math-Shepherd, OpenRLHF); label a list or +/-
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.rows import (
    PROMPT_KEYS,
    SHAREGPT_ROLES,
    Example,
    SourceConfig,
    check_text,
    kind,
    lookup,
    names,
    normalise,
)
from jaxrl_llm.data.template import ChatConfig
from jaxrl_llm.errors import UserError

Encoded = tuple[np.ndarray, np.ndarray]  # ids int32 [.], mask int8 [.] with 1 = learned
LABEL_KEYS = ("labels", "label", "values", "value")
SIGNS = {"+": 1.0, "-": 0.0}


def has_pair(row: dict, config: SourceConfig) -> bool:
    """Whether a row holds a chosen and a rejected response, or is said to."""
    chosen, rejected = _pair(row, config)
    return bool(config.rejected_key) or (chosen is not None and rejected is not None)


def read_pair(row: dict, where: str, config: SourceConfig) -> Example:
    """The chosen response as an example to imitate, with the rejected one in `rejected`.

    What both have in common at their beginning is the prompt where there is no other: messages, or text up
    to the last white space before they differ.
    """
    chosen, rejected = _pair(row, config)
    if chosen is None or rejected is None:
        wanted = " and ".join(_pair_keys(config))
        raise UserError(f"{where}: a pair needs {wanted}: the columns are {names(row)}")
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise UserError(
            f"{where}: chosen and rejected must both be text or both messages, got {kind(chosen)} and "
            f"{kind(rejected)}"
        )
    if chosen == rejected:
        raise UserError(f"{where}: chosen and rejected are the same")
    others = {key: value for key, value in row.items() if key not in _pair_keys(config)}
    if isinstance(chosen, list) and (shared := _shared_messages(chosen, rejected)):
        others = {**{k: v for k, v in others.items() if k not in PROMPT_KEYS}, "messages": chosen[:shared]}
        chosen, rejected = chosen[shared:], rejected[shared:]
        config = dataclasses.replace(config, prompt_key="messages")
    elif isinstance(chosen, str) and _prompt(row, config) is None:
        cut = _shared_text(chosen, rejected)
        others["prompt"], chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
        config = dataclasses.replace(config, prompt_key="prompt")
    config = dataclasses.replace(config, response_key="completion", rejected_key="")
    sides = []
    for name, response in (("chosen", chosen), ("rejected", rejected)):
        side = normalise({**others, "completion": response}, where, config)
        if side.response is None and not (side.messages and side.messages[-1]["role"] == "assistant"):
            raise UserError(f"{where}: the {name} response is empty")
        sides.append(side)
    return dataclasses.replace(sides[0], rejected=sides[1], margin=_margin(row, where))


def has_steps(row: dict, config: SourceConfig) -> bool:
    """Whether a row is a solution in steps, or is said to be."""
    return bool(config.step_mark) or (isinstance(row.get("completions"), list) and "labels" in row)


def read_steps(row: dict, where: str, config: SourceConfig) -> Example:
    """A solution in steps. With a mark the question belongs to the first step's text."""
    keys = (config.answer_key,) if config.answer_key else LABEL_KEYS
    labels = next((found for key in keys if (found := lookup(row, key)) is not None), None)
    if labels is None:
        raise UserError(f"{where}: steps need one of {', '.join(keys)}: the columns are {names(row)}")
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
        example = normalise(row, where, config)
    if isinstance(labels, str):
        labels = _signs(texts, labels, where)
    if not texts or len(labels) != len(texts):
        raise UserError(f"{where}: {len(texts)} steps and {len(labels)} labels: each step needs one")
    steps = zip(texts, [to_label(label, where, soft=True) for label in labels], strict=True)
    return dataclasses.replace(example, steps=tuple(steps))


def to_label(value: Any, where: str, soft: bool = False) -> float:
    """1.0 or 0.0 of true, false, 1, 0, "+", "-"; any number between where `soft`."""
    value = SIGNS.get(value, value) if isinstance(value, str) else value
    wanted = "a number from 0 to 1" if soft else "true or false, 1 or 0"
    if not isinstance(value, bool | int | float | np.bool_) or not 0 <= value <= 1:
        raise UserError(f"{where}: a label must be {wanted}, got {value!r}")
    if not soft and value not in (0, 1):
        raise UserError(f"{where}: a label must be {wanted}, got {value!r}")
    return float(value)


def label_of(example: Example) -> float:
    """Whether the response of a row without a rejected one is desirable."""
    label = example.columns.get("label", example.answer)
    if label is None:
        raise UserError(
            f"{example.where}: no label: a row needs prompt, completion and label, or chosen and rejected"
        )
    return to_label(label, example.where)


def mismatched(samples: Sequence[Encoded], other: Sequence[int], max_tokens: int | None) -> list[Encoded]:
    """The prompt of each sample with the response of sample number `other`, cut at `max_tokens`."""
    made = []
    for (ids, mask), index in zip(samples, other, strict=True):
        start, (other_ids, other_mask) = int(mask.argmax()), samples[index]
        begin = int(other_mask.argmax())
        joined = np.concatenate([ids[:start], other_ids[begin:]])[:max_tokens]
        learned = np.concatenate([mask[:start], other_mask[begin:]])[:max_tokens]
        made.append((joined, learned))
    return made


def encode_steps(tokenizer: Any, example: Example, config: ChatConfig) -> tuple[np.ndarray, ...]:
    """(ids, mask, labels float32), each [.]: mask 1 and the step's label at the token that follows a step.

    The prediction of that token is made by the state that has read the whole step; the end token follows
    the last.
    """
    if not example.steps:
        raise UserError(f"{example.where}: no steps: a row needs prompt, completions and labels")
    has_prompt = example.messages is not None or example.text
    ids = encode_prompt(tokenizer, example, config).tolist() if has_prompt else []
    ends = []
    for text, _ in example.steps:
        ids += tokenizer(text, add_special_tokens=False, verbose=False, split_special_tokens=True)[
            "input_ids"
        ]
        ends.append(len(ids))
    mask, labels = np.zeros(len(ids) + 1, np.int8), np.zeros(len(ids) + 1, np.float32)
    mask[ends], labels[ends] = 1, [label for _, label in example.steps]
    return np.asarray([*ids, tokenizer.eos_token_id], np.int32), mask, labels


def _pair_keys(config: SourceConfig) -> tuple[str, str]:
    return config.response_key if config.rejected_key else "chosen", config.rejected_key or "rejected"


def _pair(row: dict, config: SourceConfig) -> tuple[Any, Any]:
    chosen, rejected = _pair_keys(config)
    return lookup(row, chosen), lookup(row, rejected)


def _prompt(row: dict, config: SourceConfig) -> Any:
    """The prompt column, or None."""
    keys = (config.prompt_key,) if config.prompt_key else PROMPT_KEYS
    return next((found for key in keys if (found := lookup(row, key)) is not None), None)


def _shared_messages(chosen: list, rejected: list) -> int:
    """Messages that both begin with, where these are the prompt and not the beginning of an answer."""
    shortest = min(len(chosen), len(rejected))
    count = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    first = chosen[0] if chosen and isinstance(chosen[0], dict) else {}
    answers = SHAREGPT_ROLES.get(first.get("role") or first.get("from")) == "assistant"
    return 0 if answers else max(min(count, shortest - 1), 0)


def _shared_text(chosen: str, rejected: str) -> int:
    """Characters of the text that both begin with, without its last word and the white space before that."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    while same and not chosen[same - 1].isspace():
        same -= 1
    return len(chosen[:same].rstrip())


def _margin(row: dict, where: str) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise UserError(f"{where}: margin must be a number, got {margin!r}")
    return float(margin)


def _signs(texts: Sequence[str], labelled: str, where: str) -> list[str]:
    """The + or - that stands in `labelled` where the mark stood after each text."""
    signs = []
    for i, text in enumerate(texts):
        if not labelled.startswith(text) or labelled[len(text) : len(text) + 1] not in SIGNS:
            raise UserError(
                f"{where}: the label must repeat the steps, + or - for each mark; step {i} does not"
            )
        signs.append(labelled[len(text)])
        labelled = labelled[len(text) + 1 :]
    return signs
