"""Scoring: outputs of one model at each token, without gradient, on the model's own mesh."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algos.contract import Requirements
from jaxrl_llm.data.packing import PackItem, arrange, branches_of, empty_batch, pack, row_tokens, unpack
from jaxrl_llm.learn.moe_losses import ROUTES, Replay
from jaxrl_llm.learn.row_groups import RowGroup, RowShape, row_groups, row_shapes
from jaxrl_llm.learn.update import StepConfig, model_outputs
from jaxrl_llm.sharding.compile import Program, bucket, compiler_options
from jaxrl_llm.sharding.rules import num_shards, put_rows, row_sharding, with_shardings
from jaxrl_llm.structs import Batch, Metrics, Params, Sharing

Scores = list[dict[str, np.ndarray]]
PendingScores = Callable[[], Scores]
"""Waits for the scores of a model that has been started, and returns them."""
SHORTEST_ROW = 64  # tokens


def run_on_rows(program: Callable, batch: Batch, *args: Any, **static: Any) -> Any:
    """Call program(*args) on the mesh of these rows; on several CPU devices, wait for it.

    XLA's CPU client lets 32 programs wait on a device. When collectives are among them and the queue is
    full, devices wait for each other for ever.
    """
    mesh = batch.tokens.sharding.mesh
    with jax.set_mesh(mesh):
        outputs = program(*args, **static)
    several_cpus = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    return jax.block_until_ready(outputs) if several_cpus else outputs


class Scorer:
    """Forward pass of one model on one mesh. Stateless: weights are arguments."""

    def __init__(self, config: StepConfig, mesh: Mesh, group_size: int = 1):
        self.config, self.mesh, self.group_size = config, mesh, group_size
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.run = jax.jit(
            functools.partial(model_outputs, config=config),
            static_argnames=("names",),
            out_shardings=self.replicated,  # every process reads all of it
            compiler_options=compiler_options(mesh, gathers_weights=True),
        )

    def shapes(self, rows: int) -> list[RowShape]:
        """Return `row_shapes`, the first of `rows` rows."""
        return row_shapes(self.config.row_tokens, rows, self.mesh)

    def abstract_batch(self, signals: Sequence[str], shape: RowShape, replay: bool = True) -> Batch:
        """Return shapes, types and shardings of a micro-batch with these signals."""
        route = self.config.replay.route if replay and self.config.replay else None
        empty = empty_batch(
            shape.rows,
            shape.row_tokens,
            signals,
            route,
            share=self.config.share_prefixes,
            num_kept=self.config.num_kept,
        )
        return with_shardings(empty, jax.tree.map(lambda x: row_sharding(shape.mesh, x.shape), empty))

    def score_programs(self, params: Params, names: tuple[str, ...], replay: bool = False) -> list[Program]:
        """Return the program that `start` runs for the micro-batches of each shape."""
        batches = [self.abstract_batch((), shape, replay) for shape in self.shapes(self.config.rows_scored)]
        return [Program(self.run, (params, batch), {"names": names}) for batch in batches]

    def outputs(self, params: Params, batch: Batch, names: tuple[str, ...]) -> dict[str, jax.Array]:
        """Dispatch `model_outputs` of one micro-batch."""
        return run_on_rows(self.run, batch, params, batch, names=names)

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
        bare = [replace(item, signals={}) for item in items]
        with jax.set_mesh(self.mesh):
            batches = self.batches(bare, self.config.rows_scored, replay)
            results = [self.outputs(params, batch, names=names) for batch in batches]

        def finish() -> Scores:
            by_name = {
                name: self.unpacked([r[name] for r in results], bare, name != ROUTES) for name in names
            }
            return [dict(zip(names, arrays, strict=True)) for arrays in zip(*by_name.values(), strict=True)]

        return finish

    def unpacked(
        self, values: Sequence[jax.Array], items: Sequence[PackItem], on_targets: bool = True
    ) -> list[np.ndarray]:
        """Return per-token values of micro-batches, [B, T, ...], as one array [t, ...] for each item."""
        values, arrays = [np.asarray(x) for x in values], {}
        rows = values[0].shape[0] * values[0].shape[1] // self.config.row_tokens if values else 0
        for group in self._row_groups(items, rows):
            own = [x for x in values if x.shape[1] == group.row_tokens]
            found = unpack(
                own,
                group.items,
                group.row_tokens,
                self.group_size,
                on_targets=on_targets,
                share=self.config.share_prefixes,
                keep_whole=self.config.whole_sequences,
            )
            arrays |= zip(group.indices, found, strict=True)
        return [arrays[i] for i in range(len(items))]

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
        """Return the lengths of the prefixes that contexts have in common with others of their rows."""
        if not self.config.share_prefixes:
            return []
        groups = self._row_groups(items, self.config.rows)
        rows = [row for group in groups for row in group.arranged(self.config, self.group_size)]
        return [place.shared for row in rows for place in row if place.shared]

    def shared_fraction(self, minibatches: Sequence[Sequence[PackItem]]) -> Metrics:
        """Return the fraction of tokens saved by prefix sharing."""
        if not self.config.share_prefixes:
            return {}
        shared = sum(sum(self.shared_tokens(items)) for items in minibatches)
        total = sum(len(branch.item.tokens) for items in minibatches for branch in branches_of(items))
        return {"packing/shared_fraction": shared / total}

    def batches(self, items: Sequence[PackItem], rows: int, replay: bool = True) -> list[Batch]:
        """Return the micro-batches that `data.packing.pack` makes of these items, on the devices."""
        c, packed = self.config, []
        for group in self._row_groups(items, rows):
            batches = pack(
                group.items,
                group.row_tokens,
                group.rows,
                self.group_size,
                replay=replay and c.replay is not None,
                share=c.share_prefixes,
                keep_whole=c.whole_sequences,
                num_kept=c.num_kept,
            )
            packed += [put_rows(group.mesh, batch) for batch in batches]
        return packed

    def _row_groups(self, items: Sequence[PackItem], rows: int) -> list[RowGroup]:
        return row_groups(items, self.config, rows, mesh=self.mesh, group_size=self.group_size)


def policy_scores(requires: Requirements, config: StepConfig) -> tuple[str, ...]:
    """Return the outputs of the policy that are computed before the first update of a step."""
    return (
        ("logprobs",) * (config.old_logprobs_source == "recompute")
        + (ROUTES,) * (config.replay is not None and config.replay.source == "old")
        + ("sum_pi_squared",) * requires.sum_pi_squared
        + ("entropy",) * requires.old_entropy
        + ("values",) * requires.values
    )


def bucketed_step(
    dtype: str, *, temperature: float = 1.0, share_prefixes: Sharing = False, replay: Replay | None = None
) -> StepConfig:
    """Return the settings of a `BucketedScorer`, for log-probs and scores without a recipe."""
    return StepConfig(
        row_tokens=SHORTEST_ROW,
        rows=1,
        dtype=dtype,
        temperature=temperature,
        share_prefixes=share_prefixes,
        replay=replay,
    )


class BucketedScorer:
    """Score sequences of any length in micro-batches of few shapes, each of which compiles once.

    Args:
        config: settings of the forward pass; its `row_tokens` and `rows` are not read.
        batch_tokens: tokens of one forward pass on all devices, padding included; a longer sequence is a
            row by itself.
    """

    def __init__(self, config: StepConfig, mesh: Mesh, batch_tokens: int):
        self.config, self.mesh, self.batch_tokens = config, mesh, batch_tokens
        self.scorers: dict[tuple[int, int], Scorer] = {}  # (tokens of a row, rows) -> scorer

    def start(
        self,
        params: Params,
        items: Sequence[PackItem],
        names: tuple[str, ...] = ("logprobs",),
        replay: bool = False,
    ) -> PendingScores:
        """Do what `Scorer.start` does. Neighbours of equal `prompt` are in one row, if a pass has room."""
        pending = []
        for shape, indices in self._buckets(items):
            scorer = self.scorers.get(shape)
            if scorer is None:
                step = replace(self.config, row_tokens=shape[0], rows=shape[1])
                scorer = self.scorers[shape] = Scorer(step, self.mesh)
            chosen = [items[i] for i in indices]
            pending.append((indices, scorer.start(params, chosen, names=names, replay=replay)))

        def finish() -> Scores:
            found = {}
            for indices, wait in pending:
                found |= dict(zip(indices, wait(), strict=True))
            return [found[i] for i in range(len(items))]

        return finish

    def _buckets(self, items: Sequence[PackItem]) -> list[tuple[tuple[int, int], list[int]]]:
        """Return ((tokens of a row, rows of a micro-batch), indices of the items) of each width."""
        share, shards = self.config.share_prefixes, num_shards("batch", self.mesh.shape)
        by_width: dict[int, list[int]] = {}
        prompt_of = lambda i: -1 - i if items[i].prompt is None or not share else items[i].prompt
        for _, group in itertools.groupby(range(len(items)), key=prompt_of):
            group = list(group)
            width = bucket(max(len(items[i].tokens) for i in group), SHORTEST_ROW)
            whole = bucket(row_tokens([items[i] for i in group], share), SHORTEST_ROW)
            width = whole if whole * shards <= self.batch_tokens else width
            by_width.setdefault(width, []).extend(group)
        buckets = []
        for width, indices in sorted(by_width.items()):
            needed = len(arrange([items[i] for i in indices], width, share=share))
            rows = min(1 << (needed - 1).bit_length(), max(self.batch_tokens // width, 1))
            buckets.append(((width, -(-rows // shards) * shards), indices))
        return buckets


def sequence_scorer(dtype: str, mesh: Mesh):
    """Return the trainer's log-probs of one sequence, a `bridge.probe.SequenceScorer`.

    Args:
        dtype: type of the forward pass.
    """

    @functools.cache
    def scorer(temperature: float, replay: Replay | None) -> BucketedScorer:
        return BucketedScorer(
            bucketed_step(dtype, temperature=temperature, replay=replay), mesh, SHORTEST_ROW
        )

    def logprobs(
        params: Params, ids: np.ndarray, temperature: float = 1.0, routes: np.ndarray | None = None
    ) -> np.ndarray:
        replay = None
        if routes is not None:
            replay = Replay("rollout", jax.ShapeDtypeStruct(routes.shape[1:], routes.dtype))
        item = PackItem(np.asarray(ids, np.int32), np.ones(len(ids), np.float32), routes=routes)
        [outputs] = scorer(temperature, replay).start(params, [item], replay=replay is not None)()
        return outputs["logprobs"][1:]

    return logprobs
