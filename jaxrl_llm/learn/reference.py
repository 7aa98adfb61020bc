"""Frozen models of an update: the reference policy of the KL penalty, and teachers on a separate mesh."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from jaxrl_llm import models
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.errors import UserError
from jaxrl_llm.learn.scoring import PendingScores, Scorer
from jaxrl_llm.models import TransformerConfig, lora
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
        """Return the hidden states; takes the arguments of `Transformer`."""
        return self.hidden


class PlacedTeachers:
    """Teachers whose hidden states are computed on a separate mesh, then sent to the policy's mesh.

    Their devices are at most one micro-batch ahead of the policy's devices.

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
        rows = batch.tokens, batch.positions, batch.segments, batch.last
        rows = reshard(rows, jax.tree.map(lambda x: row_sharding(self.model.mesh, x.shape), rows))
        with jax.set_mesh(self.model.mesh):
            hidden = [self._forward(teacher, rows) for teacher in self.teachers]
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

    def _hidden(self, teacher: Params, rows: tuple[jax.Array | None, ...]) -> Float[Array, "B T D"]:
        config, (tokens, positions, segments, last) = self.model.config, rows
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
        return sharding_for(self.mesh, ("vocab", "table_embed"), head.shape, TRAIN)


def _head_of(teacher: Params) -> Float[Array, "V D"]:
    """Return a copy of the LM head on the devices: an offloaded teacher's head is in host memory."""
    return teacher.head


Teachers = Sequence[Params] | PlacedTeachers
"""Teachers as an update takes them: their weights on the policy's mesh, or elsewhere."""


def teachers_of(batch: Batch, teachers: Teachers) -> tuple:
    """Return the teachers as the programs of a micro-batch read them."""
    return teachers.outputs(batch) if isinstance(teachers, PlacedTeachers) else tuple(teachers)


class Reference:
    """Weights at the start of the last stage of a run, or of another model, in the compute type.

    Without an SFT warm-up they are the initial weights, loaded or initialised again when needed; after one
    they are saved once, in run_dir/reference. The reference of a model with adapters is another set of
    adapters on the same frozen weights.

    Args:
        initial: returns the initial weights.
        abstract: shapes and shardings of the policy's weights, to restore saved weights.
        mesh: of the reference, which then holds a copy of all its weights; None = the policy's.
        offload: keep them in host memory.
        pretrained: returns the weights of another model, which is the reference all along; None = none.
        adapter: weights by name of the adapters that the run starts from; {} = new ones, without effect.
    """

    def __init__(
        self,
        run_dir: Path,
        dtype: str,
        initial: Callable[[], Params],
        abstract: Params,
        *,
        mesh: Mesh | None = None,
        offload: bool = False,
        pretrained: Callable[[], Params] | None = None,
        adapter: Mapping[str, np.ndarray] = MappingProxyType({}),
    ):
        self.run_dir, self.dtype, self.initial, self.abstract = run_dir, dtype, initial, abstract
        self.mesh, self.offload, self.pretrained, self.adapter = mesh, offload, pretrained, adapter
        self.weights: Params | None = None
        self.placed: Params | None = None

    def params(self, start: int, step: int, current: Params) -> Params:
        """Return the reference of a stage.

        Args:
            start: first step of the stage.
            step: the step about to be taken.
            current: present weights of the policy.
        """
        if self.pretrained:
            self.placed = self.pretrained() if self.placed is None else self.placed
            return self.placed
        if self.mesh is None:
            return self._shared(start, step, current)
        if self.placed is None:
            trained, frozen = lora.split_params(self._shared(start, step, current))
            if current.config.lora:  # the policy's adapters are donated to its next update
                trained = jax.tree.map(jnp.copy, trained)
            shardings = models.shardings(current.config, self.mesh, TRAIN)
            placed = reshard(lora.join_params(trained, frozen), shardings)
            self.placed = models.to_host(placed) if self.offload else placed
            self.weights = None
        return self.placed

    def _shared(self, start: int, step: int, current: Params) -> Params:
        """Return the reference, which shares the policy's arrays where the policy does not change them."""
        if current.config.lora and not start and not self.adapter:
            return lora.base(current)  # the frozen weights themselves
        if self.weights is None and start:
            self.weights = self._saved(step == start, current)
        elif self.weights is None:
            self.weights = self._frozen(self._first_adapters(current) if self.adapter else self.initial())
        if current.config.lora:
            return lora.join_params(self.weights, lora.split_params(current)[1])
        return self.weights

    def _first_adapters(self, current: Params) -> Params:
        return lora.split_params(lora.replace_weights(current, self.adapter))[0]

    def _saved(self, is_start: bool, current: Params) -> Params:
        current, abstract = lora.split_params(current)[0], lora.split_params(self.abstract)[0]
        settings = CheckpointConfig(keep=1, async_save=False, on_full_disk="stop")
        with contextlib.closing(Checkpointer(settings, self.run_dir / "reference")) as checkpointer:
            if is_start:
                checkpointer.save(0, current, {}, {})
                return self._frozen(current)
            restored = checkpointer.restore(abstract)
            if restored is None:
                raise UserError(
                    f"{self.run_dir / 'reference'} is missing: this run cannot restore its reference model; "
                    "start a new run with another --run_dir."
                )
            return self._frozen(restored[1])

    def _frozen(self, params: Params) -> Params:
        frozen = freeze(params, self.dtype)
        return models.to_host(frozen) if self.offload and self.mesh is None else frozen


KEY_BYTES = 16  # of a row in the cache


class LogprobCache:
    """Least-recently-used cache of the reference log-probs of dataset rows, which repeat every epoch.

    The key is a hash of a row's tokens and mask: log-probs are computed only where the mask is 1. Checkpoints
    store the cache: recomputed log-probs, packed with other rows, may differ in their last bits.

    Args:
        max_bytes: of the arrays that are kept.
    """

    def __init__(self, max_bytes: int = 2**28):
        self.max_bytes, self.size = max_bytes, 0
        self.computed: list[int] = []  # tokens of each row that was not here, at the last start of the model
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def get(self, item: PackItem) -> np.ndarray | None:
        """Return the log-probs of a row, or None."""
        key = self._key(item)
        if key in self._rows:
            self._rows.move_to_end(key)
        return self._rows.get(key)

    def put(self, item: PackItem, logprobs: np.ndarray) -> None:
        self._put(self._key(item), logprobs)

    def pack(self) -> bytes:
        """Return the rows as one .npz, least recently used first; b"" without rows."""
        if not self._rows:
            return b""
        rows, out = list(self._rows.values()), io.BytesIO()
        keys = np.frombuffer(b"".join(self._rows), np.uint8).reshape(len(rows), KEY_BYTES)
        np.savez(out, keys=keys, lengths=[len(row) for row in rows], logprobs=np.concatenate(rows))
        return out.getvalue()

    def unpack(self, data: bytes) -> None:
        """Add the rows of `pack`."""
        if data:
            arrays = np.load(io.BytesIO(data), allow_pickle=False)
            rows = np.split(arrays["logprobs"], np.cumsum(arrays["lengths"])[:-1])
            for key, logprobs in zip(arrays["keys"], rows, strict=True):
                self._put(key.tobytes(), logprobs)

    def _put(self, key: bytes, logprobs: np.ndarray) -> None:
        if key not in self._rows:
            self._rows[key] = logprobs
            self.size += logprobs.nbytes
        while self.size > self.max_bytes:
            self.size -= self._rows.popitem(last=False)[1].nbytes

    def _key(self, item: PackItem) -> bytes:
        row = item.tokens.tobytes() + np.asarray(item.mask, np.int8).tobytes()
        return hashlib.blake2b(row, digest_size=KEY_BYTES).digest()


def start_reference(
    model: Scorer, reference: Params, items: Sequence[PackItem], cache: LogprobCache | None
) -> Callable[[], None]:
    """Start the log-probs under the frozen reference; return the function that waits and writes them.

    Args:
        model: forward pass on the reference's mesh.
        cache: of log-probs of a dataset's rows; None = rows do not repeat.
    """
    if cache is None:
        return functools.partial(_write, items, model.start(reference, items))
    known = [cache.get(item) for item in items]
    new = complete_groups([i for i, row in enumerate(known) if row is None], model.group_size)
    cache.computed = [len(items[i].tokens) for i in new]
    pending = model.start(reference, [items[i] for i in new]) if new else list

    def write() -> None:
        for i, output in zip(new, pending(), strict=True):
            known[i] = output["logprobs"]
            cache.put(items[i], known[i])
        for item, row in zip(items, known, strict=True):
            item.signals["ref_logprobs"] = row

    return write


def start_teachers(
    model: Scorer, teachers: Sequence[Params], items: Sequence[PackItem]
) -> Iterator[Callable[[], None]]:
    """Start the log-probs of each item under its own teacher, which is its reference."""
    for index, teacher in enumerate(teachers):
        chosen = [item for item in items if round(float(item.signals["labels"][0])) == index]
        if chosen:
            yield functools.partial(_write, chosen, model.start(teacher, chosen))


def complete_groups(indices: Sequence[int], group_size: int) -> list[int]:
    """Return all members of the groups that these belong to."""
    groups = sorted({index // group_size for index in indices})
    return [group_size * group + i for group in groups for i in range(group_size)]


def _write(items: Sequence[PackItem], pending: PendingScores) -> None:
    for item, output in zip(items, pending(), strict=True):
        item.signals["ref_logprobs"] = output["logprobs"]


def freeze(params: Params, dtype: str) -> Params:
    """Return a copy in the types that the forward pass reads; the original is donated to the next update."""
    shardings = jax.tree.map(lambda x: x.sharding, params)  # else XLA may choose others, for other programs
    sharding = jax.tree.leaves(shardings)[0]
    cast = lambda params: models.cast_weights(jax.tree.map(jnp.copy, params), dtype)
    copy = jax.jit(cast, out_shardings=shardings)
    with jax.set_mesh(sharding.mesh) if isinstance(sharding, NamedSharding) else contextlib.nullcontext():
        return copy(params)
