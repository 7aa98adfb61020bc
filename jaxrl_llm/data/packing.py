"""Variable-length sequences into rows of one length, rows into micro-batches of one shape (host, numpy)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm.structs import Batch, Trajectory

SIGNALS = ("advantages", "rollout")  # optional per-token inputs of a Batch that the host provides


@dataclass
class PackItem:
    """One trajectory or document, arrays of its own length, aligned with its tokens."""

    tokens: np.ndarray  # int32 [t]
    mask: np.ndarray  # [t], 1 = this token is trained on
    signals: dict[str, np.ndarray] = field(default_factory=dict)  # name in SIGNALS -> float32 [t]


def from_trajectory(trajectory: Trajectory, advantages: np.ndarray, valid: bool) -> PackItem:
    """Prompt and response end to end; the prompt is context (mask 0), `advantages` is [R'] or longer."""
    prompt, length = len(trajectory.prompt_ids), len(trajectory.response_ids)
    lead = lambda x: np.concatenate([np.zeros(prompt, np.float32), np.asarray(x, np.float32)[:length]])
    return PackItem(
        tokens=np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int32),
        mask=lead(trajectory.mask) * valid,
        signals={"advantages": lead(advantages), "rollout": lead(trajectory.logprobs)},
    )


def counts(sequences: Sequence[PackItem]) -> tuple[float, float]:
    """(trained tokens, sequences with any): the global denominators; at least 1 each."""
    trained = [float(s.mask[1:].sum()) for s in sequences]
    return max(sum(trained), 1.0), max(float(sum(t > 0 for t in trained)), 1.0)


def pack(sequences: Sequence[PackItem], row_length: int, rows: int) -> list[Batch]:
    """First-fit decreasing into rows of `row_length`, `rows` rows a micro-batch, the last one padded.

    Rows are dealt to micro-batches longest first, and nothing depends on anything but the lengths, so the
    same sequences always pack the same way.

    Raises:
        ValueError: a sequence longer than a row.
    """
    packed = first_fit([len(s.tokens) for s in sequences], row_length)
    batches = []
    for start in range(0, len(packed), rows):
        batches.append(_lay_out(sequences, packed[start : start + rows], row_length, rows))
    return batches


def first_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Rows, each the indices of the sequences it holds: first-fit over decreasing lengths."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > row_length:
            raise ValueError(
                f"a sequence of {length} tokens does not fit a row of {row_length}; raise "
                "--max_prompt_tokens or --max_response_tokens, or filter it (--data.overlong filter)"
            )
        row = next((r for r, room in enumerate(free) if room >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(row_length)
        rows[row].append(index)
        free[row] -= length
    return rows


def empty_batch(rows: int, row_length: int, signals: Sequence[str] = ()) -> Batch:
    """A micro-batch of nothing but padding."""
    zeros = lambda dtype: np.zeros((rows, row_length), dtype)
    return Batch(
        tokens=zeros(np.int32),
        targets=zeros(np.int32),
        positions=zeros(np.int32),
        segments=zeros(np.int32),
        mask=zeros(np.float32),
        lengths=np.ones((rows, row_length), np.float32),
        **{name: zeros(np.float32) for name in signals},
    )


def _lay_out(sequences, packed: list[list[int]], row_length: int, rows: int) -> Batch:
    names = tuple(name for name in SIGNALS if name in sequences[0].signals)
    batch = empty_batch(rows, row_length, names)
    for row, members in enumerate(packed):
        start = 0
        for segment, index in enumerate(members, 1):
            s = sequences[index]
            end = start + len(s.tokens)
            here, shifted = slice(start, end), slice(start, end - 1)  # position t predicts token t + 1
            batch.tokens[row, here] = s.tokens
            batch.positions[row, here] = np.arange(len(s.tokens))
            batch.segments[row, here] = segment
            batch.targets[row, shifted] = s.tokens[1:]
            batch.mask[row, shifted] = s.mask[1:]
            batch.lengths[row, here] = max(float(s.mask[1:].sum()), 1.0)
            for name in names:
                getattr(batch, name)[row, shifted] = s.signals[name][1:]
            start = end
    return batch
