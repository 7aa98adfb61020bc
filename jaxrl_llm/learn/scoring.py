"""Scoring: outputs of one model at each token, without gradient, on the model's own mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.data.packing import PackItem, arrange, empty_batch, pack, unpack
from jaxrl_llm.learn.moe_losses import ROUTES
from jaxrl_llm.learn.update import StepConfig, model_outputs
from jaxrl_llm.sharding.compile import compiler_options
from jaxrl_llm.sharding.rules import put_rows, row_sharding, with_shardings
from jaxrl_llm.structs import Batch, Metrics, Params, Program

Scores = list[dict[str, np.ndarray]]
PendingScores = Callable[[], Scores]
"""Waits for the scores of a model that has been started, and returns them."""


class Scorer:
    """Forward pass of one model on one mesh. Stateless: weights are arguments."""

    def __init__(self, config: StepConfig, mesh: Mesh, group_size: int = 1):
        self.config, self.mesh, self.group_size = config, mesh, group_size
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self._score = jax.jit(
            functools.partial(model_outputs, config=config),
            static_argnames=("names",),
            out_shardings=self.replicated,  # every process reads all of it
            compiler_options=compiler_options(mesh, gathers_weights=True),
        )

    def abstract_batch(self, signals: Sequence[str], rows: int, replay: bool = True) -> Batch:
        """Return shapes, types and shardings of a micro-batch with these signals."""
        route = self.config.replay.route if replay and self.config.replay else None
        c = self.config
        empty = empty_batch(rows, c.row_tokens, signals, route, c.share_prefixes, c.num_kept)
        return with_shardings(empty, jax.tree.map(lambda x: row_sharding(self.mesh, x.shape), empty))

    def score_program(self, params: Params, names: tuple[str, ...], replay: bool = False) -> Program:
        """Return the program that `start` runs for each micro-batch."""
        batch = self.abstract_batch((), self.config.rows_scored, replay)
        return Program(self._score, (params, batch), {"names": names})

    def put(self, batch: Batch) -> Batch:
        """Move host rows to the devices, divided among them. Every process holds the same host batch."""
        return put_rows(self.mesh, batch)

    def start(
        self,
        params: Params,
        items: Sequence[PackItem],
        names: tuple[str, ...] = ("logprobs",),
        replay: bool = False,
    ) -> PendingScores:
        """Dispatch `model_outputs` of each item, and return the function that waits for them.

        Nothing is read from the devices before, so that models on disjoint devices are scored at once.

        Args:
            replay: these are weights of the model whose routes the items have (`StepConfig.replay`).
        """
        bare = [PackItem(item.tokens, item.mask, routes=item.routes, kept=item.kept) for item in items]
        with jax.set_mesh(self.mesh):
            batches = self._batches(bare, self.config.rows_scored, replay)
            results = [self._score(params, batch, names=names) for batch in batches]

        def finish() -> Scores:
            by_name = {
                name: self.unpacked([r[name] for r in results], bare, name != ROUTES) for name in names
            }
            return [dict(zip(names, arrays, strict=True)) for arrays in zip(*by_name.values(), strict=True)]

        return finish

    def score(
        self, params: Params, items: Sequence[PackItem], names: tuple[str, ...] = ("logprobs",)
    ) -> Scores:
        """Return `model_outputs` of each item, [t] aligned with its tokens (the first is 0). No gradient."""
        return self.start(params, items, names)()

    def unpacked(
        self, values: Sequence[jax.Array], items: Sequence[PackItem], on_targets: bool = True
    ) -> list[np.ndarray]:
        """Return per-token values of micro-batches, [B, T, ...], as one array [t, ...] for each item."""
        values, c = [np.asarray(x) for x in values], self.config
        return unpack(values, items, c.row_tokens, self.group_size, on_targets, c.share_prefixes)

    def write_signal(
        self, name: str, minibatches: Sequence[Sequence[PackItem]], values: Sequence[Sequence[jax.Array]]
    ) -> None:
        """Write per-token values of the micro-batches of each mini-batch into the signals of its items.

        An item of several mini-batches keeps the values of the first.
        """
        for items, batches in zip(minibatches, values, strict=True):
            for item, array in zip(items, self.unpacked(batches, items), strict=True):
                item.signals.setdefault(name, array)

    def shared_tokens(self, items: Sequence[PackItem]) -> list[int]:
        """Return the lengths of the prefixes that items have in common with others of their rows."""
        c = self.config
        rows = arrange(items, c.row_tokens, self.group_size, share=True) if c.share_prefixes else []
        return [place.shared for row in rows for place in row if place.shared]

    def shared_fraction(self, minibatches: Sequence[Sequence[PackItem]]) -> Metrics:
        """Return the fraction of the tokens that was not computed, for a row has it once for several."""
        if not self.config.share_prefixes:
            return {}
        shared = sum(sum(self.shared_tokens(items)) for items in minibatches)
        return {
            "packing/shared_fraction": shared / sum(len(i.tokens) for items in minibatches for i in items)
        }

    def _batches(self, items: Sequence[PackItem], rows: int, replay: bool = True) -> list[Batch]:
        c, size = self.config, self.group_size
        replay = replay and c.replay is not None
        return [
            self.put(b) for b in pack(items, c.row_tokens, rows, size, replay, c.share_prefixes, c.num_kept)
        ]
