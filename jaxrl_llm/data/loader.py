"""Batches as a pure function of (seed, step): a resumed run needs no cursor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxrl_llm.data.chat import ChatConfig
from jaxrl_llm.data.rows import Example, SourceConfig
from jaxrl_llm.data.sources import BadRows


@dataclass(frozen=True)
class DataConfig:
    """What to train and evaluate on."""

    path: str = ""
    """Train on this instead: takes the place of train.0.path, without its options and other sources."""
    eval_path: str = ""
    """Evaluate on this instead: as `path`, for evaluation (split test)."""
    train: tuple[SourceConfig, ...] = (SourceConfig(),)
    """Training sources, mixed by weight."""
    eval: tuple[SourceConfig, ...] = ()
    """Held-out sources. None given: the held-out part of generated training sources."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Chat template and what is learned."""
    shuffle: bool = True
    """Shuffle every epoch anew; False: rows in order."""
    overlong: Literal["filter", "cut", "fail"] = "filter"
    """Prompts longer than max_prompt_tokens: draw another, cut, or stop with an error."""
    cut_side: Literal["left", "right"] = "left"
    """Which end of an over-long prompt is cut off."""
    bad_rows: BadRows = "fail"
    """Rows that cannot be read: skip and count, or stop with an error that lists them."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch."""

    example: Example
    ids: np.ndarray  # int32 [.]
    index: int  # place in the stream: step * size + row


class Loader:
    """Random-access batches of one split."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        seed: int,
        max_prompt_tokens: int,
        split: Literal["train", "eval"] = "train",
        max_tokens: int | None = None,  # longest supervised example
    ):
        raise NotImplementedError

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The prompts of a step."""
        raise NotImplementedError

    def supervised_batch(self, step: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, mask) of each supervised example of a step."""
        raise NotImplementedError

    def eval_set(self, limit: int) -> list[Prompt]:
        """At most `limit` prompts, spread evenly over the sources; the same for every seed."""
        raise NotImplementedError

    def stats(self) -> dict[str, int]:
        """Counts: rows, skipped (bad), overlong (met so far)."""
        raise NotImplementedError
