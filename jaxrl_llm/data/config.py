"""Configs of the data: sources, chat template, mixing, and excluded rows."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_llm.ranges import Range

GENERATED = ("task:", "gym:")
"""Prefixes of the sources that are generated here."""
RESERVED_OPTIONS = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversations", "messages"),
    *("return_assistant_tokens_mask", "tools"),
}
"""Arguments of a chat template that options may not set."""
BadRows = Literal["skip", "fail"]


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
    weight: Annotated[float, Range(0, 1e9, open_low=True)] = 1.0
    """Share of the examples drawn from this source, relative to the other sources."""
    options: str = ""
    """Settings of a task: or gym: source, as a JSON object: '{"digits": 2}'."""
    distinct: bool = False
    """Use each problem of a task: or gym: source once: repeated draws among its `size` are left out."""
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
    """Text after each step of a solution (the placeholder of Math-Shepherd and OpenRLHF); it is removed."""
    judge: bool = False
    """Ask for a judgement of the row's responses instead: which response of a pair is better (A or B), or
    whether a labelled response is right (Yes or No)."""
    score_key: str = ""
    """Column of a score, put at the end of the prompt: " <rm_score>: 5.00" (conditional SFT)."""
    teacher: Annotated[int, Range(0, 1000)] = 0
    """Index of the teacher (--algo.teachers) that scores this source's rows, from 0."""
    name: str = ""
    """Name of the verifier for rows without a data_source; empty: the path."""

    @property
    def is_generated(self) -> bool:
        """True for endless generated rows, which have a separate held-out part."""
        return self.path.startswith(GENERATED)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for rules across fields."""
        if self.options:
            if not self.is_generated:
                yield "options", f"is {self.options!r}: only task: and gym: sources have options."
            elif problem := object_problem(self.options):
                yield "options", problem
        if self.distinct and not self.is_generated:
            yield (
                "distinct",
                "is true: only task: and gym: sources draw problems; rows of files are as they are.",
            )
        if self.input_template and "{}" not in self.input_template:
            yield "input_template", f"is {self.input_template!r}: it must hold {{}}, for the prompt."
        if self.rejected_key and not self.response_key:
            yield "response_key", "is empty: it must name the chosen response if rejected_key is set."
        if self.judge and self.step_mark:
            yield "judge", "is true: it must be false if step_mark is set; steps are not judged."


@dataclass(frozen=True)
class ChatConfig:
    """Chat template and tokenization of examples."""

    render: Literal["auto", "chat", "plain"] = "auto"
    """auto: the column decides: messages and the texts of question, problem and instruction are chats and go
    through the template; the texts of prompt, input and text are read as they are. chat: every text becomes a
    user message. plain: no template, the contents joined by blank lines (base models)."""
    system_prompt: str = ""
    """System message put before chats that have none."""
    chat_template: str = ""
    """File with a Jinja chat template; empty: the tokenizer's own."""
    template_options: str = ""
    """Arguments of the chat template, as a JSON object: '{"enable_thinking": false}'."""
    date: str = ""
    """Date that chat templates write, as 2026-11-27; empty: the day on which the run begins."""
    loss: Literal["all", "last", "chat"] = "all"
    """Supervised training learns all assistant turns, the last, or the whole chat with the users' text, of
    rows that are a chat alone (TRL's default); but no message with weight 0."""
    parse_control_tokens: bool = False
    """True: plain-text prompts are rendered already, so '<|im_start|>' in them is the control token."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for rules across fields."""
        if problem := template_options_problem(self.template_options):
            yield "template_options", problem
        if self.date and not is_date(self.date):
            yield "date", f"is {self.date!r}: it must be a date such as 2026-11-27."
        if self.render == "plain":
            for name in ("chat_template", "template_options"):
                if value := getattr(self, name):
                    yield (
                        name,
                        f"is {value!r}: it must be empty where render is plain, which uses no template.",
                    )


@dataclass(frozen=True)
class DataConfig:
    """Training and evaluation data."""

    path: str = ""
    """Train on this instead: replaces train.0.path and drops the recipe's options, subset and other
    sources."""
    eval_path: str = ""
    """Evaluate on this instead: as `path`, for evaluation (split test)."""
    train: tuple[SourceConfig, ...] = (SourceConfig(),)
    """Training sources, mixed by weight."""
    eval: tuple[SourceConfig, ...] = ()
    """Held-out sources; a generated source uses its held-out part. Empty: the training sources' held-out
    part."""
    holdout: Annotated[float, Range(0, 1e9)] = 0.0
    """Rows of the training files that are held out for evaluation: a number (200), or below 1 a fraction.
    Rows with the same prompt stay together. Replaces `eval`."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Chat template, and the learned part of chats."""
    shuffle: bool = True
    """Shuffle every epoch differently; False: rows in order."""
    overlong: Literal["filter", "cut", "fail"] = "filter"
    """Prompts longer than max_prompt_tokens: draw another, cut, or stop with an error."""
    cut_side: Literal["left", "right"] = "left"
    """Side on which an over-long prompt is truncated."""
    bad_rows: BadRows = "fail"
    """Rows that cannot be read, rendered or tokenized: skip and count, or stop with an error."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for rules across fields."""
        if not self.path and not (self.train and all(source.path for source in self.train)):
            yield (
                "path",
                "is empty: set a file or folder, hub:OWNER/NAME, task:NAME (generated) or gym:NAME, or "
                "data.train in the recipe.",
            )
        if not self.holdout:
            return
        if self.holdout > 1 and self.holdout % 1:
            yield "holdout", f"is {self.holdout:g}: it must be a number of rows, or a fraction below 1."
        if self.eval_path:
            yield "holdout", f"is {self.holdout:g}: it must be 0 if eval_path is set ({self.eval_path})."
        if all(source.is_generated for source in self.sources("train")):
            yield (
                "holdout",
                f"is {self.holdout:g}: it must be 0 for generated data, which has a held-out tenth.",
            )

    def sources(self, split: Literal["train", "eval"]) -> tuple[SourceConfig, ...]:
        """Return the sources of a split, with `path` and `eval_path` applied."""
        train = (self._instead(self.path),) if self.path else self.train
        if split == "train":
            return train
        if self.eval_path:
            return (dataclasses.replace(self._instead(self.eval_path), split="test"),)
        generated = tuple(source for source in train if source.is_generated)
        chosen = generated if self.holdout else self.eval or generated
        return tuple(
            dataclasses.replace(source, split="test") if source.is_generated else source for source in chosen
        )

    def _instead(self, path: str) -> SourceConfig:
        """Return the first training source with another path, without settings of the former data."""
        first = self.train[0] if self.train else SourceConfig()
        subset = first.subset if path == first.path else ""
        return dataclasses.replace(first, path=path, options="", distinct=False, subset=subset)


def is_date(text: str) -> bool:
    """Return whether a text is a date as 2026-11-27."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def template_options_problem(text: str) -> str:
    """Return the problem with `ChatConfig.template_options`, or ""."""
    if problem := object_problem(text):
        return problem
    reserved = ", ".join(sorted(RESERVED_OPTIONS & json.loads(text or "{}").keys()))
    return f"is {text!r}: it may not set {reserved}." if reserved else ""


def object_problem(text: str) -> str:
    """Return why a text is not a JSON object; "" if it is one, or empty."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        return f"is {text!r:.200}, which is not JSON: {error!s:.100}."
    return "" if isinstance(value, dict) else f"is {text!r:.200}: it must be a JSON object."
