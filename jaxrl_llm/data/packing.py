"""Packing of sequences into rows of one length, and of rows into micro-batches of one shape (host, numpy)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.forks import Fork, common_length, contexts
from jaxrl_llm.structs import SIGNALS, Batch, Sharing, Trajectory

IN_LOSS = tuple(signal.name for signal in SIGNALS if signal.in_loss)


@dataclass
class PackItem:
    """One trajectory or document; all arrays are aligned with its tokens."""

    tokens: np.ndarray  # int32 [t]
    mask: np.ndarray  # [t], 1 = this token is trained on
    signals: dict[str, np.ndarray] = field(default_factory=dict)  # by name in structs.SIGNALS, float32 [t]
    routes: np.ndarray | None = None  # as in a Trajectory, [t, L, K]
    kept: np.ndarray | None = None  # kept sets as in a Trajectory, [t, K], -1 on the prompt
    prompt: int | None = None  # `prompt_index` of its Trajectory; None = a document
    forks: tuple[Fork, ...] = ()  # as in a Trajectory


def from_trajectory(trajectory: Trajectory) -> PackItem:
    """Join prompt and response into one item; the prompt is context (mask 0)."""
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
        forks=trajectory.forks,
    )


def counts(sequences: Sequence[PackItem], group_size: int = 1) -> tuple[float, float]:
    """Return the global denominators (trained tokens, sequences with trained tokens), at least 1 each.

    Args:
        group_size: consecutive sequences that are compared; a group does not count if one of its sequences
            has no trained token, such as a pair with an empty side.
    """
    trained = [float(s.mask[1:].sum()) for s in sequences]
    groups = [trained[i : i + group_size] for i in range(0, len(trained), group_size)]
    return max(sum(trained), 1.0), max(float(group_size * sum(min(group) > 0 for group in groups)), 1.0)


def pack(
    sequences: Sequence[PackItem],
    row_length: int,
    rows: int,
    group_size: int = 1,
    *,
    replay: bool = False,
    share: Sharing = False,
    keep_whole: bool = False,
    num_kept: int = 0,
) -> list[Batch]:
    """Pack by first-fit decreasing into rows of `row_length` and micro-batches of `rows` rows, padding the
    last.

    Rows are assigned to micro-batches longest first. The packing depends only on the lengths (and on the
    tokens, if prefixes are shared), so the same sequences always pack the same way.

    Args:
        group_size: consecutive sequences that stay together in one row (2 = a pair).
        replay: include the routes that the sequences have.
        share: store a prefix that several sequences of a row share only once.
        keep_whole: all contexts of a sequence with forks are in one row, shared or not.
        num_kept: ids per kept set; 0 = leave kept sets out.

    Raises:
        UserError: a group longer than a row.
    """
    packed = arrange(sequences, row_length, group_size, share, keep_whole=keep_whole)
    route = next((s.routes[0] for s in sequences if s.routes is not None), None) if replay else None
    if num_kept:
        num_kept = max([num_kept, *(s.kept.shape[1] for s in sequences)])
    return [
        _fill_rows(
            packed[start : start + rows], row_length, rows, route=route, share=share, num_kept=num_kept
        )
        for start in range(0, len(packed), rows)
    ]


def unpack(
    values: Sequence[np.ndarray],
    sequences: Sequence[PackItem],
    row_length: int,
    group_size: int = 1,
    *,
    on_targets: bool = True,
    share: Sharing = False,
    keep_whole: bool = False,
) -> list[np.ndarray]:
    """Return per-token outputs of the batches of `pack`, [B, T, ...], as one array [t, ...] per sequence.

    Outputs are aligned with the sequence's tokens: index t belongs to token t; the first is 0.

    Args:
        on_targets: the outputs belong to the targets of their columns; else to the tokens.
    """
    outputs: list[np.ndarray] = [np.zeros(0)] * len(sequences)
    packed = arrange(sequences, row_length, group_size, share, keep_whole=keep_whole)
    for members, row in zip(packed, itertools.chain.from_iterable(values), strict=False):
        for place in members:
            branch, found = place.branch, row[place.columns]
            if on_targets:
                found = np.concatenate([np.zeros_like(row[:1]), found[:-1]])
            if sequences[branch.index].forks:
                if not len(outputs[branch.index]):
                    outputs[branch.index] = np.zeros((branch.num_tokens, *row.shape[1:]), row.dtype)
                outputs[branch.index][branch.first :][: len(found) - branch.keep] = found[branch.keep :]
            else:
                outputs[branch.index] = found
    return outputs


class Branch(NamedTuple):
    """One context of a sequence: the whole of it, unless it has forks (`forks.contexts`)."""

    item: PackItem  # the context's tokens, in order; trained on are tokens that no context before has
    index: int  # of the sequence
    context: int  # number of the context
    keep: int  # leading tokens that the branch before has
    first: int  # number in the sequence of the token that follows them
    num_tokens: int  # of the sequence
    num_trained: float  # tokens of the sequence


def branches_of(sequences: Sequence[PackItem]) -> list[Branch]:
    """Return the contexts of all sequences, in order."""
    return list(itertools.chain.from_iterable(itertools.starmap(_branches, enumerate(sequences))))


def _branches(index: int, item: PackItem) -> Iterator[Branch]:
    num_tokens, num_trained = len(item.tokens), max(float(item.mask[1:].sum()), 1.0)
    if not item.forks:
        yield Branch(item, index, 0, 0, 0, num_tokens, num_trained)
        return
    for number, (read, keep) in enumerate(contexts(len(item.tokens), item.forks)):
        mask = item.mask[read]
        mask[:keep] = 0
        of_context = PackItem(
            item.tokens[read],
            mask,
            {name: values[read] for name, values in item.signals.items()},
            routes=None if item.routes is None else item.routes[read],
            kept=None if item.kept is None else item.kept[read],
            prompt=item.prompt,
        )
        yield Branch(of_context, index, number, keep, int(read[keep]), num_tokens, num_trained)


def row_tokens(sequences: Sequence[PackItem], share: Sharing) -> int:
    """Return the tokens of a row that has these sequences, in this order."""
    return places_of(branches_of(sequences), share)[-1].end


def arrange(
    sequences: Sequence[PackItem],
    row_length: int,
    group_size: int = 1,
    share: Sharing = False,
    *,
    keep_whole: bool = False,
) -> list[list[Place]]:
    """Return the places of the sequences' branches in each row.

    Groups stay whole and in order. So do the branches of a sequence if they share their prefixes, or with
    `keep_whole`; otherwise each branch by itself takes a place, unless its group has several sequences.
    """
    whole = keep_whole or share is True or group_size > 1
    group_of = lambda branch: branch.index // group_size if whole else (branch.index, branch.context)
    groups = [list(members) for _, members in itertools.groupby(branches_of(sequences), key=group_of)]
    if share:
        groups = trees(groups, row_length, share)
    sizes = [places_of(members, share)[-1].end for members in groups]
    rows = [[groups[i] for i in row] for row in first_fit(sizes, row_length)]
    if share == "flat":
        # Each tree has a fork: sharing with the tree before would move it, and lengthen the row.
        return [_side_by_side([places_of(tree, share) for tree in row]) for row in rows]
    return [places_of(list(itertools.chain.from_iterable(row)), share) for row in rows]


def _side_by_side(trees: Sequence[list[Place]]) -> list[Place]:
    """Return the places of trees that share nothing, one tree after the other in a row."""
    starts = itertools.accumulate((tree[-1].end for tree in trees), initial=0)
    return [
        place._replace(columns=place.columns + start)
        for tree, start in zip(trees, starts, strict=False)
        for place in tree
    ]


def first_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return rows as lists of the indices of their sequences, by first-fit over decreasing lengths."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > row_length:
            raise UserError(
                f"a sequence of {length} tokens does not fit a row of {row_length}; raise "
                "--max_prompt_tokens or --max_response_tokens, or filter it (--data.overlong filter); a "
                "conversation whose history is rewritten needs less with --env.history keep"
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
    *,
    share: Sharing = False,
    num_kept: int = 0,
) -> Batch:
    """Return a micro-batch of only padding.

    Args:
        num_kept: ids per kept set; 0 = no kept sets.
        share: the sequences may share prefixes.
        route: route of a token, for shape and type; None = the batch has no routes.
    """
    # Arrays that hold other values than 0.
    zeros = lambda dtype: np.zeros((rows, row_length), dtype)
    if route is not None:
        unknown = np.iinfo(route.dtype).max
        route = np.full((rows, row_length, *route.shape), unknown, route.dtype)
    return Batch(
        tokens=zeros(np.int32),
        targets=zeros(np.int32),
        positions=zeros(np.int32),
        segments=zeros(np.int32),
        sequences=zeros(np.int32),
        last=zeros(np.int32) if share else None,
        mask=zeros(np.float32),
        lengths=np.ones((rows, row_length), np.float32),
        **{name: zeros(np.float32) for name in signals},
        routes=route,
        kept=np.full((rows, row_length, num_kept), -1, np.int32) if num_kept else None,
    )


def _fill_rows(
    packed: list[list[Place]],
    row_length: int,
    rows: int,
    *,
    route: np.ndarray | None,
    share: Sharing,
    num_kept: int,
) -> Batch:
    names = tuple(name for name in IN_LOSS if name in packed[0][0].branch.item.signals)
    batch = empty_batch(rows, row_length, names, route, share=share, num_kept=num_kept)
    for row, places in enumerate(packed):
        owners = dict.fromkeys(place.branch.index for place in places)
        numbers = {index: n for n, index in enumerate(owners, 1)}
        for segment, (branch, shared, columns) in enumerate(places, 1):
            # Tokens after the shared prefix; arrays of targets are shifted by one.
            s = branch.item
            here, shifted = columns[shared:], columns[shared:-1]  # position t predicts token t + 1
            batch.tokens[row, here] = s.tokens[shared:]
            batch.positions[row, here] = np.arange(shared, len(s.tokens))
            batch.segments[row, here] = segment
            batch.sequences[row, here] = numbers[branch.index]
            batch.targets[row, shifted] = s.tokens[shared + 1 :]
            batch.mask[row, shifted] = s.mask[shared + 1 :]
            batch.lengths[row, here] = branch.num_trained
            for name in names:
                getattr(batch, name)[row, shifted] = s.signals[name][shared + 1 :]
            if route is not None and s.routes is not None:
                batch.routes[row, here] = s.routes[shared:]
            if num_kept:
                batch.kept[row, shifted, : s.kept.shape[1]] = s.kept[shared + 1 :]
            if share:
                batch.last[row, columns] = segment  # later sequences overwrite it on shared tokens
    return batch


class Place(NamedTuple):
    """The place of a branch in a row."""

    branch: Branch
    shared: int  # number of first tokens shared with the preceding branch in the row
    columns: np.ndarray  # of all its tokens, [t]

    @property
    def end(self) -> int:
        """The first column after the sequence."""
        return int(self.columns[-1]) + 1


def shared_tokens(before: PackItem, item: PackItem) -> int:
    """Return how many first tokens an item can share with the preceding item in the row.

    Shared tokens have equal ids, targets and routes, and the item is trained on none of the targets.
    """
    length = min(len(before.tokens), len(item.tokens))
    equal = before.tokens[:length] == item.tokens[:length]
    if item.routes is not None and before.routes is not None:
        equal &= (before.routes[:length] == item.routes[:length]).all(axis=(1, 2))
    return max(min(common_length(equal), context_tokens(item)) - 1, 0)


def context_tokens(item: PackItem) -> int:
    """Return the number of tokens before the first one that is trained on; all, if none is."""
    trained = np.flatnonzero(item.mask[1:])
    return int(trained[0]) + 1 if len(trained) else len(item.tokens)


def trees(groups: Sequence[Sequence[Branch]], row_length: int, share: Sharing) -> list[list[Branch]]:
    """Join the groups to trees that fit a row; return the branches of each tree.

    Groups of equal context are joined first, in the order of their tokens; if they exceed a row, they are
    divided and the context is copied. Then neighbours in this order are joined, largest shared prefix first,
    if the second tree shares more than half of its context; flat rows have only groups of equal context.
    """
    groups = sorted(groups, key=lambda members: members[0].item.tokens.tobytes())
    sizes = [places_of(members, share)[-1].end for members in groups]
    firsts = [members[0].item for members in groups]
    contexts = [context_tokens(item) for item in firsts]
    shared = functools.cache(lambda a, b: shared_tokens(groups[a][-1].item, firsts[b]))
    tree_of = [[n] for n in range(len(groups))]  # of each group, in order

    def join(a: int, b: int) -> None:
        joined = sorted(tree_of[a] + tree_of[b])
        size = sum(sizes[n] for n in joined) - sum(itertools.starmap(shared, itertools.pairwise(joined)))
        if share == "flat":
            size = places_of([branch for n in joined for branch in groups[n]], share)[-1].end
        if size <= row_length:
            for n in joined:
                tree_of[n] = joined

    # Groups of equal context, then neighbours.
    before: dict[bytes, int] = {}  # context -> the last group that has it
    for n, item in enumerate(firsts):
        context = item.tokens[: contexts[n]].tobytes()
        if context in before:
            join(before[context], n)
        before[context] = n
    neighbours = range(1, 1 if share == "flat" else len(groups))
    for n in sorted(neighbours, key=lambda n: (-shared(n - 1, n), n)):
        common = shared(n - 1, n)
        if n == tree_of[n][0] and common and 2 * common >= contexts[n] - 1:
            join(n - 1, n)
    # The groups of each tree, in order.
    roots = (n for n, tree in enumerate(tree_of) if n == tree[0])
    return [[branch for n in tree_of[root] for branch in groups[n]] for root in roots]


def places_of(branches: Sequence[Branch], share: Sharing) -> list[Place]:
    """Return the places of branches in a row, in this order."""
    places: list[Place] = []
    columns, end, fork = np.zeros(0, np.int64), 0, 0
    for before, branch in itertools.pairwise([None, *branches]):
        shared = shared_tokens(before.item, branch.item) if share and before else 0
        if share and before and (before.index, before.context) == (branch.index, branch.context - 1):
            shared = branch.keep  # no copy of the last one: the token after it is an observation
        if share == "flat":  # the sequences of a tree part at one token, the fork
            shared = min(shared, fork or shared) if shared >= fork else 0
            fork = shared
        own = len(branch.item.tokens) - shared
        columns = np.concatenate([columns[:shared], np.arange(end, end + own)])
        places.append(Place(branch, shared, columns))
        end += own
    return places
