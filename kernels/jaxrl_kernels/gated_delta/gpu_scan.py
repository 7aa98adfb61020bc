"""The sequential part of the gated delta rule on Hopper GPUs: states from chunk to chunk, Pallas Mosaic GPU.

A program has a slice of the columns of the states of a head, in registers, through all chunks. Chunks of 64
tokens have keys k, a matrix M and numbers p, r and F, and the states S_d of the levels become

    x = a + sum_d p_d k S_d,   u = M x,   S_d <- sum_e F_de S_e + R_d + k^T r_d u

The gradient has the same form from the last chunk on, with M^T, F^T, and p and r exchanged. The producer
warpgroup copies the inputs of chunks ahead; the consumer multiplies by wgmma: keys are bfloat16, float32
numbers three parts of bfloat16 whose products lose no bits.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxrl_kernels.chips import HOPPER_SHARED_MEMORY
from jaxrl_kernels.gated_delta.tpu_chunk import bfloat16_parts
from jaxrl_kernels.hopper import (
    MATRIX,
    PER_ROW,
    RESERVED,
    ROWS,
    WarpgroupOps,
    add_product,
    launch,
    matrix_memory,
    read_accumulator,
)

KEY_DIM = 2 * ROWS
"""Rows of a state; keys are padded."""
COLUMNS = 32
"""Columns of a state in a program, half of them with two levels: states are in registers."""
PARTS = 3
PAIRS = ((0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0))
"""Products of two numbers of three parts, small ones first; the others are less than a float32's last bit."""


class Scan(NamedTuple):
    """Inputs of N chunks of B rows and H heads; C = 64 tokens, K = 128, D levels."""

    k: Float[Array, "B Hk N C K"]
    """bfloat16; key head j serves the heads from j H / Hk on."""
    m: Float[Array, "B H N C C"]
    a: Float[Array, "B H N C V"]
    p: Float[Array, "B H N D C"]
    r: Float[Array, "B H N D C"]
    f: Float[Array, "B H N D D"]
    first: Float[Array, "B H D K V"]


class ScanSettings(NamedTuple):
    """Static arguments of `scan_chunks`."""

    partition_spec: PartitionSpec | None
    """As of `api.gated_delta`."""
    interpret: bool = False
    """Run the kernel in the interpreter, to test."""


class _Plan(NamedTuple):
    """Static parameters of a kernel."""

    chunks: int
    levels: int
    repeats: int
    """Heads that a key head serves."""
    added: bool
    """R is given; chunks are in reverse order."""
    interpret: bool

    @property
    def columns(self) -> int:
        return COLUMNS // self.levels

    @property
    def stages(self) -> int:
        matrices = 2 * (KEY_DIM + PARTS * ROWS) * ROWS + 4 * ROWS * self.columns
        state = 4 * KEY_DIM * self.columns * self.levels
        stage = matrices + self.added * state
        fixed = state + 2 * PARTS * (self.levels * KEY_DIM + ROWS) * self.columns + 4 * ROWS * self.columns
        return 2 if 2 * stage + fixed + RESERVED <= HOPPER_SHARED_MEMORY else 1

    def chunk(self, n):
        return self.chunks - 1 - n if self.added else n


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scan_chunks(
    scan: Scan, settings: ScanSettings
) -> tuple[Float[Array, "B H N C V"], Float[Array, "B H N D K V"], Float[Array, "B H D K V"]]:
    """Return (u, the states before each chunk, the states after the last one), float32."""
    return run_shards(settings, scan)


def _scan_forward(scan, settings):
    results = scan_chunks(scan, settings)
    return results, (scan, *results[:2])


def _scan_backward(settings, residuals, gradients):
    scan, u, states = residuals
    d_u, d_states, d_final = gradients
    turned = scan._replace(
        m=scan.m.swapaxes(3, 4), a=d_u, p=scan.r, r=scan.p, f=scan.f.swapaxes(3, 4), first=d_final
    )
    d_a, d_after, d_first = run_shards(settings, turned, d_states)

    # Gradients of what each chunk reads: products of all chunks at once.
    product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    (batch, heads), key_heads = scan.a.shape[:2], scan.k.shape[1]
    k = jnp.repeat(scan.k.astype(jnp.float32), heads // key_heads, axis=1)
    read, d_read = (product("bgnck,bgndkv->bgndcv", k, s) for s in (states, d_after))
    x, d_x = scan.a + _weighted(scan.p, read), d_u + _weighted(scan.r, d_read)
    d_k = product("bgndc,bgncv,bgndkv->bgnck", scan.p, d_a, states)
    d_k += product("bgndc,bgncv,bgndkv->bgnck", scan.r, u, d_after)
    d_k = d_k.reshape(batch, key_heads, -1, *d_k.shape[2:]).sum(axis=2)
    return (
        Scan(
            d_k.astype(scan.k.dtype),
            m=product("bgniv,bgnjv->bgnij", d_x, x),
            a=d_a,
            p=product("bgncv,bgndcv->bgndc", d_a, read),
            r=product("bgncv,bgndcv->bgndc", u, d_read),
            f=product("bgndkv,bgnekv->bgnde", d_after, states),
            first=d_first,
        ),
    )


scan_chunks.defvjp(_scan_forward, _scan_backward)


def _weighted(weights: Float[Array, "*N D C"], read: Float[Array, "*N D C V"]) -> Float[Array, "*N C V"]:
    return jnp.sum(jnp.where(weights[..., None] != 0, weights[..., None] * read, 0), axis=-3)


def run_shards(settings: ScanSettings, scan: Scan, added: Float[Array, "B H N D K V"] | None = None):
    """Run the kernel on the heads of each device; from the last chunk on if R, `added`, is given.

    Returns (u, the states that each chunk reads, the states after all chunks).
    """

    def local(scan, added):
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        results = run_heads(
            jax.tree.map(flat, scan), None if added is None else flat(added), settings.interpret
        )
        return tuple(x.reshape(*scan.a.shape[:2], *x.shape[1:]) for x in results)

    if settings.partition_spec is None:
        return local(scan, added)
    batch, _, heads, *_ = settings.partition_spec
    spec = PartitionSpec(batch, heads)
    return jax.shard_map(local, in_specs=(spec, spec), out_specs=(spec,) * 3, check_vma=False)(scan, added)


def run_heads(scan: Scan, added: Float[Array, "G N D K V"] | None, interpret: bool):
    """Compute `run_shards` for G heads of one device."""
    (groups, chunks, _, width), levels = scan.a.shape, scan.p.shape[2]
    plan = _Plan(chunks, levels, groups // len(scan.k), added is not None, interpret)
    number, part = (
        functools.partial(matrix_memory, dtype=dtype, stripe=plan.columns)
        for dtype in (jnp.float32, jnp.bfloat16)
    )

    # Shared memory: a ring of the inputs of chunks, and the states and sums in the types that are multiplied.
    state = (levels, 2, ROWS, plan.columns)
    copies = 2 + PARTS + 2 + 2 * levels * plan.added
    scratch = {
        "k": part((plan.stages, 2, ROWS, ROWS)),
        "m": part((plan.stages, PARTS, ROWS, ROWS)),
        "a": number((plan.stages, ROWS, plan.columns)),
        "weights": plgpu.SMEM((plan.stages, 2 * levels, ROWS), jnp.float32),
        **({"added": number((plan.stages, *state))} if plan.added else {}),
        "state": number(state),
        "state_parts": part((levels, PARTS, *state[1:])),
        "parts": part((PARTS, ROWS, plan.columns)),
        "u": number((ROWS, plan.columns)),
        "first_ready": plgpu.Barrier(num_arrivals=2 * levels),
        "ready": plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
        "free": plgpu.Barrier(num_barriers=plan.stages),
    }

    # Keys and states are halves of 64 rows, as wgmma multiplies them.
    halves = lambda x: x.reshape(*x.shape[:-2], 2, ROWS, width)
    states = jax.ShapeDtypeStruct((groups, chunks, *state[:3], width), jnp.float32)
    out = (
        jax.ShapeDtypeStruct(scan.a.shape, jnp.float32),
        states,
        jax.ShapeDtypeStruct((groups, *state[:3], width), jnp.float32),
    )
    grid = {"slice": width // plan.columns, "head": groups}
    kernel = launch(functools.partial(_kernel, plan), out, scratch, grid, 1, interpret)
    keys = jnp.moveaxis(scan.k.reshape(*scan.k.shape[:3], 2, ROWS), 3, 2)
    matrices = jnp.stack(bfloat16_parts(scan.m), axis=2)
    weights = jnp.concatenate([scan.p, scan.r], axis=2)
    given = () if added is None else (halves(added),)
    u, states, final = kernel(keys, matrices, scan.a, weights, scan.f, halves(scan.first), *given)
    whole = lambda x: x.reshape(*x.shape[:-3], KEY_DIM, width)
    return u, whole(states), whole(final)


_INPUTS = ("k", "m", "a", "weights", "f", "first", "added")


def _kernel(plan: _Plan, *refs: Any, **memory: Any) -> None:
    """Compute all chunks of a slice of a head."""
    memory, inputs = SimpleNamespace(**memory), SimpleNamespace(**dict(zip(_INPUTS, refs, strict=False)))
    *_, u, states, final = refs
    head, columns = lax.axis_index("head"), pl.ds(lax.axis_index("slice") * plan.columns, plan.columns)

    # The last warpgroup copies; the first computes.
    @pl.when(lax.axis_index("group") == 1)
    def _copy():
        for d in range(plan.levels):
            for i in range(2):
                plgpu.copy_gmem_to_smem(
                    inputs.first.at[head, d, i, :, columns], memory.state.at[d, i], memory.first_ready
                )

        @pl.loop(0, plan.chunks)
        def _(n):
            _copy_chunk(plan, inputs, memory, n, head, columns)

        @pl.loop(max(plan.chunks - plan.stages, 0), plan.chunks)  # wait for every phase
        def _(n):
            plgpu.barrier_wait(memory.free.at[lax.rem(n, jnp.int32(plan.stages))])

    @pl.when(lax.axis_index("group") == 0)
    def _compute():
        ops = WarpgroupOps(plan.interpret)
        plgpu.barrier_wait(memory.first_ready)
        state = [ops.layout(memory.state[d, i], MATRIX) for d in range(plan.levels) for i in range(2)]
        step = functools.partial(_add_chunk, plan, ops, inputs, memory, (u, states), head, columns)
        state = lax.fori_loop(0, plan.chunks, step, state)
        _store(memory.state, state, final.at[head], columns)
        plgpu.wait_smem_to_gmem(0)


def _copy_chunk(plan: _Plan, inputs: Any, memory: Any, n, head, columns) -> None:
    """Copy the inputs of the n-th chunk when its stage is free."""
    stage, chunk = lax.rem(n, jnp.int32(plan.stages)), plan.chunk(n)
    pl.when(n >= plan.stages)(functools.partial(plgpu.barrier_wait, memory.free.at[stage]))
    ready = memory.ready.at[stage]
    copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, ready)
    for i in range(2):
        copy(inputs.k.at[lax.div(head, jnp.int32(plan.repeats)), chunk, i], memory.k.at[stage, i])
    for i in range(PARTS):
        copy(inputs.m.at[head, chunk, i], memory.m.at[stage, i])
    copy(inputs.a.at[head, chunk, :, columns], memory.a.at[stage])
    copy(inputs.weights.at[head, chunk], memory.weights.at[stage])
    for d in range(plan.levels * plan.added):
        for i in range(2):
            copy(inputs.added.at[head, chunk, d, i, :, columns], memory.added.at[stage, d, i])


def _add_chunk(
    plan: _Plan, ops: WarpgroupOps, inputs: Any, memory: Any, outputs: Any, head, columns, n, state
):
    """Return the states after the n-th chunk, halves of each level; store u and the states before it."""
    stage, chunk, levels = lax.rem(n, jnp.int32(plan.stages)), plan.chunk(n), range(plan.levels)
    u_out, states_out = outputs
    _store(memory.state, state, states_out.at[head, chunk], columns)
    for d in levels:
        for i in range(2):
            _store_parts(plan, memory.state_parts.at[d], state[2 * d + i], i)
    plgpu.commit_smem()
    plgpu.barrier_wait(memory.ready.at[stage])
    weights = [ops.layout(memory.weights[stage, d], PER_ROW) for d in range(2 * plan.levels)]

    # x = a + sum_d p_d k S_d.
    x = ops.layout(memory.a[stage], MATRIX)
    for d in levels:

        def read(acc, d=d):
            for part in reversed(range(PARTS)):
                for i in range(2):
                    add_product(acc, memory.k.at[stage, i], memory.state_parts.at[d, part, i])
            return read_accumulator(acc)

        x += _weigh(weights[d], ops.scratch(read, (ROWS, plan.columns)))

    # u = M x.
    _store_parts(plan, memory.parts, x)
    plgpu.commit_smem()

    def multiply(acc):
        for i, j in PAIRS:
            add_product(acc, memory.m.at[stage, i], memory.parts.at[j])
        return read_accumulator(acc)

    u = ops.scratch(multiply, (ROWS, plan.columns))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    memory.u[...] = u
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(memory.u, u_out.at[head, chunk, :, columns])

    after = _states_after(plan, ops, inputs, memory, (head, chunk, stage), weights[plan.levels :], u, state)
    plgpu.commit_smem()  # reads end before TMA writes there again
    plgpu.barrier_arrive(memory.free.at[stage])
    return after


def _states_after(plan: _Plan, ops: WarpgroupOps, inputs: Any, memory: Any, at, weights, u, state):
    """Return sum_e F_de S_e + R_d + k^T r_d u of each level, in halves."""
    (head, chunk, stage), levels, after = at, range(plan.levels), []
    for d in levels:
        _store_parts(plan, memory.parts, _weigh(weights[d], u))
        plgpu.commit_smem()
        for i in range(2):
            kept = [_fade(inputs.f[head, chunk, d, e], state[2 * e + i]) for e in levels]
            kept += [ops.layout(memory.added[stage, d, i], MATRIX)] if plan.added else []

            def add(acc, i=i):
                for part in reversed(range(PARTS)):
                    add_product(acc, memory.k.at[stage, i], memory.parts.at[part], transpose_a=True)

            after += ops.accumulate(add, [sum(kept[1:], kept[0])])
    return after


def _store(memory: Any, state: list[Array], out: Any, columns) -> None:
    """Start to store the states, halves of each level."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for n, half in enumerate(state):
        memory[n // 2, n % 2] = half
    plgpu.commit_smem()
    for n in range(len(state)):
        plgpu.copy_smem_to_gmem(memory.at[n // 2, n % 2], out.at[n // 2, n % 2, :, columns])


def _store_parts(plan: _Plan, memory: Any, x: Array, *index: int) -> None:
    """Store the parts of x at memory[part, *index]."""
    for n in range(PARTS):
        # The interpreter's compiler would drop a conversion to bfloat16 and back.
        part = lax.reduce_precision(x, 8, 7) if plan.interpret else x.astype(jnp.bfloat16)
        memory[n, *index] = part.astype(jnp.bfloat16)
        x = x - part.astype(jnp.float32)


def _weigh(weights: Array, x: Array) -> Array:
    """Return the rows of x times these weights; a row of weight 0 is 0, whatever its numbers."""
    weights = lax.broadcast_in_dim(weights, x.shape, [0])
    return jnp.where(weights != 0, weights * x, 0.0)


def _fade(factor: Array, x: Array) -> Array:
    return jnp.where(factor != 0, factor * x, 0.0)
