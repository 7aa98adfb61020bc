"""Teachers on a mesh of their own, for losses that read their whole distributions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from jaxrl_llm.learn.scoring import Scorer
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.compile import compiler_options
from jaxrl_llm.sharding.placement import reshard
from jaxrl_llm.sharding.rules import TRAIN, row_sharding, sharding_for, with_shardings
from jaxrl_llm.structs import Batch, Params


@functools.partial(jax.tree_util.register_dataclass, data_fields=["hidden", "head"], meta_fields=["config"])
class TeacherOutputs:
    """A teacher's hidden states of one micro-batch, called as the teacher itself would be."""

    def __init__(self, hidden: Float[Array, "B T D"], head: Float[Array, "V D"], config: TransformerConfig):
        self.hidden, self.head, self.config = hidden, head, config

    def __call__(self, *args, **settings) -> Float[Array, "B T D"]:
        """Return the hidden states; the arguments are those of `Transformer`."""
        return self.hidden


class PlacedTeachers:
    """Teachers whose hidden states are computed on their own mesh, then sent to the policy's.

    Their devices are one micro-batch ahead at most of what the policy's read: nothing waits in between.

    Args:
        model: the forward pass on the teachers' mesh.
        teachers: their weights there.
        mesh: of the policy, which gets the LM heads once and hidden states for each micro-batch.
    """

    def __init__(self, model: Scorer, teachers: Sequence[Params], mesh: Mesh):
        self.model, self.teachers, self.mesh = model, teachers, mesh
        self._heads: list[jax.Array] = []
        self._forward = jax.jit(
            self._hidden, compiler_options=compiler_options(model.mesh, gathers_weights=True)
        )

    def outputs(self, batch: Batch) -> tuple[TeacherOutputs, ...]:
        """Return the outputs of all teachers for a micro-batch of the policy."""
        if not self._heads:
            with jax.set_mesh(self.model.mesh):
                heads = [jax.jit(_head_of)(teacher) for teacher in self.teachers]
            self._heads = [reshard(head, self._head_sharding(head)) for head in heads]
        inputs = batch.tokens, batch.positions, batch.segments, batch.last
        inputs = reshard(inputs, jax.tree.map(lambda x: row_sharding(self.model.mesh, x.shape), inputs))
        with jax.set_mesh(self.model.mesh):
            hidden = [self._forward(teacher, *inputs) for teacher in self.teachers]
        sent = [reshard(x, self._hidden_sharding(x.shape)) for x in hidden]
        return self._join(sent, self._heads)

    def abstract_outputs(self, batch: Batch) -> tuple[TeacherOutputs, ...]:
        """Return shapes, types and shardings of `outputs`, of abstract teachers."""
        dtype, (rows, tokens) = jnp.dtype(self.model.config.dtype), batch.tokens.shape
        shapes = [(rows, tokens, teacher.config.hidden_size) for teacher in self.teachers]
        hidden = [
            with_shardings(jax.ShapeDtypeStruct(shape, dtype), self._hidden_sharding(shape))
            for shape in shapes
        ]
        heads = [jax.eval_shape(_head_of, teacher) for teacher in self.teachers]
        return self._join(hidden, [with_shardings(head, self._head_sharding(head)) for head in heads])

    def _hidden(self, teacher: Params, tokens, positions, segments, last) -> Float[Array, "B T D"]:
        config = self.model.config
        return teacher(
            tokens,
            positions,
            segments,
            last=last,
            dtype=jnp.dtype(config.dtype),
            sequence_parallel=config.sequence_parallel,
        )

    def _join(self, hidden: Sequence, heads: Sequence) -> tuple[TeacherOutputs, ...]:
        parts = zip(hidden, heads, self.teachers, strict=True)
        return tuple(TeacherOutputs(x, head, teacher.config) for x, head, teacher in parts)

    def _hidden_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        return sharding_for(self.mesh, ("batch", "sequence", "hidden"), shape, TRAIN)

    def _head_sharding(self, head: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
        return sharding_for(self.mesh, ("vocab", "embed"), head.shape, TRAIN)


def _head_of(teacher: Params) -> Float[Array, "V D"]:
    """Return a copy of the LM head on the devices: that of an offloaded teacher is in host memory."""
    return teacher.head


Teachers = Sequence[Params] | PlacedTeachers
"""Teachers as an update takes them: their weights on the policy's mesh, or elsewhere."""


def teachers_of(batch: Batch, teachers: Teachers) -> tuple:
    """Return the teachers as the programs of a micro-batch read them."""
    return teachers.outputs(batch) if isinstance(teachers, PlacedTeachers) else tuple(teachers)
