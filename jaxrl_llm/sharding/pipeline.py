"""Pipeline: each stage of the mesh computes an equal part of the layers, chunk of rows after chunk.

Outside the layers `stage` is one more axis that divides rows. Each of S stages holds r chunks, C = S r in
all, and at tick t stage s computes chunk t - s. It hands the result to the next stage; the first stage takes
chunks from a stream of rows that moves one stage towards it every r ticks, and the last puts results into the
stream, which brings each to the stage that it came from. C chunks take C + S - 1 ticks, so the bubble is
(S - 1) / (C + S - 1) (GPipe, arXiv 1811.06965).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from jaxrl_llm.sharding.rules import TRAIN, constrain, current_sizes, num_shards

AXIS = TRAIN["layers"]
STAGES, EVERYWHERE = PartitionSpec(AXIS), PartitionSpec()


def pipelined(layers: Callable[..., tuple[Array, Any, Any]], stages: int) -> Callable[..., Any]:
    """Return `layers` for all layers and rows, of which each stage calls it for its layers and one chunk.

    Args:
        stages: 1 = no pipeline.
        layers: (x [B, T, D], of_layers [L, ...], of_both [L, B, ...], of_rows [B, ...]) -> (x, sums over rows
            [L, ...], of_both); all but x are trees of arrays.
    """

    def apply(x: Float[Array, "B T D"], of_layers: Any, of_both: Any, of_rows: Any):
        parts = num_shards("batch_of_stage", current_sizes())
        if x.shape[0] % (stages * parts):
            raise ValueError(f"{x.shape[0]} rows on {stages} stages of {parts} replicas do not divide")
        cut = functools.partial(_cut, parts=parts)
        inputs = (
            constrain(cut(x), "layers", "batch_of_stage", "residual", "hidden"),
            of_layers,
            jax.tree.map(functools.partial(cut, dim=1), of_both),
            jax.tree.map(cut, of_rows),
        )
        run = jax.shard_map(
            functools.partial(_run_stage, layers=layers, stages=stages),
            in_specs=(STAGES, STAGES, STAGES, EVERYWHERE),
            out_specs=(STAGES, STAGES, STAGES),
            axis_names={AXIS},
            check_vma=False,
        )
        x, sums, of_both = run(*inputs)
        return _join(x), sums, jax.tree.map(functools.partial(_join, dim=1), of_both)

    return layers if stages == 1 else apply


def _cut(x: Shaped[Array, "*L B ..."], parts: int, dim: int = 0) -> Shaped[Array, "*L C P ..."]:
    """Return C chunks, each with a row of each of P replicas of a stage."""
    shape = (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    return jnp.swapaxes(x.reshape(shape), dim, dim + 1)


def _join(x: Shaped[Array, "*L C P ..."], dim: int = 0) -> Shaped[Array, "*L B ..."]:
    """Invert `_cut`."""
    x = jnp.swapaxes(x, dim, dim + 1)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _run_stage(stream, of_layers, of_both, of_rows, *, layers: Callable[..., Any], stages: int):
    """Run the ticks of one stage.

    Args:
        stream: x of this stage's r chunks [r, P, T, D].
        of_both, of_rows: of all chunks.
    """
    stage, held = jax.lax.axis_index(AXIS), len(stream)
    chunks = stages * held
    to_next = [(i, (i + 1) % stages) for i in range(stages)]
    to_last = [(j, i) for i, j in to_next]

    def tick(carry, t):
        x, stream = carry
        slot, number = t % held, jnp.clip(t - stage, 0, chunks - 1)
        first = stream[slot]
        pick = lambda dim: lambda x: jax.lax.dynamic_index_in_dim(x, number, dim, keepdims=False)
        rows = jax.tree.map(pick(1), of_both), jax.tree.map(pick(0), of_rows)
        x, sums, both = layers(jnp.where(stage == 0, first, x), of_layers, *rows)
        # Before its first chunk and after its last, the results of a stage are not read.
        is_chunk = number == t - stage
        sums = jax.tree.map(lambda x: jnp.where(is_chunk, x, 0), sums)
        following = jnp.where(stage == stages - 1, x, jax.lax.ppermute(first, AXIS, to_last))
        stream = jax.lax.dynamic_update_index_in_dim(stream, following, slot, 0)
        return (jax.lax.ppermute(x, AXIS, to_next), stream), (sums, both)

    (_, stream), (sums, both) = jax.lax.scan(tick, (stream[0], stream), jnp.arange(chunks + stages - 1))
    own = lambda x: jnp.moveaxis(jax.lax.dynamic_slice_in_dim(x, stage, chunks), 0, 1)
    total = lambda x: jnp.sum(x, axis=0, dtype=x.dtype)
    return jnp.roll(stream, 1 - stages, axis=0), jax.tree.map(total, sums), jax.tree.map(own, both)
