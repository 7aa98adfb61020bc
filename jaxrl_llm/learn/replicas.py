"""Gradients of data-parallel replicas, which are added once an update.

The denominators of a loss are of the whole mini-batch (`BatchTotals`), so the rows of a replica are like a
micro-batch: their gradients and metrics are one more term of a plain sum, whenever it is taken. Each replica
keeps its terms in its own memory until the update, so that the axis `data` may cross slow links: gradients
cross them once an update, not once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algos.reduce import is_max
from jaxrl_llm.learn.reference import TeacherOutputs
from jaxrl_llm.sharding.config import REPLICA_AXIS as AXIS

if TYPE_CHECKING:
    from jaxrl_llm.learn.update import StepConfig

ROWS, EVERYWHERE = PartitionSpec(AXIS), PartitionSpec()


class Replicas:
    """Functions of an update whose gradients and metrics have a leading dim of replicas.

    They are manual over `data` alone; the partitioner divides everything else. With one replica there is no
    such dim, and the functions are returned as they are. So they are on CPUs in low precision, where XLA
    aborts on sums of bfloat16 within a manual region (jaxlib 0.10.2): the partitioner then adds the gradients
    of all replicas once a micro-batch.
    """

    def __init__(self, mesh: Mesh, config: StepConfig):
        self.mesh, self.dtype = mesh, config.grad_dtype
        aborts = mesh.devices.flat[0].platform == "cpu" and {config.dtype, config.grad_dtype} != {"float32"}
        self.count = 1 if aborts else mesh.shape[AXIS]

    def shardings(self, shardings: Any) -> Any:
        """Return shardings of arrays with the leading dim."""
        if self.count == 1:
            return shardings
        return jax.tree.map(lambda s: NamedSharding(self.mesh, PartitionSpec(AXIS, *s.spec)), shardings)

    def zeros(self, trained: Any) -> Any:
        """Return the gradients of all replicas before the first micro-batch."""
        replicas = (self.count,) * (self.count > 1)
        return jax.tree.map(lambda weight: jnp.zeros((*replicas, *weight.shape), self.dtype), trained)

    def accumulate(self, accumulate: Callable[..., Any]) -> Callable[..., Any]:
        """Return `update.accumulate` in which each replica adds the gradients of its rows to its own."""
        if self.count == 1:
            return accumulate

        def local(trained, grads, arrays):
            grads, metrics, logprobs = accumulate(trained, grads and _without_dim(grads), arrays)
            return *jax.tree.map(lambda x: x[None], (grads, metrics)), logprobs

        def mapped(trained, grads, arrays):
            teachers = tuple(map(_teacher_spec, arrays.teachers))
            inputs = EVERYWHERE, ROWS, type(arrays)(ROWS, EVERYWHERE, teachers, EVERYWHERE)
            return self._manual(local, inputs, ROWS)(trained, grads, arrays)

        return mapped

    def add(self, grads: Any) -> Any:
        """Return gradients of which every replica has the sum. In place, if they are donated."""
        add = lambda grads: jax.tree.map(lambda g: jax.lax.psum(g, AXIS), grads)
        return self._manual(add, (ROWS,), ROWS)(grads)

    def apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Return `update.apply` for the results of `add`, and for metrics of each replica."""
        if self.count == 1:
            return apply

        def mapped(state, grads, metrics, num_sequences):
            total, largest = (lambda x: jnp.sum(x, axis=0)), (lambda x: jnp.max(x, axis=0))
            metrics = {
                name: jax.tree.map(largest if is_max(name) else total, x) for name, x in metrics.items()
            }
            grads = self._manual(_without_dim, (ROWS,), EVERYWHERE)(grads)
            return apply(state, grads, metrics, num_sequences)

        return mapped

    def _manual(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        return jax.shard_map(function, in_specs=inputs, out_specs=outputs, axis_names={AXIS}, check_vma=False)


def _without_dim(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _teacher_spec(teacher: Any) -> Any:
    """Return the spec of a teacher: its weights are on every replica, hidden states of rows are divided."""
    is_placed = isinstance(teacher, TeacherOutputs)
    return TeacherOutputs(ROWS, EVERYWHERE, teacher.config) if is_placed else EVERYWHERE
