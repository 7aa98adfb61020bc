"""Division of items between rows that several devices share and rows that a device has for itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from jaxrl_llm.data.packing import PackItem, Place, arrange, row_tokens
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.sharding.placement import with_whole_rows
from jaxrl_llm.sharding.rules import num_shards


class RowShape(NamedTuple):
    """The rows of a micro-batch."""

    row_tokens: int
    rows: int
    mesh: Mesh


def row_shapes(row_tokens: int, rows: int, mesh: Mesh) -> list[RowShape]:
    """Return the shapes of a step's micro-batches: rows that devices share, and rows of one device each.

    Args:
        row_tokens, rows: of a micro-batch of rows that devices share.
    """
    shared, shards = RowShape(row_tokens, rows, mesh), num_shards("sequence", mesh.shape)
    if shards == 1 or row_tokens % shards:
        return [shared]
    return [shared, RowShape(row_tokens // shards, rows * shards, with_whole_rows(mesh))]


class RowGroup(NamedTuple):
    """Items in rows of one length, on one mesh."""

    items: Sequence[PackItem]
    indices: Sequence[int]  # of the items among all
    row_tokens: int
    rows: int  # of a micro-batch
    mesh: Mesh

    def arranged(self, config: StepConfig, group_size: int) -> list[list[Place]]:
        """Return the places of the items in each row, as `data.packing.pack` takes them."""
        share, whole = config.share_prefixes, config.whole_sequences
        return arrange(self.items, self.row_tokens, group_size, share, keep_whole=whole)

    def microbatches(self, config: StepConfig, group_size: int) -> int:
        """Return how many micro-batches the items take."""
        return -(-len(self.arranged(config, group_size)) // self.rows)


def row_groups(
    items: Sequence[PackItem], config: StepConfig, rows: int, *, mesh: Mesh, group_size: int = 1
) -> list[RowGroup]:
    """Divide the items by their tokens if the mesh divides the tokens of a row.

    Context parallelism costs short items its exchanges and gains them nothing. Items that fit a device's
    share of a row have rows of that length, one for each device; some fill the rows of longer items. All
    micro-batches have the same number of tokens on a device; their number is the smallest of three divisions:
    longer items by themselves, with short ones beside them, and all together.

    Args:
        rows: of a micro-batch of rows that devices share.
        group_size: consecutive items that are compared, and stay together.
    """
    # Devices share no row: all rows are of one kind.
    everything, shapes = range(len(items)), row_shapes(config.row_tokens, rows, mesh)
    together = [RowGroup(items, everything, *shapes[0])]
    if len(shapes) == 1 or not items:
        return together
    length, short = config.row_tokens, shapes[1].row_tokens

    def divided(is_long: Sequence[bool]) -> list[RowGroup]:
        members = [[i for i in everything if is_long[i // group_size] == long] for long in (True, False)]
        groups = [
            RowGroup([items[i] for i in own], own, *shape) for own, shape in zip(members, shapes, strict=True)
        ]
        return [group for group in groups if group.items]

    # Long by the tokens of a device's share, or because long rows have room.
    count = lambda groups: sum(group.microbatches(config, group_size) for group in groups)
    units = [items[i : i + group_size] for i in range(0, len(items), group_size)]
    tokens = [row_tokens(unit, config.share_prefixes) for unit in units]
    long = [n > short for n in tokens]
    apart, filled = divided(long), list(long)
    if any(long):
        free = count(apart[:1]) * rows * length - sum(itertools.compress(tokens, long))
        for unit, n in enumerate(tokens):
            if not long[unit] and n <= free:
                filled[unit], free = True, free - n
    return min(apart, divided(filled), together, key=count)
