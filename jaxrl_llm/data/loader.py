"""Batches as a pure function of (seed, step): a resumed run needs no cursor.

The stream of a split is an endless list of places (source, row): each source shuffled anew every epoch, the
sources interleaved in proportion to their weights. Step s of size n reads places s*n to s*n + n - 1.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import grain
import numpy as np

from jaxrl_llm.data.chat import encode_prompt, encode_supervised
from jaxrl_llm.data.preference import encode_steps, label_of, mismatched
from jaxrl_llm.data.rows import Example, SourceConfig
from jaxrl_llm.data.sources import BadRows, Source, open_source
from jaxrl_llm.data.template import ChatConfig
from jaxrl_llm.errors import UserError

MAX_DRAWS = 1000  # rows looked at for one that fits
GENERATED = ("task:", "gym:")
Supervised = tuple[np.ndarray, np.ndarray]


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
    """Held-out sources; of generated ones the held-out part. None given: that of the training sources."""
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

    def sources(self, split: Literal["train", "eval"]) -> tuple[SourceConfig, ...]:
        """The sources of a split, with `path` and `eval_path` applied."""
        first = dataclasses.replace(self.train[0] if self.train else SourceConfig(), options="")
        train = (dataclasses.replace(first, path=self.path),) if self.path else self.train
        if split == "train":
            return train
        if self.eval_path:
            return (dataclasses.replace(first, path=self.eval_path, split="test"),)
        chosen = self.eval or tuple(source for source in train if source.path.startswith(GENERATED))
        return tuple(
            dataclasses.replace(source, split="test") if source.path.startswith(GENERATED) else source
            for source in chosen
        )


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch."""

    example: Example
    ids: np.ndarray  # int32 [.]
    index: int  # place in the stream of its split


class Loader:
    """Random-access batches of one split.

    Args:
      tokenizer: a transformers tokenizer.
      seed: of the order and of generated training problems; held-out problems are the same for every seed.
      max_prompt_tokens: longest prompt; `config.overlong` says what becomes of longer ones.
      max_tokens: longest supervised example, prompt and response; None: no limit.
      columns: of every row that lacks them, such as the tools that the chat template shows.

    Raises:
      ValueError: no source, no usable row, a bad row or an over-long prompt that was to be refused.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        seed: int,
        max_prompt_tokens: int,
        split: Literal["train", "eval"] = "train",
        max_tokens: int | None = None,
        columns: dict[str, Any] | None = None,
    ):
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        self._max_prompt_tokens, self._max_tokens = max_prompt_tokens, max_tokens
        configs = config.sources(split)
        self._sources = [open_source(c, seed if split == "train" else 0, config.bad_rows) for c in configs]
        self._places = _stream(self._sources, configs, seed, config.shuffle) if configs else None
        self._overlong: set[tuple[int, int]] = set()
        self._columns = columns or {}

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The prompts of a step, whatever was read before."""
        drawn = self._drawn(step, size, self._prompt)
        return [Prompt(example, ids, step * size + i) for i, (example, ids) in enumerate(drawn)]

    def supervised_batch(self, step: int, size: int) -> list[Supervised]:
        """(ids int32 [.], mask int8 [.]) of each supervised example of a step; mask 1 = learned."""
        return [encoded for _, encoded in self._drawn(step, size, self._supervised)]

    def teacher_batch(self, step: int, size: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """(ids, mask, number of the teacher) of each supervised example of a step."""
        return [(*encoded, e.teacher) for e, encoded in self._drawn(step, size, self._supervised)]

    def pair_batch(self, step: int, size: int) -> list[tuple[Supervised, Supervised, float]]:
        """((ids, mask) of the chosen, (ids, mask) of the rejected, margin) of each pair of a step."""
        return [(*encoded, e.margin) for e, encoded in self._drawn(step, size, self._pair)]

    def label_batch(self, step: int, size: int) -> list[tuple[Supervised, Supervised, float]]:
        """(response, mismatched, 1.0 = desirable) of the responses of `size` rows; a pair has two.

        Mismatched is the response's prompt with the response of the next row of the step.
        """
        rows = [encoded for _, encoded in self._drawn(step, size, self._labelled)]
        if size < 2:
            raise UserError("KTO needs the response to another prompt: at least 2 rows a step")
        samples = [sample for row in rows for sample in row]
        firsts = np.cumsum([0] + [len(row) for row in rows[:-1]])
        other = [int(firsts[(i + 1) % size]) for i, row in enumerate(rows) for _ in row]
        encoded = [sample for sample, _ in samples]
        unlike = mismatched(encoded, other, self._max_tokens)
        return [(mine, theirs, label) for (mine, label), theirs in zip(samples, unlike, strict=True)]

    def step_batch(self, step: int, size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(ids, mask, labels float32) of each solution of a step; the token after a step has its label."""
        return [encoded for _, encoded in self._drawn(step, size, self._steps)]

    def eval_set(self, limit: int) -> list[Prompt]:
        """At most `limit` prompts, spread evenly over the sources and over each source's rows.

        The same for every seed. Over-long prompts are left out, cut or refused.
        """
        prompts: list[Prompt] = []
        for k, source in enumerate(self._sources):
            share = limit // len(self._sources) + (k < limit % len(self._sources))
            count = min(share, len(source))
            for i in range(count):
                row = i * len(source) // count
                example = self._read(source, row)
                ids = self._prompt(example, (k, row))
                if ids is not None:
                    prompts.append(Prompt(example, ids, len(prompts)))
        return prompts

    def stats(self) -> dict[str, int]:
        """Counts: rows, bad_rows (skipped), overlong (different rows met so far)."""
        return {
            "rows": sum(len(source) for source in self._sources),
            "bad_rows": sum(source.num_bad for source in self._sources),
            "overlong": len(self._overlong),
        }

    def _drawn(self, step: int, size: int, encode: Callable) -> list[tuple[Example, Any]]:
        """The examples of a step, each with what `encode` makes of it."""
        return [self._draw(position, encode) for position in range(step * size, (step + 1) * size)]

    def _draw(self, position: int, encode: Callable) -> tuple[Example, Any]:
        """The example at a place of the stream; a row that does not fit is replaced by a random one.

        The replacement is drawn by (seed, position), uniformly over the source, so that no row is
        favoured and nothing depends on what was read before.
        """
        if self._places is None:
            raise UserError("this split has no source: give --data.eval_path FILE")
        k, row = self._places[position]
        source = self._sources[k]
        rng = np.random.default_rng([self._seed, position])
        for _ in range(MAX_DRAWS):
            example = self._read(source, row)
            encoded = encode(example, (k, row))
            if encoded is not None:
                return example, encoded
            row = int(rng.integers(len(source))) if self._config.shuffle else (row + 1) % len(source)
        raise UserError(
            f"{example.where}: of {MAX_DRAWS} rows tried none fits max_prompt_tokens "
            f"{self._max_prompt_tokens} (max_tokens {self._max_tokens}); raise it, or --data.overlong cut"
        )

    def _read(self, source: Source, row: int) -> Example:
        example = source[row]
        if not self._columns:
            return example
        return dataclasses.replace(example, columns={**self._columns, **example.columns})

    def _prompt(self, example: Example, place: tuple[int, int]) -> np.ndarray | None:
        """Prompt ids within the limit, or None."""
        ids = encode_prompt(self._tokenizer, example, self._config.chat)
        return self._fit(ids, self._max_prompt_tokens, example, place)

    def _supervised(self, example: Example, place: tuple[int, int]) -> Supervised | None:
        """(ids, mask) within the limit and with something left to learn, or None."""
        encoded = np.stack(encode_supervised(self._tokenizer, example, self._config.chat))
        limit = self._max_tokens or encoded.shape[1]
        fitted = self._fit(encoded, limit, example, place)
        if fitted is None or not fitted[1].any():
            return None
        return fitted[0], fitted[1].astype(np.int8)

    def _pair(self, example: Example, place: tuple[int, int]) -> tuple[Supervised, Supervised] | None:
        """Chosen and rejected, or None where either does not fit."""
        if example.rejected is None:
            raise UserError(f"{example.where}: not a pair: a row needs chosen and rejected responses")
        sides = [self._supervised(side, place) for side in (example, example.rejected)]
        return None if any(side is None for side in sides) else tuple(sides)

    def _labelled(self, example: Example, place: tuple[int, int]) -> list[tuple[Supervised, float]] | None:
        """The responses of a row, each with its label; None where one does not fit."""
        if example.rejected is not None:
            pair = self._pair(example, place)
            return pair and [(pair[0], 1.0), (pair[1], 0.0)]
        label, encoded = label_of(example), self._supervised(example, place)
        return None if encoded is None else [(encoded, label)]

    def _steps(self, example: Example, place: tuple[int, int]) -> tuple[np.ndarray, ...] | None:
        """(ids, mask, labels) within the limit and with a step left, or None."""
        encoded = np.stack(encode_steps(self._tokenizer, example, self._config.chat))
        fitted = self._fit(encoded, self._max_tokens or encoded.shape[1], example, place)
        if fitted is None or not fitted[1].any():
            return None
        return fitted[0].astype(np.int32), fitted[1].astype(np.int8), fitted[2].astype(np.float32)

    def _fit(
        self, ids: np.ndarray, limit: int, example: Example, place: tuple[int, int]
    ) -> np.ndarray | None:
        """`ids` [..., .] with at most `limit` tokens, or None: not to be used."""
        if ids.shape[-1] <= limit:
            return ids
        self._overlong.add(place)
        if self._config.overlong == "fail":
            raise UserError(
                f"{example.where}: {ids.shape[-1]} tokens, more than {limit}; "
                "--data.overlong filter leaves such rows out, cut shortens them"
            )
        if self._config.overlong == "filter":
            return None
        return ids[..., -limit:] if self._config.cut_side == "left" else ids[..., :limit]


class Places:
    """Endless rows of source number `k`: epochs in order, or each in a new order.

    grain's own shuffle walks a cycle of 2^16 to find an index, which takes 20 ms a row where rows are few.
    """

    def __init__(self, k: int, num_rows: int, seed: int, shuffle: bool):
        self._k, self._num_rows, self._shuffle = k, num_rows, shuffle
        shuffled = lambda epoch: np.random.default_rng([seed, k, epoch]).permutation(num_rows)
        self._order = functools.lru_cache(maxsize=2)(shuffled)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: int) -> tuple[int, int]:
        epoch, row = divmod(position, self._num_rows)
        return self._k, int(self._order(epoch)[row]) if self._shuffle else row


def _stream(
    sources: list[Source], configs: tuple[SourceConfig, ...], seed: int, shuffle: bool
) -> grain.MapDataset:
    """Endless random-access (source, row), the sources interleaved in proportion to their weights."""
    streams = []
    for k, (source, config) in enumerate(zip(sources, configs, strict=True)):
        if config.weight <= 0:
            raise UserError(f"{config.path}: weight must be more than 0, got {config.weight}")
        random_already = config.path.startswith(GENERATED)
        streams.append(grain.MapDataset.source(Places(k, len(source), seed, shuffle and not random_already)))
    return grain.MapDataset.mix(streams, weights=[config.weight for config in configs])
