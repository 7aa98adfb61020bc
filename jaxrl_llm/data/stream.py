"""Order of rows: endless epochs of each source, the sources interleaved in proportion to their weights."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import grain
import numpy as np

from jaxrl_llm.data.sources import OpenSource

RowIndex = tuple[int, int]
"""(source, row)."""


class EpochOrder:
    """Endless rows of source number `k`: epochs in order, or each in a new order.

    grain's shuffle walks a cycle of 2^16 to find an index, which takes 20 ms per row for few rows.
    """

    def __init__(self, k: int, num_rows: int, seed: int, shuffle: bool):
        self._k, self._num_rows, self._shuffle = k, num_rows, shuffle
        shuffled = lambda epoch: np.random.default_rng([seed, k, epoch]).permutation(num_rows)
        self._order = functools.lru_cache(maxsize=2)(shuffled)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: int) -> RowIndex:
        epoch, row = divmod(position, self._num_rows)
        return self._k, int(self._order(epoch)[row]) if self._shuffle else row


def endless_rows(opened: Sequence[OpenSource], seed: int, shuffle: bool) -> grain.MapDataset:
    """Return endless random-access (source, row), the sources interleaved in proportion to their weights.

    Generated sources are random already, and are not shuffled.
    """
    orders = [
        EpochOrder(k, len(source), seed, shuffle and not config.is_generated)
        for k, (config, source) in enumerate(opened)
    ]
    streams = [grain.MapDataset.source(order) for order in orders]
    return grain.MapDataset.mix(streams, weights=[config.weight for config, _ in opened])


def even_shares(sizes: Sequence[int], count: int) -> list[int]:
    """Return the number of rows of each source that add up to `count`: even shares, more if others have too
    few."""
    even, more = divmod(count, max(len(sizes), 1))
    shares = [min(size, even + (k < more)) for k, size in enumerate(sizes)]
    for k, size in enumerate(sizes):
        shares[k] += min(size - shares[k], count - sum(shares))
    return shares
