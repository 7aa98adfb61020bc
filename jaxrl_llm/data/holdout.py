"""Held-out split of the user's files: `--data.holdout 200` rows, or a fraction of them.

Rows with the same prompt are on the same side of the split. Prompts are held out in the order of their seeded
hashes, so the order of the rows and their distribution over files do not matter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.data.config import DataConfig, SourceConfig
from jaxrl_llm.data.rows import Example, without_reference
from jaxrl_llm.data.sources import ExampleSource, OpenSource, open_sources
from jaxrl_llm.errors import UserError

MAX_ROWS_COMPARED = 100_000
"""Rows of each source that `shared_prompts` reads: about 4 seconds."""


@dataclass(frozen=True)
class SourcePart:
    """Some rows of a source, in order."""

    source: ExampleSource
    rows: np.ndarray
    num_bad: int = 0

    @property
    def unanswered(self) -> list[int]:
        """Indices of rows without an answer."""
        return np.flatnonzero(np.isin(self.rows, self.source.unanswered)).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        return self.source[int(self.rows[index])]


@dataclass(frozen=True)
class HeldOutSplit:
    """Training and held-out part of the training sources."""

    seed: int
    prompts: np.ndarray  # uint64, sorted: `prompt_hash` of the held-out prompts
    train: list[OpenSource]
    eval: list[OpenSource]

    def without_held_out(self, sources: Sequence[OpenSource]) -> list[OpenSource]:
        """Return other sources, such as the SFT warm-up's, without rows of held-out prompts.

        Raises:
            UserError: a source has no row left.
        """
        return [self._training_part(*opened, _hashes(*opened, self.seed)) for opened in sources]

    def _training_part(self, config: SourceConfig, source: ExampleSource, hashes: np.ndarray) -> OpenSource:
        if config.is_generated:
            return config, source
        rows = np.flatnonzero(~np.isin(hashes, self.prompts))
        if not len(rows):
            raise UserError(f"--data.holdout: every row of {config.path} is held out. Set it lower.")
        return config, SourcePart(source, rows, source.num_bad)


def split_sources(config: DataConfig, seed: int, recorded: Sequence[int] | None = None) -> HeldOutSplit:
    """Open the training sources and hold out `config.holdout` of the rows of files.

    Generated sources have a separate held-out part.

    Args:
        recorded: hashes of the prompts that the run held out before; None = choose prompts.

    Raises:
        UserError: as `open_sources`; or too few rows, or too few different prompts.
    """
    opened = open_sources(config, "train", seed)
    hashes = [_hashes(*own, seed) for own in opened]
    if recorded is None:
        prompts = choose_prompts(np.concatenate(hashes), config.holdout)
    else:
        prompts = np.array(sorted(recorded), np.uint64)
    split = HeldOutSplit(seed, prompts, [], [])
    for (settings, source), own in zip(opened, hashes, strict=True):
        split.train.append(split._training_part(settings, source, own))
        rows = np.flatnonzero(np.isin(own, prompts))
        if len(rows):
            split.eval.append((settings, SourcePart(source, rows)))
    split.eval.extend(open_sources(config, "eval", seed))
    return split


def choose_prompts(hashes: np.ndarray, holdout: float) -> np.ndarray:
    """Return the sorted hashes of the prompts to hold out: the lowest hashes, with all rows of each prompt.

    A prompt whose rows would exceed the number is skipped, so the number is never exceeded, and reached
    exactly if enough prompts have a single row.

    Args:
        hashes: uint64, `prompt_hash` of each row.
        holdout: a number of rows, or a fraction of them below 1.

    Raises:
        UserError: no row would be held out, or none left to train on.
    """
    rows = len(hashes)
    prompts, sizes = np.unique(hashes, return_counts=True)
    # The number of rows must leave some to train on.
    if len(prompts) == 1:
        raise UserError(
            f"--data.holdout {holdout:g}: the files have only one prompt (rows: {rows:,}), and rows with the "
            "same prompt stay together. Set --data.holdout 0 and --data.eval_path FILE, of other prompts."
        )
    count = round(holdout * rows) if holdout < 1 else int(holdout)
    if count >= rows:
        raise UserError(
            f"--data.holdout {holdout:g}: the files have {rows:,} rows, of which none would be left to train "
            "on. Set it lower; 0.1 holds out a tenth."
        )
    # Take prompts in the order of their hashes while their rows fit.
    chosen, total = [], 0
    for prompt, size in zip(prompts, sizes, strict=True):
        if total + size <= count:
            chosen.append(prompt)
            total += size
        if total == count:
            break
    if not chosen:
        raise UserError(
            f"--data.holdout {holdout:g}: of {rows:,} rows no prompt can be held out; rows with the same "
            f"prompt stay together, and the rarest prompt has {sizes.min()}. Set --data.holdout "
            f"{sizes.min()} or more."
        )
    return np.array(chosen, np.uint64)


def prompt_hash(example: Example, seed: int) -> int:
    """Return 64 bits of BLAKE2 of a row's prompt: the chat up to its last answer, or the text.

    Rows without a prompt (plain text to learn, marked steps) are identified by all of their text.
    """
    if example.messages is None:
        prompt = example.text.strip() or [example.response, [text for text, _ in example.steps]]
    else:
        messages = without_reference(example.messages) or example.messages[:1]
        prompt = [[message["role"], message["content"].strip()] for message in messages]
    text = json.dumps([seed, prompt])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def shared_prompts(train: Sequence[OpenSource], held_out: Sequence[OpenSource]) -> str:
    """Return a line with the number of held-out rows whose prompt is also trained on; "" if none. Of each
    file, at most `MAX_ROWS_COMPARED` rows are compared, evenly spread.
    """
    none = np.zeros(0, np.uint64)
    trained, evaluated = (
        np.concatenate([none, *(_hashes(*opened, 0, MAX_ROWS_COMPARED) for opened in sources)])
        for sources in (train, held_out)
    )
    shared = int(np.isin(evaluated, trained).sum())
    return f"{shared:,} of {len(evaluated):,} held-out rows" if shared else ""


def _hashes(config: SourceConfig, source: ExampleSource, seed: int, limit: int | None = None) -> np.ndarray:
    """Return `prompt_hash` of each row, uint64; empty for generated sources, which have held-out parts.

    Args:
        limit: maximum number of rows, evenly spread; None = all.
    """
    size = 0 if config.is_generated else len(source)
    rows = size if limit is None else min(size, limit)
    return np.fromiter((prompt_hash(source[i * size // rows], seed) for i in range(rows)), np.uint64, rows)
