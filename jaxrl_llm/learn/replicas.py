"""Gradients of data-parallel replicas, which are added once an update.

The denominators of a loss are of the copied mini-batch (`BatchTotals`), so the rows of a replica are like a
micro-batch: their gradients and metrics are one more term of a plain sum, whenever it is taken. Each replica
keeps its terms in its own memory until the update, so that the axis `data` may cross slow links: gradients
cross them once an update, not once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algos.reduce import is_max
from jaxrl_llm.learn.reference import TeacherOutputs
from jaxrl_llm.sharding.config import REPLICA_AXIS as AXIS
from jaxrl_llm.structs import Params


def by_replica(accumulate: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Return `update.accumulate` whose gradients and metrics have a leading dim of replicas.

    The result is manual over `data` alone; the partitioner divides everything else. With one replica it is
    `accumulate` itself, without that dim.
    """
    if mesh.shape[AXIS] == 1:
        return accumulate

    def local(trained, grads, arrays):
        grads = grads and jax.tree.map(lambda g: g[0], grads)
        grads, metrics, logprobs = accumulate(trained, grads, arrays)
        return *jax.tree.map(lambda x: x[None], (grads, metrics)), logprobs

    def mapped(trained, grads, arrays):
        rows, copied = PartitionSpec(AXIS), PartitionSpec()
        teachers = tuple(_teacher_spec(teacher, rows, copied) for teacher in arrays.teachers)
        inputs = copied, rows, type(arrays)(rows, copied, teachers, copied)
        manual = jax.shard_map(local, in_specs=inputs, out_specs=rows, axis_names={AXIS}, check_vma=False)
        return manual(trained, grads, arrays)

    return mapped


def _teacher_spec(teacher: Any, rows: PartitionSpec, copied: PartitionSpec) -> Any:
    """Return the spec of a teacher: its weights are on every replica, hidden states of rows are divided."""
    is_placed = isinstance(teacher, TeacherOutputs)
    return TeacherOutputs(rows, copied, teacher.config) if is_placed else copied


def replica_shardings(shardings: Params, mesh: Mesh) -> Params:
    """Return the shardings of gradients with a leading dim of replicas."""
    if mesh.shape[AXIS] == 1:
        return shardings
    return jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(AXIS, *s.spec)), shardings)


def zero_gradients(trained: Params, dtype: Any, mesh: Mesh) -> Params:
    """Return zeros for the gradients of all replicas."""
    replicas = (mesh.shape[AXIS],) * (mesh.shape[AXIS] > 1)
    return jax.tree.map(lambda weight: jnp.zeros((*replicas, *weight.shape), dtype), trained)


def with_replicas_added(apply: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Return `update.apply` for gradients and metrics with a leading dim of replicas."""
    if mesh.shape[AXIS] == 1:
        return apply

    def added(state, grads, metrics, num_sequences):
        total = lambda x: jnp.sum(x, axis=0)
        largest = lambda x: jnp.max(x, axis=0)
        metrics = {name: jax.tree.map(largest if is_max(name) else total, x) for name, x in metrics.items()}
        return apply(state, jax.tree.map(total, grads), metrics, num_sequences)

    return added
