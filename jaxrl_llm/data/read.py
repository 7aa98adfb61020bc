"""One row of any shape -> one `Example`, with all that a source may ask of it.

prompt, or an answer to imitate              rows.normalise
chosen and rejected responses, steps         preference.py
a judgement of the responses instead         judge.py
a score told in the prompt                   here (SteerLM-like conditional SFT, arXiv 2310.05344)
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxrl_llm.data import judge, preference
from jaxrl_llm.data.rows import Example, SourceConfig, kind, lookup, names, normalise
from jaxrl_llm.errors import UserError


def read(row: Any, where: str, config: SourceConfig) -> Example:
    """A row as this source wants it read.

    Raises:
      ValueError: the row is none of the known shapes, or lacks what is asked of it; says where and why.
    """
    if not isinstance(row, dict):
        example = normalise(row, where, config)
    elif preference.has_pair(row, config):
        example = preference.read_pair(row, where, config)
    elif preference.has_steps(row, config):
        example = preference.read_steps(row, where, config)
    else:
        example = normalise(row, where, config)
    if config.judge:
        example = judge.judgement(example)
    return _tell_score(example, row, config) if config.score_key else example


def _tell_score(example: Example, row: dict, config: SourceConfig) -> Example:
    """The row's score at the end of the prompt, and of the rejected response's."""
    score = lookup(row, config.score_key)
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise UserError(
            f"{example.where}: score_key {config.score_key!r} must hold a number, got {kind(score)} "
            f"{score!r}; the columns are {names(row)}"
        )
    told = f" <rm_score>: {(score - config.score_mean) / config.score_std:.2f}"
    if example.messages is None:
        return dataclasses.replace(example, text=example.text + told)
    asked = [i for i, message in enumerate(example.messages) if message["role"] != "assistant"][-1]
    messages = list(example.messages)
    messages[asked] = {**messages[asked], "content": messages[asked]["content"] + told}
    return dataclasses.replace(example, messages=tuple(messages))
