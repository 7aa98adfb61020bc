"""Prefixes that packed sequences share: a row holds a prompt once, then the responses to it (host, numpy).

A sequence that begins like the one before it in the row continues that one's tokens in place of a copy of
them; so the sequences of a row form trees, in depth-first order (prefix sharing: arXiv 2506.05433). Tokens
that a sequence is trained on are its own, and so is the token before them, whose target they are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxrl_llm.data.packing import PackItem


class Place(NamedTuple):
    """The place of a sequence in a row."""

    index: int  # of the sequence
    shared: int  # its first tokens that are those of the sequence before it in the row
    columns: np.ndarray  # of all its tokens, [t]

    @property
    def end(self) -> int:
        """The first column after it."""
        return int(self.columns[-1]) + 1


def shared_tokens(before: PackItem, item: PackItem) -> int:
    """Return how many of an item's first tokens can be those of the item before it in the row.

    The tokens, their targets and their routes are equal, and the item is trained on none of the targets.
    """
    length = min(len(before.tokens), len(item.tokens))
    equal = before.tokens[:length] == item.tokens[:length]
    if item.routes is not None and before.routes is not None:
        equal &= (before.routes[:length] == item.routes[:length]).all(axis=(1, 2))
    common = length if equal.all() else int(np.argmin(equal))
    return max(min(common, context_tokens(item)) - 1, 0)


def context_tokens(item: PackItem) -> int:
    """Return the number of tokens before the first one that is trained on; all, if none is."""
    trained = np.flatnonzero(item.mask[1:])
    return int(trained[0]) + 1 if len(trained) else len(item.tokens)


def trees(sequences: Sequence[PackItem], groups: Sequence[Sequence[int]], row_length: int) -> list[list[int]]:
    """Return the groups joined to trees, as lists of the indices of their sequences; a tree fits a row.

    Groups of equal context are joined first, in the order of their tokens; if they are too long for a row,
    they are cut, and the context copied. Then neighbours in that order, those that share most first, if the
    tree of the second then has less than half of its context for itself.
    """
    groups = sorted(groups, key=lambda members: sequences[members[0]].tokens.tobytes())
    sizes = [places_of(sequences, members, share=True)[-1].end for members in groups]
    firsts = [sequences[members[0]] for members in groups]
    contexts = [context_tokens(item) for item in firsts]
    shared = functools.cache(lambda a, b: shared_tokens(sequences[groups[a][-1]], firsts[b]))
    tree_of = [[n] for n in range(len(groups))]  # of each group, in order

    def join(a: int, b: int) -> None:
        joined = sorted(tree_of[a] + tree_of[b])
        common = sum(itertools.starmap(shared, itertools.pairwise(joined)))
        if sum(sizes[n] for n in joined) - common <= row_length:
            for n in joined:
                tree_of[n] = joined

    before: dict[bytes, int] = {}  # context -> the last group that has it
    for n, item in enumerate(firsts):
        context = item.tokens[: contexts[n]].tobytes()
        if context in before:
            join(before[context], n)
        before[context] = n
    for n in sorted(range(1, len(groups)), key=lambda n: (-shared(n - 1, n), n)):
        common = shared(n - 1, n)
        if n == tree_of[n][0] and common and 2 * common >= contexts[n] - 1:
            join(n - 1, n)
    roots = (n for n, tree in enumerate(tree_of) if n == tree[0])
    return [[index for n in tree_of[root] for index in groups[n]] for root in roots]


def places_of(sequences: Sequence[PackItem], members: Sequence[int], share: bool) -> list[Place]:
    """Return the places of sequences that lie in a row in this order."""
    places: list[Place] = []
    columns, end = np.zeros(0, np.int64), 0
    for i, index in enumerate(members):
        before = sequences[members[i - 1]] if share and i else None
        shared = shared_tokens(before, sequences[index]) if before else 0
        own = len(sequences[index].tokens) - shared
        columns = np.concatenate([columns[:shared], np.arange(end, end + own)])
        places.append(Place(index, shared, columns))
        end += own
    return places
