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

The ground truth is the first of `ANSWER_KEYS`, the supervised target the first of `RESPONSE_KEYS`.
`prompt_key`, `answer_key` and `response_key` of the source come first; dots reach into nested columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    """Column that holds the supervised target; empty: the usual names."""
    input_template: str = ""
    """Wraps a prompt that is plain text: 'Question: {}\\nAnswer:'. Only {} is replaced."""
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

    def __post_init__(self):
        assert (self.messages is None) != (self.text is None), self.where
