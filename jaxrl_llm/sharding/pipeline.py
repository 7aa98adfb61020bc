"""Pipeline: each stage of the mesh computes an equal part of the layers, chunk of rows after chunk.

Outside the layers `stage` is one more axis that divides rows. Each of S stages holds r chunks, C = S r in
all, and at tick t stage s computes chunk t - s. It hands the result to the next stage; the first stage takes
chunks from a stream of rows that moves one stage towards it every r ticks, and the last puts results into the
stream, which brings each to the stage that it came from. C chunks take C + S - 1 ticks, so the bubble is
(S - 1) / (C + S - 1) (GPipe, arXiv 1811.06965).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from jaxrl_llm.sharding.rules import TRAIN, constrain, current_sizes, num_shards

AXIS = TRAIN["layers"]
STAGES = PartitionSpec(AXIS)
INPUTS = STAGES, STAGES, STAGES, PartitionSpec()


def bubble_work(rows: int, sizes: Mapping[str, int]) -> float:
    """Return the work of the bubble, (S - 1) / C, relative to the work on C chunks of a micro-batch.

    Args:
        rows: of the micro-batch.
        sizes: as of `num_shards`.
    """
    return (num_shards("layers", sizes) - 1) * num_shards("batch_of_stage", sizes) / rows


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
        stage = functools.partial(_run_stage, layers=layers, stages=stages)
        x, sums, of_both = _on_stages(stage, inputs)
        return _join(x), sums, jax.tree.map(functools.partial(_join, dim=1), of_both)

    return layers if stages == 1 else apply


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_stages(stage: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply `_run_stage` on every stage.

    The transpose of a `shard_map` returns gradients, and in it every tick would write those of all weights to
    a new array. Here ticks and layers add to one buffer, as micro-batches do (`finite.add_gradients`).
    """
    return _map_stages(stage, INPUTS, STAGES)(*inputs)


def _forward(stage: Callable[..., Any], inputs: tuple[Any, ...]):
    moved, still = _split(lambda x: x.perturbed, inputs)
    moved, still = jax.tree.map(lambda x: x.value, (moved, still))

    def local(moved, still):
        run = lambda moved: _split(
            lambda x: jnp.issubdtype(x.dtype, jnp.floating), stage(*_merge(moved, still))
        )
        out, backward, others = jax.vjp(run, moved, has_aux=True)
        return out, others, jax.tree.map(lambda x: x[None], backward)

    out, others, backward = _map_stages(local, (INPUTS, INPUTS), STAGES)(moved, still)
    return _merge(out, others), (moved, backward)


def _backward(stage: Callable[..., Any], residuals, gradients):
    def local(moved, backward, gradients):
        buffers = jax.tree.map(lambda w: jax.new_ref(jnp.zeros_like(w)), moved[1])
        others = jax.tree.map(lambda x: 0, (moved[0], *moved[2:]))
        backward = jax.tree.map(lambda x: x[0], backward).with_refs((others[0], buffers, *others[1:]))
        x, _, *rest = backward(gradients)[0]
        return x, jax.tree.map(jax.freeze, buffers), *rest

    gradients, _ = _split(lambda x: jnp.issubdtype(x.dtype, jnp.floating), gradients)
    is_zero = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)
    gradients = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if is_zero(x) else x, gradients, is_leaf=is_zero
    )
    return (_map_stages(local, (INPUTS, STAGES, STAGES), INPUTS)(*residuals, gradients),)


_on_stages.defvjp(_forward, _backward, symbolic_zeros=True)


def _map_stages(function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
    return jax.shard_map(function, in_specs=inputs, out_specs=outputs, axis_names={AXIS}, check_vma=False)


def _split(is_first: Callable[[Any], bool], tree: Any) -> tuple[Any, Any]:
    """Return the tree with the leaves of which the function is true, and with the others; None = missing."""
    pick = lambda wanted: jax.tree.map(lambda x: x if bool(is_first(x)) == wanted else None, tree)
    return pick(True), pick(False)


def _merge(first: Any, second: Any) -> Any:
    """Invert `_split`."""
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None)


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

    def tick(carry, inputs):
        (x, stream), (t, *of_chunk) = carry, inputs
        slot = t % held
        first = stream[slot]
        x, sums, both = layers(jnp.where(stage == 0, first, x), of_layers, *of_chunk)
        # Before its first chunk and after its last, the results of a stage are not read.
        is_chunk = (t >= stage) & (t < stage + chunks)
        sums = jax.tree.map(lambda x: jnp.where(is_chunk, x, 0), sums)
        following = jnp.where(stage == stages - 1, x, jax.lax.ppermute(first, AXIS, to_last))
        stream = jax.lax.dynamic_update_index_in_dim(stream, following, slot, 0)
        return (jax.lax.ppermute(x, AXIS, to_next), stream), (sums, both)

    ticks = jnp.arange(chunks + stages - 1)
    number = jnp.clip(ticks - stage, 0, chunks - 1)
    both = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[number], of_both)
    inputs = ticks, both, jax.tree.map(lambda x: x[number], of_rows)
    (_, stream), (sums, both) = jax.lax.scan(tick, (stream[0], stream), inputs)
    own = lambda x: jnp.moveaxis(jax.lax.dynamic_slice_in_dim(x, stage, chunks), 0, 1)
    total = lambda x: jnp.sum(x, axis=0, dtype=x.dtype)
    return jnp.roll(stream, 1 - stages, axis=0), jax.tree.map(total, sums), jax.tree.map(own, both)
