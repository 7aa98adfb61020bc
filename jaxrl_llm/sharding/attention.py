"""Attention under the current mesh, sharded over rows, heads and tokens of a row (context parallelism).

Kernels are opaque to XLA's partitioner, so they run under `shard_map`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_kernels.dispatch import choose, load_implementation
from jaxrl_kernels.flash_attention.api import SAVED, flash_attention
from jaxrl_kernels.flash_attention.sinks import add_sinks, d_sinks
from jaxrl_kernels.flash_attention.spec import AttentionSpec, DynamicMask
from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding.ring import RingAttention, from_zigzag, to_zigzag
from jaxrl_llm.sharding.rules import TRAIN, Rules, axes_of, constrain, current_sizes, current_spec, num_shards


class UlyssesAttention(NamedTuple):
    """`forward` and `backward` of the attention contract for a device's shard of a row, under `shard_map`.

    All-to-all turns a shard of the tokens with all heads into all tokens with a shard of the heads, and back.
    Reads only the mask's window. If there are fewer key heads than devices, they are repeated until each
    device has one, so that no device receives a head that it does not read.
    """

    implementation: Any
    """Module with `forward` and `backward` of the contract, for the whole row."""
    axis: str
    """Mesh axis that shards the row; its size divides the number of query heads."""

    def forward(  # noqa: PLR0917 - by position, as kernels are called
        self, spec: AttentionSpec, q, k, v, q_segments, kv_last, mask: DynamicMask
    ):
        """Compute (out, lse) of the local queries over the keys of all devices."""
        qkv = self._by_heads(q, self._repeat(k), self._repeat(v))
        of_rows = self._gather(q_segments, kv_last, mask)
        out, lse = self.implementation.forward(spec, *qkv, *of_rows)
        return self._by_tokens(out)[0], jax.lax.all_to_all(lse, self.axis, 2, 1, tiled=True)

    def backward(  # noqa: PLR0917
        self,
        spec: AttentionSpec,
        q,
        k,
        v,
        q_segments,
        kv_last,
        mask: DynamicMask,
        out,
        lse,
        d_out,
        d_lse=None,
    ):
        """Compute (dq, dk, dv)."""
        across = lambda x: None if x is None else jax.lax.all_to_all(x, self.axis, 1, 2, tiled=True)
        q, repeated_k, repeated_v, out, d_out = self._by_heads(
            q, self._repeat(k), self._repeat(v), out, d_out
        )
        d_q, d_k, d_v = self.implementation.backward(
            spec, q, repeated_k, repeated_v, *self._gather(q_segments, kv_last, mask),
            out, across(lse), d_out, across(d_lse),
        )  # fmt: skip
        d_q, d_k, d_v = self._by_tokens(d_q, d_k, d_v)
        return d_q, _sum_repeated(d_k, k), _sum_repeated(d_v, v)

    def _by_heads(self, *arrays: Shaped[Array, "_ t _ E"]) -> list[Array]:
        return [jax.lax.all_to_all(x, self.axis, 2, 1, tiled=True) for x in arrays]

    def _by_tokens(self, *arrays: Shaped[Array, "_ T _ E"]) -> list[Array]:
        return [jax.lax.all_to_all(x, self.axis, 1, 2, tiled=True) for x in arrays]

    def _gather(
        self, q: Shaped[Array, "B t"], kv: Shaped[Array, "B t"], mask: DynamicMask
    ) -> tuple[Array, Array, DynamicMask]:
        """Return the segments and the mask of whole rows. Returns the same array twice if both segments are
        the same, since `cudnn` compares them by identity."""
        gather = lambda x: jax.lax.all_gather(x, self.axis, axis=1, tiled=True)
        whole = gather(q)
        mask = mask if jnp.ndim(mask.window) == 0 else mask._replace(window=gather(mask.window))
        return whole, whole if q is kv else gather(kv), mask

    def _repeat(self, x: Shaped[Array, "B t K E"]) -> Shaped[Array, "B t K_ E"]:
        devices = jax.lax.axis_size(self.axis)
        return jnp.repeat(x, devices // math.gcd(x.shape[2], devices), axis=2)


def _sum_repeated(d, x):
    """Return the gradient of x [B, t, K, E]: the gradients of its repeated heads, summed in float32."""
    batch, length, heads, dim = x.shape
    return d.reshape(batch, length, heads, -1, dim).sum(axis=3, dtype=jnp.float32).astype(x.dtype)


ContextParallel = Literal["none", "ring", "ulysses"]
"""Method of attention over a row whose tokens are sharded; "none" = each device has whole rows."""
REPLICATED_SEQUENCE: Rules = {**TRAIN, "sequence": None}
DIVIDED_HEADS: Rules = {**TRAIN, "heads": ("tensor", "sequence")}
"""Recurrent layers: the devices of a row divide its heads, not its tokens."""
METHODS = {"ring": RingAttention, "ulysses": UlyssesAttention}
AXIS = TRAIN["sequence"]
QUERY_AXES = ("batch", "sequence", "heads", "head_dim")


def context_parallel(length: int, method: ContextParallel) -> ContextParallel:
    """Return the method for rows of `length` tokens under the current mesh: "none" if the mesh does not shard
    them evenly."""
    shards = num_shards("sequence", current_sizes())
    chunks = 2 * shards if method == "ring" else shards
    return "none" if shards == 1 or length % chunks else method


def reorder_tokens(x: Shaped[Array, "B T ..."], method: ContextParallel) -> Shaped[Array, "B T ..."]:
    """Reorder the tokens of rows for load balance: zigzag for ring attention, otherwise unchanged."""
    return _permute(to_zigzag, x) if method == "ring" else x


def restore_tokens(x: Shaped[Array, "B T ..."], method: ContextParallel) -> Shaped[Array, "B T ..."]:
    """Invert `reorder_tokens`."""
    return _permute(from_zigzag, x) if method == "ring" else x


def over_whole_rows(mix: Callable[..., Any], method: ContextParallel) -> Callable[..., Any]:
    """Return mix(*inputs) -> (out, state) for arrays of tokens in the order of `reorder_tokens`.

    mix reads and writes whole rows in natural order. As in Ulysses, an all-to-all gives each device all
    tokens of a part of the heads or channels, dim 2 of each array, and a second one returns the results.
    """

    def apply(*inputs):
        out, state = mix(*jax.tree.map(lambda x: _gather_rows(x, method), inputs))
        return jax.tree.map(lambda x: _scatter_rows(x, method), out), state

    return apply


def divide_heads(x: Shaped[Array, "B T H ..."]) -> Shaped[Array, "B T H ..."]:
    """Constrain whole rows to be sharded by heads over tensor and sequence, if these divide the heads."""
    return constrain(x, "batch", None, "heads", *(None,) * (x.ndim - 3), rules=DIVIDED_HEADS)


def _gather_rows(x: Shaped[Array, "B T H ..."], method: ContextParallel) -> Shaped[Array, "B T H ..."]:
    """Return the tokens of whole rows in natural order.

    Constraints on both sides keep the change of order, and its gradient, within a device. Without the first
    constraint, XLA may gather what x is computed from instead.
    """
    x = _divide_tokens(x)
    if method != "ring":
        return divide_heads(x)
    early, late = jnp.moveaxis(_chunks(divide_heads(x), (-1, 2)), 2, 0)
    return divide_heads(jnp.concatenate([early, late[:, ::-1]], axis=1).reshape(x.shape))


def _scatter_rows(x: Shaped[Array, "B T H ..."], method: ContextParallel) -> Shaped[Array, "B T H ..."]:
    """Invert `_gather_rows`."""
    x = divide_heads(x)
    if method == "ring":
        early, late = jnp.moveaxis(_chunks(x, (2, -1)), 1, 0)
        x = divide_heads(jnp.stack([early, late[:, ::-1]], axis=2).reshape(x.shape))
    return _divide_tokens(x)


def _divide_tokens(x: Shaped[Array, "B T H ..."]) -> Shaped[Array, "B T H ..."]:
    return constrain(x, "batch", "sequence", "heads", *(None,) * (x.ndim - 3))


def _chunks(x: Shaped[Array, "B T ..."], parts: tuple[int, int]) -> Shaped[Array, "B _ _ t ..."]:
    """Return the chunks of the ring in a grid, which is two wide."""
    devices = num_shards("sequence", jax.sharding.get_abstract_mesh().shape)
    grid = tuple(devices if n < 0 else n for n in parts)
    return x.reshape(x.shape[0], *grid, x.shape[1] // (2 * devices), *x.shape[2:])


def sharded_attention(  # noqa: PLR0917 - in the order of `flash_attention`
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    last: Int[Array, "B T"] | None = None,
    *,
    scale: float,
    window: int | Int[Array, ""] | Int[Array, "B T"],
    windows: tuple[int, ...] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    method: ContextParallel = "none",
) -> Float[Array, "B T H E"]:
    """Compute causal attention within the segments of each row, sharded over the current mesh.

    Args:
        segments, last, window: of `flash_attention`.
        windows: all possible values of a traced `window`; cuDNN compiles each.
        sinks: the score of one more key of value 0 for each head; None = none.
        method: of `context_parallel`; arrays of tokens are in its order (`reorder_tokens`).

    Raises:
        UserError: Ulysses, if the number of devices does not divide the heads.
    """
    spec = current_spec(QUERY_AXES, q.shape, REPLICATED_SEQUENCE if method == "none" else TRAIN)
    if spec is None:
        return flash_attention(
            q, k, v, segments, last, scale=scale, window=window, windows=windows, softcap=softcap, sinks=sinks
        )
    sizes = current_sizes()
    head_shards = math.prod(sizes[name] for name in axes_of(spec[2]))
    ulysses_shards = head_shards * num_shards("sequence", sizes)
    if method == "ulysses" and q.shape[2] % ulysses_shards:
        raise UserError(heads_problem(q.shape[2], ulysses_shards))
    # Repeat a key head only until every device has one: its query heads then belong to one group.
    repeats = head_shards // math.gcd(k.shape[2], head_shards)
    k, v = (x if repeats == 1 else jnp.repeat(x, repeats, axis=2) for x in (k, v))
    name, _ = choose("flash_attention", q.shape[3], q.dtype, softcap)
    implementation = load_implementation("flash_attention", name)
    if method in METHODS:
        implementation = METHODS[method](implementation, AXIS)
    static = _Static(implementation, AttentionSpec(scale, softcap, windows, last is not None), spec)
    return _attention(static, _Operands(q, k, v, segments, last, window, sinks))


def heads_problem(heads: int, parts: int) -> str:
    """Return the message for query heads that Ulysses cannot divide among `parts` devices."""
    return (
        f"--mesh.sequence_parallel ulysses divides the {heads} query heads among tensor x sequence = {parts} "
        f"devices, and {heads} is not a multiple of {parts}. Set --mesh.sequence_parallel ring, or a smaller "
        "--mesh.sequence."
    )


class _Static(NamedTuple):
    """Static arguments: an implementation of attention, and how the queries are sharded."""

    implementation: Any
    spec: AttentionSpec
    partition: PartitionSpec

    def shard_map(self, function, inputs: str, outputs: str):
        """Map `function` over shards; one letter per array: r = like q, l = lse, s = segments, w = a
        scalar."""
        batch, sequence, heads, _ = self.partition
        specs = {
            "r": self.partition,
            "l": PartitionSpec(batch, heads, sequence),
            "s": PartitionSpec(batch, sequence),
            "w": PartitionSpec(),
        }
        each = lambda letters: tuple(specs[letter] for letter in letters)
        return jax.shard_map(function, in_specs=each(inputs), out_specs=each(outputs), check_vma=False)


class _Operands(NamedTuple):
    """Arguments of `sharded_attention` that are arrays."""

    q: Any
    k: Any
    v: Any
    segments: Any
    last: Any
    window: Any
    sinks: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, operands: _Operands):
    return _forward(static, operands)[0]


def _forward(static: _Static, operands: _Operands):
    def local(q, k, v, *of_rows):
        segments, last, window = of_rows
        last = segments if last is None else last  # one array, as cuDNN needs to know
        mask = DynamicMask(window=window)
        return static.implementation.forward(static.spec, q, k, v, segments, last, mask)

    q, k, v, segments, last, window, sinks = operands
    window = jnp.asarray(window, jnp.int32)
    results = static.shard_map(local, "rrrss" + _letter(window), "rl")(q, k, v, segments, last, window)
    results = results if sinks is None else add_sinks(*results, sinks)
    out, lse = [checkpoint_name(x, SAVED) for x in results]
    return out, ((q, k, v, segments, last, window, out, lse), sinks)


def _backward(static: _Static, residuals, d_out):
    def local(q, k, v, *others):
        segments, last, window, out, lse, d_out = others
        last, mask = segments if last is None else last, DynamicMask(window=window)
        return static.implementation.backward(
            static.spec, q, k, v, q_segments=segments, kv_last=last, mask=mask, out=out, lse=lse, d_out=d_out
        )

    arrays, sinks = residuals
    d_qkv = static.shard_map(local, f"rrrss{_letter(arrays[5])}rlr", "rrr")(*arrays, d_out)
    d_sink = None if sinks is None else d_sinks(sinks, *arrays[-2:], d_out)
    return (_Operands(*d_qkv, None, None, None, d_sink),)


_attention.defvjp(_forward, _backward)


def _letter(window: Int[Array, ""] | Int[Array, "B T"]) -> str:
    return "s" if window.ndim else "w"


def _permute(function, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
    spec = current_spec((*QUERY_AXES[:2], *(None,) * (x.ndim - 2)), x.shape)
    move = functools.partial(function, axis=AXIS)
    return jax.shard_map(move, in_specs=spec, out_specs=spec)(x)
