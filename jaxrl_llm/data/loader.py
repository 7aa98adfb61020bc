"""Batches as a pure function of (seed, position): a resumed run needs no cursor.

The stream of a split is an endless list of rows (source, row): each source is reshuffled every epoch, and the
sources are interleaved in proportion to their weights. Step s of size n reads positions s*n to s*n + n - 1;
prompts can also be read by position, for steps with a varying number of prompts.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxrl_llm.data.chat import Encoded, encode_prompt, encode_steps, encode_supervised, plain_text_warning
from jaxrl_llm.data.config import DataConfig
from jaxrl_llm.data.preference import label_of, mismatched
from jaxrl_llm.data.rows import Example, RowError, template_columns
from jaxrl_llm.data.sources import OpenSource, open_sources
from jaxrl_llm.data.stream import RowIndex, endless_rows, even_shares
from jaxrl_llm.errors import UserError

MAX_ROWS_DRAWN = 1000  # rows tried for one that fits
MAX_ROWS_CHECKED = 500  # rows of each source tried before a run
log = logging.getLogger(__name__)
RowKind = Literal["prompts", "tokens", "teachers", "pairs", "labels", "steps"]
"""The form in which an algorithm reads rows: prompts to answer, or one of `algos.data`."""


class OverlongError(RowError):
    """A row with more tokens than allowed."""

    def __init__(self, where: str, tokens: int, limit: int):
        self.tokens = tokens
        super().__init__(
            f"{where}: {tokens} tokens, more than {limit}; "
            "--data.overlong filter leaves such rows out, cut shortens them"
        )


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch."""

    example: Example
    ids: np.ndarray  # int32 [.]
    index: int  # position in the stream of its split


class Loader:
    """Random-access batches of one split.

    Args:
      tokenizer: a transformers tokenizer.
      seed: of the order and of generated training problems; held-out problems are the same for every seed.
      max_prompt_tokens: maximum length of a prompt; `config.overlong` decides about longer prompts.
      max_tokens: longest supervised example, prompt and response; None: no limit.
      columns: added to rows that lack them, such as the tools that the chat template shows.
      opened: sources that are open already, with their settings (`data.holdout`); None: open the sources of
          `config`.

    Raises:
      UserError: no source or no usable row; or a bad row or over-long prompt that the config refuses.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        seed: int,
        max_prompt_tokens: int,
        *,
        split: Literal["train", "eval"] = "train",
        max_tokens: int | None = None,
        columns: dict[str, Any] | None = None,
        opened: Sequence[OpenSource] | None = None,
    ):
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        self._max_prompt_tokens, self._max_tokens = max_prompt_tokens, max_tokens
        self.opened = open_sources(config, split, seed) if opened is None else opened
        self._stream = endless_rows(self.opened, seed, config.shuffle) if self.opened else None
        self._columns = columns or {}
        self._overlong: set[RowIndex] = set()
        self._bad: set[RowIndex] = set()  # that cannot be rendered or tokenized

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Return the prompts at positions start to start + count - 1 of the stream.

        A position always gives the same prompt: a run that uses a varying number of prompts per step keeps
        the next position and loses none.
        """
        drawn = self._drawn(start, count, self._prompt)
        return [Prompt(example, ids, start + i) for i, (example, ids) in enumerate(drawn)]

    def batch(self, step: int, size: int) -> list[Prompt]:
        """Return the prompts of a step of constant size."""
        return self.prompts(step * size, size)

    def supervised_batch(self, step: int, size: int) -> list[Encoded]:
        """Return (ids int32 [.], mask int8 [.]) of each supervised example of a step; mask 1 = learned."""
        return [encoded for _, encoded in self._drawn(step * size, size, self._supervised)]

    def teacher_batch(self, step: int, size: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """Return (ids, mask, index of the teacher) of each supervised example of a step."""
        return [(*encoded, e.teacher) for e, encoded in self._drawn(step * size, size, self._supervised)]

    def pair_batch(self, step: int, size: int) -> list[tuple[Encoded, Encoded, float]]:
        """Return ((ids, mask) of the chosen, (ids, mask) of the rejected, margin) of each pair of a step."""
        return [(*encoded, e.margin) for e, encoded in self._drawn(step * size, size, self._pair)]

    def label_batch(self, step: int, size: int) -> list[tuple[Encoded, Encoded, float]]:
        """Return (response, mismatched, 1.0 = desirable) of the responses of `size` rows; a pair has two.

        Mismatched is the response's prompt with the response of the next row of the step.
        """
        if size < 2:
            raise UserError("KTO needs the response to another prompt: at least 2 rows a step")
        rows = [encoded for _, encoded in self._drawn(step * size, size, self._labelled)]
        samples = [sample for row in rows for sample in row]
        firsts = np.cumsum([0] + [len(row) for row in rows[:-1]])
        other = [int(firsts[(i + 1) % size]) for i, row in enumerate(rows) for _ in row]
        encoded = [sample for sample, _ in samples]
        unlike = mismatched(encoded, other, self._max_tokens)
        return [(mine, theirs, label) for (mine, label), theirs in zip(samples, unlike, strict=True)]

    def step_batch(self, step: int, size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return (ids, mask, labels float32) of each solution; a label is at the token after its step."""
        return [encoded for _, encoded in self._drawn(step * size, size, self._steps)]

    def eval_set(self, limit: int) -> list[Prompt]:
        """Return at most `limit` prompts, spread evenly over the sources and over each source's rows.

        The same for every seed. Over-long prompts are left out, cut or refused, bad rows skipped or refused.
        Warns if fewer than `limit` are usable.
        """
        prompts: list[Prompt] = []
        for k, share in enumerate(even_shares(self._sizes, limit)):
            for row in _spread(self._sizes[k], share):
                if tried := self._try((k, row), self._prompt):
                    prompts.append(Prompt(*tried, len(prompts)))
        if self.opened and len(prompts) < limit:
            log.warning("--eval.prompts %d: %s", limit, self._eval_note(f"{len(prompts)} prompts"))
        return prompts

    def eval_parts(self, limit: int) -> list[tuple[str, Loader, int]]:
        """Return (name, loader, number of rows) of each source, to measure the loss on.

        At most `limit` different rows, divided as in `eval_set`. A source without a name gets the name of its
        file.
        """
        if sum(self._sizes) < limit:
            log.warning("--eval.prompts %d: %s", limit, self._eval_note(f"{sum(self._sizes)} rows"))
        names = [re.sub(r"[^\w./-]+", "_", own.name or Path(own.path).stem) for own, _ in self.opened]
        shares = enumerate(zip(names, even_shares(self._sizes, limit), strict=True))
        return [(name, self.of_sources([i]), rows) for i, (name, rows) in shares if rows]

    def check_first_rows(self, kind: RowKind = "prompts") -> list[Example]:
        """Try rows of each source, as training will read them, until one fits; return these rows.

        Cheap enough to call before models are loaded: renders and tokenizes one row of each source if the
        first one fits, at most `MAX_ROWS_CHECKED`.

        Raises:
          UserError: a source has no row that fits (the message has the reason and the fix), or a row fails
              under `bad_rows` or `overlong` "fail".
        """
        encode = {
            "prompts": self._prompt,
            "tokens": self._supervised,
            "teachers": self._supervised,
            "pairs": self._pair,
            "labels": self._labelled,
            "steps": self._steps,
        }[kind]
        fitting = []
        for k, size in enumerate(self._sizes):
            reasons: list[RowError] = []
            rows = _spread(size, MAX_ROWS_CHECKED)
            tried = next(filter(None, (self._try((k, row), encode, reasons) for row in rows)), None)
            if tried is None:
                raise self._nothing_fits(k, reasons, kind)
            fitting.append(tried[0])
        return fitting

    def warn_of_plain_text(self, rows: Sequence[Example]) -> None:
        """Warn of the first row whose prompt is plain text, if the model is a chat model."""
        if warning := plain_text_warning(self._tokenizer, rows, self._config.chat):
            log.warning("%s", warning)

    def spread_rows(self, count: int) -> list[Example]:
        """Return `count` rows of each source, or all of fewer: evenly spread, the first of each source first.

        The rows are read but not checked: some may be too long.
        """
        spread = (_spread(size, count) for size in self._sizes)
        rows = []
        for of_sources in itertools.zip_longest(*spread):
            for k, row in enumerate(of_sources):
                with contextlib.suppress(RowError):
                    rows += [] if row is None else [self._read((k, row))]
        return rows

    def unanswered(self) -> list[tuple[Example, int]]:
        """Return (first row without an answer, number of such rows) of each source that has some."""
        lacking = [(k, source.unanswered) for k, (_, source) in enumerate(self.opened)]
        return [(self._read((k, rows[0])), len(rows)) for k, rows in lacking if len(rows)]

    def stats(self) -> dict[str, int]:
        """Return counts of rows: good ones, bad_rows (skipped) and overlong.

        Overlong rows and rows that cannot be rendered or tokenized are counted when first drawn.
        """
        return {
            "rows": sum(self._sizes),
            "bad_rows": sum(source.num_bad for _, source in self.opened) + len(self._bad),
            "overlong": len(self._overlong),
        }

    def epochs(self, position: int) -> dict[str, float]:
        """Return {"epoch": passes over the rows before a position of the stream}; {} of generated sources."""
        if any(own.is_generated for own, _ in self.opened):
            return {}
        return {"epoch": position / self.stats()["rows"]}

    @property
    def num_sources(self) -> int:
        """The number of sources."""
        return len(self.opened)

    def of_sources(self, indices: Sequence[int]) -> Loader:
        """Return a loader of these sources alone."""
        own = copy.copy(self)
        own.opened = [self.opened[i] for i in indices]
        own._stream = endless_rows(own.opened, self._seed, self._config.shuffle)
        return own

    def passes(self, position: int) -> dict[str, float]:
        """Return path -> passes over each source before a position, by its weight among the sources."""
        total = sum(own.weight for own, _ in self.opened)
        return {own.path: position * own.weight / total / len(source) for own, source in self.opened}

    @property
    def _sizes(self) -> list[int]:
        """Rows of each source."""
        return [len(source) for _, source in self.opened]

    def _drawn(self, start: int, count: int, encode: Callable) -> list[tuple[Example, Any]]:
        """Return the examples from a position on, each with its result of `encode`."""
        return [self._draw(position, encode) for position in range(start, start + count)]

    def _draw(self, position: int, encode: Callable) -> tuple[Example, Any]:
        """Return the example at a position of the stream, or if it does not fit a random one of its source.

        The replacement is drawn by (seed, position), uniformly over the source, so that it does not depend on
        earlier reads.
        """
        if self._stream is None:
            raise UserError("this split has no source: give --data.eval_path FILE")
        k, row = self._stream[position]
        size, reasons = self._sizes[k], []
        rng = np.random.default_rng([self._seed, position])
        for _ in range(MAX_ROWS_DRAWN):
            if tried := self._try((k, row), encode, reasons):
                return tried
            row = int(rng.integers(size)) if self._config.shuffle else (row + 1) % size
        raise self._nothing_fits(k, reasons, "prompts" if encode == self._prompt else "tokens")

    def _try(
        self, index: RowIndex, encode: Callable, reasons: list[RowError] | None = None
    ) -> tuple[Example, Any] | None:
        """Return a row and its result of `encode`; None if the row is left out, with the reason in
        `reasons`."""
        reasons = [] if reasons is None else reasons
        try:
            example = self._read(index)
            return example, encode(example, index)
        except OverlongError as error:
            self._overlong.add(index)
            if self._config.overlong == "fail":
                raise
            reasons.append(error)
        except RowError as error:
            self._bad.add(index)
            if self._config.bad_rows == "fail":
                raise
            reasons.append(error)
        return None

    def _read(self, index: RowIndex) -> Example:
        example = self.opened[index[0]][1][index[1]]
        return self._with_columns(example) if self._columns else example

    def _with_columns(self, example: Example) -> Example:
        """Add the columns that the row lacks; tables write missing tools as null or as []."""
        empty = () if template_columns(example.columns, example.where)[0] else ("tools",)
        own = {name: value for name, value in example.columns.items() if name not in empty}
        columns, ran = {**self._columns, **own}, "tools" in self._columns and "tools" not in own
        rejected = example.rejected and self._with_columns(example.rejected)
        return dataclasses.replace(example, columns=columns, rejected=rejected, tools_of_run=ran)

    def _prompt(self, example: Example, index: RowIndex) -> np.ndarray:
        """Return prompt ids within the limit."""
        ids = encode_prompt(self._tokenizer, example, self._config.chat)
        return self._fit(ids, self._max_prompt_tokens, example, index)

    def _supervised(self, example: Example, index: RowIndex) -> Encoded:
        """Return (ids, mask) within the limit and with at least one learned token."""
        ids, mask = self._fit_learned(encode_supervised, example, index)
        return ids, mask.astype(np.int8)

    def _pair(self, example: Example, index: RowIndex) -> tuple[Encoded, Encoded]:
        """Return the chosen and the rejected response within the limit."""
        if example.rejected is None:
            raise RowError(f"{example.where}: not a pair: a row needs chosen and rejected responses")
        return self._supervised(example, index), self._supervised(example.rejected, index)

    def _labelled(self, example: Example, index: RowIndex) -> list[tuple[Encoded, float]]:
        """Return the responses of a row within the limit, each with its label."""
        if example.rejected is None:
            return [(self._supervised(example, index), label_of(example))]
        chosen, rejected = self._pair(example, index)
        return [(chosen, 1.0), (rejected, 0.0)]

    def _steps(self, example: Example, index: RowIndex) -> tuple[np.ndarray, ...]:
        """Return (ids, mask, labels) within the limit and with a step left."""
        ids, mask, labels = self._fit_learned(encode_steps, example, index)
        return ids.astype(np.int32), mask.astype(np.int8), labels.astype(np.float32)

    def _fit_learned(self, encode: Callable, example: Example, index: RowIndex) -> np.ndarray:
        """Return arrays of a supervised example, stacked, within the limit; the second is the mask."""
        encoded = np.stack(encode(self._tokenizer, example, self._config.chat))
        tokens = encoded.shape[1]
        fitted = self._fit(encoded, self._max_tokens or tokens, example, index)
        if not fitted[1].any():
            if fitted.shape == encoded.shape:
                raise RowError(f"{example.where}: nothing to learn: the target has no tokens")
            raise OverlongError(example.where, tokens, fitted.shape[1])  # all that is learned was cut off
        return fitted

    def _fit(self, ids: np.ndarray, limit: int, example: Example, index: RowIndex) -> np.ndarray:
        """Return `ids` [..., .] with at most `limit` tokens. Raises OverlongError unless they may be cut."""
        if ids.shape[-1] <= limit:
            return ids
        if self._config.overlong != "cut":
            raise OverlongError(example.where, ids.shape[-1], limit)
        self._overlong.add(index)
        return ids[..., -limit:] if self._config.cut_side == "left" else ids[..., :limit]

    def _nothing_fits(self, k: int, reasons: list[RowError], kind: RowKind) -> UserError:
        """Return the error for a source without a usable row."""
        reasons = list({str(reason): reason for reason in reasons}.values())  # rows are drawn repeatedly
        lengths = [reason.tokens for reason in reasons if isinstance(reason, OverlongError)]
        bad = [reason for reason in reasons if not isinstance(reason, OverlongError)]
        all_rows = "" if len(reasons) >= self._sizes[k] else " tried"
        head = f"{self.opened[k][0].path}: 0 of {len(reasons)} rows{all_rows}"
        if not lengths:
            return UserError(f"{head} can be used; the last: {bad[-1]}")
        also_bad = f" {len(bad)} more cannot be used; the last: {bad[-1]}" if bad else ""
        if kind == "prompts":
            limit = self._max_prompt_tokens
            fit = f"--max_prompt_tokens {limit}; the shortest prompt has {min(lengths)} tokens"
            fix = f"--max_prompt_tokens {min(lengths)}"
        else:
            both = "--max_prompt_tokens and --max_response_tokens"
            fit = f"the {self._max_tokens} tokens of {both}; the shortest has {min(lengths)}"
            fix = f"them to {min(lengths)} together"
        return UserError(f"{head} fit {fit}. Set {fix} or more, or --data.overlong cut.{also_bad}")

    def _eval_note(self, used: str) -> str:
        counts = self.stats()
        left_out = f"{counts['overlong']:,} rows too long so far, {counts['bad_rows']:,} bad"
        return f"{used} are used; the held-out data has {counts['rows']:,} rows, {left_out}"


def _spread(size: int, count: int) -> Iterator[int]:
    """Yield at most `count` different rows of `size`, evenly spread."""
    count = min(count, size)
    return (i * size // count for i in range(count))
