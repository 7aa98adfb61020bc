"""The gated delta rule on TPU: Pallas kernels forward and backward.

A program computes one chunk of some heads of a row. The last grid dim loops over the chunks of the row, or
back from the last one, and the states of the heads stay in VMEM. For the gradient the forward pass saves the
states before each chunk, and the backward pass is the vjp of the same function of a chunk, `add_chunk`.

All arithmetic is float32. The matrix units multiply a float32 number as three parts of 8 bits; queries and
keys in bfloat16 are one part, so products with them cost half as much and are as exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import CHIPS, LANES, MIB
from jaxrl_kernels.gated_delta.paths import all_chunk_paths, clear_padding
from jaxrl_kernels.gated_delta.tpu_chunk import SUBLANES, add_chunk

INTERPRET = False
"""Set by tests: runs the kernels in the interpreter."""
CHUNK = LANES
"""Tokens of a chunk. As many as lanes: masks and decays fill whole registers, products whole matrix units."""
MAX_STATES = 4
"""States of 128 x 128 of a program, which has all value heads of a key head, or of several: their products
are independent, so that one hides the latency of another. More do not fit the VMEM of a v4."""
MAX_LEVELS = SUBLANES
DTYPES = ("bfloat16", "float32")


def unsupported(key_dim: int, value_dim: int, group: int, dtype: DTypeLike, corrects: bool) -> str | None:
    """Return why the kernels do not take heads of such sizes, `group` value heads a key head, or None.

    Args:
        corrects: whether there is a beta.
    """
    name = jnp.dtype(dtype).name
    if not corrects:
        return "no beta (Mamba-2): the TPU kernels of the delta rule compute its correction"
    if name not in DTYPES:
        return f"dtype {name}: the TPU kernels of the delta rule take {' and '.join(DTYPES)}"
    if group * _tiles(key_dim, value_dim) > MAX_STATES:
        return (
            f"{group} states of {key_dim} x {value_dim} a key head: the TPU kernels of the delta rule hold "
            f"{MAX_STATES} of {LANES} x {LANES}"
        )
    return None


def gated_delta(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T Hv V"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    *,
    segments: Int[Array, "B T"],
    last: Int[Array, "B T"] | None = None,
    initial: Float[Array, "B Hv K V"] | None = None,
    levels: int = 2,
    partition_spec: PartitionSpec | None = None,
) -> tuple[Float[Array, "B T Hv V"], Float[Array, "B Hv K V"]]:
    """Compute `reference.gated_delta`.

    Args:
        levels: at most MAX_LEVELS.
        partition_spec: as of `api.gated_delta`.
    """
    (_, length, _, key_dim), (*_, heads, value_dim) = k.shape, v.shape
    levels = 1 if last is None else levels
    assert levels <= MAX_LEVELS

    # Padding to whole chunks and lanes changes no state.
    branches = last is not None
    segments, last, (q, v, g, beta) = clear_padding(segments, last if branches else segments, (q, v, g, beta))
    more = (0, -length % CHUNK)
    tokens = [
        *(jnp.pad(x, ((0, 0), more, (0, 0), (0, -x.shape[3] % LANES))) for x in (q, k, v)),
        *(jnp.pad(x.astype(jnp.float32), ((0, 0), more, (0, 0))) for x in (g, beta)),
    ]
    segments, last = (jnp.pad(x, ((0, 0), more), mode="edge") for x in (segments, last))
    last = last if branches else None
    if initial is None:
        initial = jnp.zeros((len(k), heads, key_dim, value_dim), jnp.float32)
    dims = ((0, -key_dim % LANES), (0, -value_dim % LANES))
    initial = jnp.pad(initial.astype(jnp.float32), ((0, 0), (0, 0), *dims))
    out, final = _delta(_Static(levels, partition_spec), tokens, segments, last, initial)
    return out[:, :length, :, :value_dim], final[:, :, :key_dim, :value_dim]


def _tiles(key_dim: int, value_dim: int) -> int:
    """Return the number of states of 128 x 128 that hold one of these dims."""
    return pl.cdiv(key_dim, LANES) * pl.cdiv(value_dim, LANES)


class _Static(NamedTuple):
    """Static arguments of `_delta`."""

    levels: int
    partition: PartitionSpec | None

    def shard_map(self, function: Callable, inputs: str, outputs: str) -> Callable:
        """Map over shards; one letter an argument: t = tokens, s = segments, h = states."""
        if self.partition is None:
            return function
        batch, _, heads, *_ = self.partition
        specs = {
            "t": PartitionSpec(batch, None, heads),
            "s": PartitionSpec(batch),
            "h": PartitionSpec(batch, heads),
        }
        each = lambda letters: tuple(specs[letter] for letter in letters)
        return jax.shard_map(function, in_specs=each(inputs), out_specs=each(outputs), check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delta(static: _Static, tokens, segments, last, initial):
    """Compute (out, final) of whole chunks and lanes."""
    run = functools.partial(_forward, static.levels, save=False)
    return static.shard_map(run, "tssh", "th")(tokens, segments, last, initial)


def _delta_forward(static, tokens, segments, last, initial):
    run = functools.partial(_forward, static.levels, save=True)
    out, final, states = static.shard_map(run, "tssh", "thh")(tokens, segments, last, initial)
    return (out, final), (tokens, segments, last, states)


def _delta_backward(static, residuals, gradients):
    run = functools.partial(_backward, static.levels)
    d_tokens, d_initial = static.shard_map(run, "tsshth", "th")(*residuals, *gradients)
    return d_tokens, None, None, d_initial


_delta.defvjp(_delta_forward, _delta_backward)


class _Sizes(NamedTuple):
    """Static sizes of a kernel."""

    heads: int
    """Value heads of a program."""
    key_heads: int
    key_dim: int
    value_dim: int
    levels: int
    exact: bool
    """Queries and keys are numbers of bfloat16."""


def _forward(levels: int, tokens: list[Array], segments, last, initial, *, save: bool):
    """Return (out, final), with `save` also the states before each chunk [B, Hv, N, D, K, V]."""
    sizes, inputs = _make_inputs(levels, tokens, segments, last)
    (batch, chunks), v = inputs[-1].shape[:2], tokens[2]
    specs = _Specs(sizes, lambda step: step)
    outs = [(specs.values(), _like(inputs[2])), (specs.state(), _like(initial))]
    if save:
        states = (batch, v.shape[2], chunks, levels, *initial.shape[2:])
        outs.append((specs.states(), jax.ShapeDtypeStruct(states, jnp.float32)))
    grid = batch, v.shape[2] // sizes.heads, chunks
    kernel = functools.partial(_forward_kernel, sizes, save)
    out, *states = _call(kernel, sizes, grid, (*specs.inputs(), specs.state()), outs)(*inputs, initial)
    return out.reshape(v.shape), *states


def _backward(levels: int, tokens: list[Array], segments, last, states, *gradients):
    """Return (the gradients of tokens, of `initial`)."""
    sizes, inputs = _make_inputs(levels, tokens, segments, last)
    (batch, chunks), heads = inputs[-1].shape[:2], tokens[2].shape[2]
    d_out, d_final = gradients
    specs = _Specs(sizes, lambda step: chunks - 1 - step)
    each = specs.inputs()
    outs = [
        *((spec, _like(x)) for spec, x in zip(each[:5], inputs, strict=False)),
        (specs.state(), _like(d_final)),
    ]
    *d_tokens, d_initial = _call(
        functools.partial(_backward_kernel, sizes),
        sizes,
        (batch, heads // sizes.heads, chunks),
        (*each, specs.states(), specs.values(), specs.state()),
        outs,
    )(*inputs, states, _flat(d_out), d_final)
    d_qkv = [d.reshape(x.shape) for d, x in zip(d_tokens[:3], tokens, strict=False)]
    return [*d_qkv, *(jnp.moveaxis(d[:, :, 0], 1, 2) for d in d_tokens[3:])], d_initial


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _forward_kernel(sizes: _Sizes, save: bool, *refs):
    (*inputs, initial, out, final), (*saved, stack) = refs[:10], refs[10:]

    @pl.when(pl.program_id(2) == 0)
    def start():
        for d in range(sizes.levels):
            stack[:, d] = initial[...]

    if save:
        saved[0][...] = stack[...]
    result, states = _chunk_function(sizes, inputs)(_levels(stack), *_read_tokens(sizes, inputs))
    out[...] = _join(result).astype(out.dtype)
    for d, state in enumerate(states):
        stack[:, d] = state

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def finish():
        final[...] = stack[:, sizes.levels - 1]


def _backward_kernel(sizes: _Sizes, *refs):
    (*inputs, states, d_out, d_final), (*d_tokens, d_initial, d_stack) = refs[:10], refs[10:]

    @pl.when(pl.program_id(2) == 0)
    def start():
        d_stack[...] = jnp.zeros_like(d_stack)
        d_stack[:, sizes.levels - 1] = d_final[...]

    add = _chunk_function(sizes, inputs)
    _, gradient = jax.vjp(add, _levels(states), *_read_tokens(sizes, inputs))
    d_states, *results = gradient((_split(d_out[...], sizes.heads), _levels(d_stack)))
    for d, state in enumerate(d_states):
        d_stack[:, d] = state
    for ref, result in zip(d_tokens, results, strict=True):
        ref[...] = (_join(result) if result.shape[1] > 1 else result).astype(ref.dtype)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def finish():
        d_initial[...] = sum(d_states)


def _chunk_function(sizes: _Sizes, inputs: Sequence[Any]) -> Callable:
    """Return `add_chunk` for the paths of a chunk."""
    inside, before = (ref[...] for ref in inputs[-2:])
    return functools.partial(add_chunk, inside, before, sizes.exact)


def _read_tokens(sizes: _Sizes, inputs: Sequence[Any]) -> tuple[Array, ...]:
    """Return q, k, v, g and beta, heads first, in float32."""
    q, k, v, g, beta, *_ = (ref[...] for ref in inputs)
    return _split(q, sizes.key_heads), _split(k, sizes.key_heads), _split(v, sizes.heads), g, beta


def _levels(stack: Any) -> list[Array]:
    return [stack[:, d] for d in range(stack.shape[1])]


def _split(x: Float[Array, "C HE"], heads: int) -> Float[Array, "H C E"]:
    """Return the heads, in float32."""
    dim = x.shape[1] // heads
    return jnp.stack([x[:, i * dim : (i + 1) * dim].astype(jnp.float32) for i in range(heads)])


def _join(x: Float[Array, "H C E"]) -> Float[Array, "C HE"]:
    return jnp.concatenate(list(x), axis=1)


def _flat(x: Float[Array, "B T H E"]) -> Float[Array, "B T HE"]:
    return x.reshape(*x.shape[:2], -1)


class _Specs(NamedTuple):
    """Block specs on the grid (row, heads of a program, step)."""

    sizes: _Sizes
    chunk: Callable[[Any], Any]
    """Step -> chunk."""

    def keys(self) -> pl.BlockSpec:
        return self._tokens(self.sizes.key_heads * self.sizes.key_dim)

    def values(self) -> pl.BlockSpec:
        return self._tokens(self.sizes.heads * self.sizes.value_dim)

    def _tokens(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, CHUNK, width), lambda b, h, c: (b, self.chunk(c), h))

    def state(self) -> pl.BlockSpec:
        s = self.sizes
        return pl.BlockSpec((None, s.heads, s.key_dim, s.value_dim), lambda b, h, c: (b, h, 0, 0))

    def states(self) -> pl.BlockSpec:
        s = self.sizes
        block = (None, s.heads, None, s.levels, s.key_dim, s.value_dim)
        return pl.BlockSpec(block, lambda b, h, c: (b, h, self.chunk(c), 0, 0, 0))

    def inputs(self) -> tuple[pl.BlockSpec, ...]:
        """Return the specs of `_make_inputs`."""
        numbers = pl.BlockSpec((None, self.sizes.heads, 1, CHUNK), lambda b, h, c: (b, h, 0, self.chunk(c)))
        rows = CHUNK + SUBLANES
        paths = lambda width: pl.BlockSpec(
            (None, None, rows, width), lambda b, h, c: (b, self.chunk(c), 0, 0)
        )
        keys = self.keys()
        return keys, keys, self.values(), numbers, numbers, paths(CHUNK), paths(self.sizes.levels)


def _make_inputs(levels: int, tokens: list[Array], segments, last) -> tuple[_Sizes, tuple[Array, ...]]:
    """Return (sizes, (q, k, v [B, T, H E], g, beta [B, Hv, 1, T], inside, before)).

    The last two are of `ChunkPaths`, their rows padded to a tile; a state that lacks a level is NaN.
    """
    q, k, v, *numbers = tokens
    group = v.shape[2] // k.shape[2]
    most = MAX_STATES // (group * _tiles(k.shape[3], v.shape[3]))
    key_heads = next(n for n in range(most, 0, -1) if k.shape[2] % n == 0)
    exact = q.dtype == k.dtype == jnp.bfloat16
    sizes = _Sizes(key_heads * group, key_heads, k.shape[3], v.shape[3], levels, exact)

    # The paths.
    paths = all_chunk_paths(segments, last, chunk=CHUNK, levels=levels)
    is_lost = ~paths.fit[..., None, None] & (jnp.arange(CHUNK + levels) >= CHUNK)[:, None]
    before = jnp.where(is_lost, jnp.nan, paths.before.astype(jnp.float32))
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, SUBLANES - levels), (0, 0)))
    numbers = [jnp.moveaxis(x, 1, 2)[:, :, None] for x in numbers]
    return sizes, (*map(_flat, (q, k, v)), *numbers, pad(paths.inside.astype(jnp.float32)), pad(before))


def _call(kernel: Callable, sizes: _Sizes, grid: tuple[int, ...], ins, outs):
    """Return the kernel, with the states of a program's heads as scratch."""
    stack = (sizes.heads, sizes.levels, sizes.key_dim, sizes.value_dim)
    return pl.pallas_call(
        kernel,
        out_shape=[shape for _, shape in outs],
        grid=grid,
        in_specs=list(ins),
        out_specs=[spec for spec, _ in outs],
        scratch_shapes=[pltpu.VMEM(stack, jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=min(CHIPS[dispatch.tpu_generation()].scratchpad, 32 * MIB),
        ),
        interpret=INTERPRET,
    )
