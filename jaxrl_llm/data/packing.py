"""Packing of sequences into rows of one length, and of rows into micro-batches of one shape (host, numpy)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxrl_llm.data.prefixes import Place, places_of, trees
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import SIGNALS, Batch, Trajectory

IN_LOSS = tuple(signal.name for signal in SIGNALS if signal.in_loss)


@dataclass
class PackItem:
    """One trajectory or document, arrays of its own length, aligned with its tokens."""

    tokens: np.ndarray  # int32 [t]
    mask: np.ndarray  # [t], 1 = this token is trained on
    signals: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # by the name in structs.SIGNALS, float32 [t]
    routes: np.ndarray | None = None  # as those of a Trajectory, [t, L, K]
    kept: np.ndarray | None = None  # kept sets of a Trajectory, [t, K], -1 on its prompt
    prompt: int | None = None  # `prompt_index` of its Trajectory; None = a document


def from_trajectory(trajectory: Trajectory) -> PackItem:
    """Return prompt and response end to end as one item; the prompt is context (mask 0)."""
    prompt = np.zeros(len(trajectory.prompt_ids), np.float32)
    on_response = lambda x: np.concatenate([prompt, np.asarray(x, np.float32)])
    kept = trajectory.kept
    if kept is not None:
        kept = np.pad(kept, ((len(prompt), 0), (0, 0)), constant_values=-1)
    return PackItem(
        tokens=np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int32),
        mask=on_response(trajectory.mask),
        signals={"rollout_logprobs": on_response(trajectory.logprobs)},
        routes=trajectory.routes,
        kept=kept,
        prompt=trajectory.prompt_index,
    )


def counts(sequences: Sequence[PackItem], group_size: int = 1) -> tuple[float, float]:
    """Return (trained tokens, sequences with any): the global denominators; at least 1 each.

    Args:
        group_size: consecutive sequences that are compared; a group in which one has no trained token is not
            counted, as a pair with an empty side is no pair.
    """
    trained = [float(s.mask[1:].sum()) for s in sequences]
    groups = [trained[i : i + group_size] for i in range(0, len(trained), group_size)]
    return max(sum(trained), 1.0), max(float(group_size * sum(min(group) > 0 for group in groups)), 1.0)


def pack(
    sequences: Sequence[PackItem],
    row_length: int,
    rows: int,
    group_size: int = 1,
    replay: bool = False,
    share: bool = False,
    num_kept: int = 0,
) -> list[Batch]:
    """Pack by first-fit decreasing into rows of `row_length`, `rows` rows a micro-batch, the last one padded.

    Rows are assigned to micro-batches longest first. The packing depends on the lengths, and where prefixes
    are shared on the tokens, alone, so the same sequences always pack the same way.

    Args:
        group_size: consecutive sequences that stay side by side in one row (2 = a pair).
        replay: include the routes that the sequences have.
        share: a row holds a prefix that several of its sequences have in common once.
        num_kept: ids of a kept set; 0 = leave out those that the sequences have.

    Raises:
        UserError: a group longer than a row.
    """
    packed = arrange(sequences, row_length, group_size, share)
    route = next((s.routes[0] for s in sequences if s.routes is not None), None) if replay else None
    batches = []
    for start in range(0, len(packed), rows):
        members = packed[start : start + rows]
        batches.append(_fill_rows(sequences, members, row_length, rows, route, share, num_kept))
    return batches


def unpack(
    values: Sequence[np.ndarray],
    sequences: Sequence[PackItem],
    row_length: int,
    group_size: int = 1,
    on_targets: bool = True,
    share: bool = False,
) -> list[np.ndarray]:
    """Return per-token outputs of the batches of `pack`, [B, T, ...], as one array [t, ...] a sequence.

    They are aligned with the tokens of the sequence again: index t belongs to token t; the first is 0.

    Args:
        on_targets: the outputs belong to the targets of their places; else to the tokens.
    """
    outputs: list[np.ndarray] = [np.zeros(0)] * len(sequences)
    rows = itertools.chain.from_iterable(values)
    for members, row in zip(arrange(sequences, row_length, group_size, share), rows, strict=False):
        for place in members:
            found = row[place.columns]
            shifted = np.concatenate([np.zeros_like(row[:1]), found[:-1]])
            outputs[place.index] = shifted if on_targets else found
    return outputs


def arrange(
    sequences: Sequence[PackItem], row_length: int, group_size: int = 1, share: bool = False
) -> list[list[Place]]:
    """Return the places of the sequences in each row, groups complete and in their order."""
    groups = [list(range(i, i + group_size)) for i in range(0, len(sequences), group_size)]
    if share:
        groups = trees(sequences, groups, row_length)
    sizes = [places_of(sequences, members, share)[-1].end for members in groups]
    rows = first_fit(sizes, row_length)
    return [places_of(sequences, [i for group in row for i in groups[group]], share) for row in rows]


def first_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return rows as lists of the indices of their sequences, by first-fit over decreasing lengths."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > row_length:
            raise UserError(
                f"a sequence of {length} tokens does not fit a row of {row_length}; raise "
                "--max_prompt_tokens or --max_response_tokens, or filter it (--data.overlong filter)"
            )
        row = next((r for r, tokens in enumerate(free) if tokens >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(row_length)
        rows[row].append(index)
        free[row] -= length
    return rows


def empty_batch(
    rows: int,
    row_length: int,
    signals: Sequence[str] = (),
    route: np.ndarray | jax.ShapeDtypeStruct | None = None,
    share: bool = False,
    num_kept: int = 0,
) -> Batch:
    """Return a micro-batch of padding alone.

    Args:
        num_kept: ids of a kept set; 0 = there are none.
        share: its sequences may share prefixes.
        route: of a token, for its shape and type; None = the batch has no routes.
    """
    zeros = lambda dtype: np.zeros((rows, row_length), dtype)
    if route is not None:
        unknown = np.iinfo(route.dtype).max
        route = np.full((rows, row_length, *route.shape), unknown, route.dtype)
    return Batch(
        tokens=zeros(np.int32),
        targets=zeros(np.int32),
        positions=zeros(np.int32),
        segments=zeros(np.int32),
        last=zeros(np.int32) if share else None,
        mask=zeros(np.float32),
        lengths=np.ones((rows, row_length), np.float32),
        **{name: zeros(np.float32) for name in signals},
        routes=route,
        kept=np.full((rows, row_length, num_kept), -1, np.int32) if num_kept else None,
    )


def _fill_rows(
    sequences: Sequence[PackItem],
    packed: list[list[Place]],
    row_length: int,
    rows: int,
    route: np.ndarray | None,
    share: bool,
    num_kept: int,
) -> Batch:
    if num_kept:
        num_kept = max(num_kept, *(s.kept.shape[1] for s in sequences))
    names = tuple(name for name in IN_LOSS if name in sequences[0].signals)
    batch = empty_batch(rows, row_length, names, route, share, num_kept)
    for row, places in enumerate(packed):
        for segment, (index, shared, columns) in enumerate(places, 1):
            s = sequences[index]
            here, shifted = columns[shared:], columns[shared:-1]  # position t predicts token t + 1
            batch.tokens[row, here] = s.tokens[shared:]
            batch.positions[row, here] = np.arange(shared, len(s.tokens))
            batch.segments[row, here] = segment
            batch.targets[row, shifted] = s.tokens[shared + 1 :]
            batch.mask[row, shifted] = s.mask[shared + 1 :]
            batch.lengths[row, here] = max(float(s.mask[1:].sum()), 1.0)
            for name in names:
                getattr(batch, name)[row, shifted] = s.signals[name][shared + 1 :]
            if route is not None and s.routes is not None:
                batch.routes[row, here] = s.routes[shared:]
            if num_kept:
                batch.kept[row, shifted, : s.kept.shape[1]] = s.kept[shared + 1 :]
            if share:
                batch.last[row, columns] = segment  # the next one overwrites what it continues
    return batch
