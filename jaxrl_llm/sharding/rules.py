"""Sharding rules: one table from logical axes of arrays to mesh axes, and shardings made from it."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels.batch_invariant import rounded

HOST = "pinned_host"
Rules = Mapping[str, str | tuple[str, ...] | None]

TRAIN: Rules = {
    # activations
    "batch": ("data", "fsdp", "expert", "stage", "rows"),
    "batch_of_stage": ("data", "fsdp", "expert", "rows"),
    "sequence": "sequence",
    "residual": ("sequence", "tensor"),  # tokens between the blocks of a layer
    "hidden": None,
    "copies": "data",  # rows, if every reader of a copy of a weight is on its devices
    # weights
    "layers": "stage",
    "embed": ("fsdp", "sequence", "rows", "expert"),
    "table_embed": ("fsdp", "sequence", "rows", "expert", "stage"),  # of the embedding and the head
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
    "expert_embed": ("fsdp", "sequence", "rows"),
    "expert_mlp": "tensor",
    "router": None,
    "latent": ("fsdp", "sequence", "rows", "expert"),  # of latent attention: inputs of the second projection
    "compressed": None,  # of latent attention: outputs of the first projection
    "norm": None,
    "conv": None,
    "rank": None,
}
"""Training and scoring: weights are sharded over fsdp, sequence, expert and tensor; rows over data, fsdp and
expert. Experts are divided over expert, and each expert's matrices over the other axes. The axis rows is
sequence in a mesh for rows that are whole on a device (`placement.with_whole_rows`)."""

GATHERED: Rules = {**TRAIN, **{"embed": None, "table_embed": None, "latent": None, "expert_embed": None}}
"""Weights of training and scoring in a product: gathered over all axes except tensor and expert."""

ROLLOUT: Rules = {
    **TRAIN,
    **{"layers": None, "embed": None, "table_embed": None, "latent": None},
    **{"experts": ("data", "stage", "fsdp", "sequence", "expert"), "expert_embed": None},
}
"""Decoding reads every weight for every token: each replica holds all weights, sharded over tensor only.
Experts are divided among all replicas, and tokens are sent to the experts that they choose."""


def num_shards(axis: str, sizes: Mapping[str, int], rules: Rules = TRAIN) -> int:
    """Return the number of shards of a logical axis.

    Args:
        axis: "batch" for the number of devices with different rows, "sequence" for the degree of context
            parallelism, "heads" for the degree of tensor parallelism, "layers" for the stages of a pipeline,
            or another key of `rules`.
        sizes: mesh axis -> size: `mesh.shape`, or `MeshConfig.resolved_sizes` before a mesh exists; an axis
            that is missing has size 1.
    """
    return math.prod(sizes.get(name, 1) for name in axes_of(rules[axis]))


def partition_spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """Return the PartitionSpec of an array whose dims have these logical axes.

    Raises:
        ValueError: an axis is not in the table, or a mesh axis shards two dims.
    """
    unknown = [a for a in axes if a is not None and a not in rules]
    if unknown:
        raise ValueError(f"sharding: no rule for logical axis {unknown[0]!r}; known: {sorted(rules)}")
    entries = [None if a is None else rules[a] for a in axes]
    used = [name for entry in entries for name in axes_of(entry)]
    if len(used) != len(set(used)):
        raise ValueError(f"sharding: {axes} maps a mesh axis to two dims: {entries}")
    return PartitionSpec(*entries)


def sharding_for(
    mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules
) -> NamedSharding:
    """Return the sharding of one array; a dim that its mesh axes do not divide evenly is replicated (2 kv
    heads on tensor=4).

    Mesh axes that do not divide the number of experts (60 on fsdp=8) shard each expert's hidden states
    instead, or else its inputs and outputs (60 of 1,408 on fsdp=256), which are gathered for a layer. Stages
    that do not divide the layers shard the inputs and outputs of each.
    """
    return NamedSharding(mesh, dividing_spec(mesh.shape, axes, shape, rules))


def dividing_spec(
    sizes: Mapping[str, int], axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules
) -> PartitionSpec:
    """Return the PartitionSpec of `sharding_for` on a mesh of these axis sizes."""
    present = lambda entry: tuple(name for name in axes_of(entry) if name in sizes)
    names = dict(zip(axes, map(present, partition_spec(axes, rules)), strict=True))
    dims = dict(zip(axes, shape, strict=True))
    divides = lambda axis, by: dims[axis] % math.prod(sizes[name] for name in by) == 0
    takers_of = {
        "experts": ("experts", *("expert_mlp", "expert_embed") * ("expert_mlp" in names)),
        "layers": ("layers", "expert_embed", "embed", "latent"),
    }
    fitting = {axis: by if axis not in takers_of and divides(axis, by) else () for axis, by in names.items()}
    for dim, takers in takers_of.items():
        for name in names.get(dim, ()):
            able = (axis for axis in takers if axis in names and divides(axis, (*fitting[axis], name)))
            if axis := next(able, None):
                fitting[axis] += (name,)
    return PartitionSpec(*(by[0] if len(by) == 1 else by or None for by in map(fitting.get, axes)))


def current_spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules = TRAIN
) -> PartitionSpec | None:
    """Return the spec of `sharding_for` under the current mesh (`jax.set_mesh`); None on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else dividing_spec(current_sizes(), axes, shape, rules)


def current_sizes() -> dict[str, int]:
    """Return axis -> size of the current mesh, without axes that a surrounding `shard_map` has divided."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: size for name, size in mesh.shape.items() if name not in mesh.manual_axes}


def constrain(x: jax.Array, *axes: str | None, rules: Rules = TRAIN) -> jax.Array:
    """Constrain the sharding of an activation under the current mesh; on one device, return x."""
    spec = current_spec(axes, x.shape, rules)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def constrain_residual(x: jax.Array) -> jax.Array:
    """Constrain the residual stream [B, T, D]: tokens are also sharded over tensor, if they divide evenly.

    Sequence parallelism of Megatron (arXiv 2205.05198): the sum after a row-parallel product is a
    reduce-scatter, and an all-gather of the norm's output precedes a column-parallel one. Decoding steps,
    whose rows have one token, are unchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_even = not mesh.empty and x.shape[1] % num_shards("residual", mesh.shape) == 0
    return constrain(x, "batch", "residual" if is_even else "sequence", "hidden")


@jax.custom_vjp
def gather_tokens(x: jax.Array) -> jax.Array:
    """Gather the output of a norm [B, T, D] for the products that read all tokens.

    Its gradient is reduce-scattered. Without the first constraint, XLA may cast to the type of x only after
    the gather, and gather the wider type.
    """
    return constrain(constrain_residual(x), "batch", "sequence", "hidden")


@jax.custom_vjp
def scatter_gradient(x: jax.Array) -> jax.Array:
    """Return x [B, T, D], the gathered tokens that one product reads, and reduce-scatter its gradient.

    Several products may share one reduce-scatter of their summed gradient, unless gradients of adapters or a
    barrier separate them: XLA then all-reduces each.
    """
    return x


def _scatter_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (constrain_residual(gradient),)


gather_tokens.defvjp(lambda x: (gather_tokens(x), None), _scatter_backward)
scatter_gradient.defvjp(lambda x: (x, None), _scatter_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"], dtype: DTypeLike, is_wide: bool = False
) -> Float[Array, "B T D"]:
    """Return the embeddings of the tokens, rounded to `dtype`.

    Gradients of equal tokens are added in float32: in bfloat16, the sum of a frequent token stops growing at
    about 256 times one gradient. The sum has the sharding of the weight: devices exchange the gradients of
    tokens, in `dtype`, instead of an all-reduce of whole tables. Without the first constraint, XLA may cast
    to `dtype` only after the gather, and gather the wider type.

    Args:
        is_wide: devices exchange the embeddings of tokens, too, and none gathers the table.
    """
    table = constrain(rounded(table, dtype), "vocab", "table_embed")
    if not is_wide:
        return constrain(table, "vocab", "hidden")[tokens]
    rows = constrain(table[constrain(tokens, "copies", None)], "copies", None, "table_embed")
    return constrain(rows, "batch", "sequence", "hidden")


def _look_up_forward(table, tokens, dtype, is_wide):
    return look_up(table, tokens, dtype, is_wide), (table, tokens)


def _look_up_backward(dtype, is_wide, residuals, gradient):
    table, tokens = residuals
    rows = current_spec(("copies", None, "table_embed"), gradient.shape)
    if rows is None:
        total = jnp.zeros(table.shape, jnp.float32).at[tokens].add(gradient.astype(jnp.float32))
        return total.astype(table.dtype), None
    weight = current_spec(("vocab", "table_embed"), table.shape)
    owners, copies = axes_of(weight[0]), axes_of(rows[0])

    def local(gradient, tokens):
        count = table.shape[0] // math.prod(map(jax.lax.axis_size, owners))
        first = jax.lax.axis_index(owners) * count if owners else 0
        places = jnp.where(tokens >= first, tokens - first, count)  # tokens of other devices are dropped
        total = jnp.zeros((count, gradient.shape[-1]), jnp.float32)
        total = total.at[places].add(gradient.astype(jnp.float32), mode="drop")
        return jax.lax.psum(total, copies) if copies else total

    # Gradients are sent in the narrower type, then cast to float32.
    specs = rows, PartitionSpec(rows[0])
    total = jax.shard_map(local, in_specs=specs, out_specs=weight, check_vma=False)(gradient, tokens)
    return total.astype(table.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def logprob_specs(hidden: jax.Array, head: jax.Array) -> tuple[PartitionSpec, PartitionSpec] | None:
    """Return `partition_specs` of jaxrl_kernels' linear_logprob for hidden states [B, T, D] and head [V, D]
    under the current mesh."""
    spec = current_spec(("batch", "sequence", "hidden"), hidden.shape)
    return None if spec is None else (spec, current_spec(("vocab", "table_embed"), head.shape))


def put_rows(mesh: Mesh, batch: Any) -> Any:
    """Put host arrays [B, T, ...] on the devices, rows sharded; every process holds the whole batch."""

    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, row_sharding(mesh, x.shape), lambda index: x[index])

    return jax.tree.map(put, batch)


def row_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of rows of tokens [B, T, ...]."""
    return sharding_for(mesh, ("batch", "sequence", *(None,) * (len(shape) - 2)), shape, TRAIN)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Return a tree of `jax.ShapeDtypeStruct` with these shardings, each of which may stand for a subtree."""
    add = lambda s, x: jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=s), x)
    return jax.tree.map(add, shardings, shapes)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding in the pinned memory of the hosts, from which devices copy directly."""
    host = sharding.with_memory_kind(HOST)
    if host.memory_kind:
        return host
    # GPUs of a compile-only topology list no memories: JAX would silently drop the memory kind.
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def on_device(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding in the memory of the devices."""
    return sharding.with_memory_kind("device")


def fetch(x: jax.Array) -> jax.Array:
    """Copy an array from host memory to the devices, within a jitted function; other arrays are unchanged."""
    is_on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host else x


def bytes_per_device(
    tree: Any,
    memory: Literal["device", "pinned_host"] = "device",
    devices: Collection[jax.Device] | None = None,
) -> int:
    """Return the bytes of abstract or host arrays on one device, without padding.

    An array without a sharding is replicated. Two 4-bit integers share a byte, but not on a CPU.

    Args:
        memory: count arrays in this memory: on the devices, or on the host (`on_host`).
        devices: count only arrays sharded over one of these devices, and arrays over an abstract mesh
            (`on_host`); None = all arrays.
    """

    def one(x) -> int:
        sharding = getattr(x, "sharding", None)
        of_array = None if sharding is None else _devices_of(sharding)
        if of_array and devices is not None and of_array.isdisjoint(devices):
            return 0
        if (getattr(sharding, "memory_kind", None) == HOST) != (memory == HOST):
            return 0
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        on_cpu = of_array is None or any(device.platform == "cpu" for device in of_array)
        packed = x.dtype in (jnp.int4, jnp.uint4) and not on_cpu
        return -(-math.prod(shape) // 2) if packed else math.prod(shape) * np.dtype(x.dtype).itemsize

    return sum(map(one, jax.tree.leaves(tree)))


def _devices_of(sharding) -> Collection[Any]:
    """Return the devices of a sharding; an abstract mesh has none."""
    is_abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    return set() if is_abstract else sharding.device_set


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry
