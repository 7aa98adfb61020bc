"""Log-probs on Hopper GPUs (H100, H200): Pallas Mosaic GPU with TMA, wgmma and specialised warpgroups.

The producer warpgroup copies blocks of hidden and head into a ring in shared memory, through all the tiles of
its SM; two consumers multiply 64 tokens each with the same 256 rows of the head. The epilogue of a tile of
logits runs from registers while the ring fills for the next: in the forward pass log-prob, entropy and
log-sum-exp of these 256 rows, which `reference.merge_shards` merges; in the backward pass the gradient of the
logits of some tokens, which two plain products follow (chunked.backward).

bfloat16 and float16 only: wgmma multiplies float32 as TF32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxrl_kernels.hopper import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    MATRIX,
    PER_ROW,
    PRODUCER_REGISTERS,
    ROWS,
    TILE_ROWS,
    add_product,
    launch,
    matrix_memory,
    next_multiple,
    num_multiprocessors,
    ring_product,
    share_tiles,
    unsupported_dtype,
)
from jaxrl_kernels.linear_logprob.reference import MASKED_LOGIT, LogprobOutputs, LogprobSpec, merge_shards

WIDTH, DEPTH = 256, 64
"""Rows of the head and contracted depth of a step; the sums of ROWS tokens take 128 registers a lane."""
TOKENS = CONSUMERS * ROWS
STAGES = 4
"""Steps in the ring: 4 * (128 + 256) * 64 * 2 bytes = 192 KiB of the 227 of an SM."""
SLICE = 64
"""Columns of a tile of logits that the epilogue computes at a time."""
GROUP = 16
"""Tiles of tokens that share tiles of the head while the head's tiles are in the L2 cache."""


def unsupported(dim: int, dtype: Any) -> str | None:
    """Return why the kernels do not support hidden states of this size and type, or None."""
    return unsupported_dtype(dtype)


def forward(
    spec: LogprobSpec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    count: int | Int[Array, ""],
    interpret: bool = False,
) -> LogprobOutputs:
    """Compute `reference.forward`."""
    plan = _plan(spec, hidden, head, interpret)
    part = jax.ShapeDtypeStruct((plan.vocab_tiles, plan.tokens), jnp.float32)
    scratch = {"epilogue": plgpu.SMEM((CONSUMERS, 3, ROWS), jnp.float32)}
    parts = _call(plan, _forward_tile, (part,) * 3, scratch, count, hidden, head, [targets])
    parts = [x[:, : targets.shape[0]] for x in parts]
    tile = jnp.where((targets >= 0) & (targets < plan.vocab), targets // WIDTH, -1)
    has_target = tile == jnp.arange(plan.vocab_tiles)[:, None]
    outputs = jax.vmap(lambda *x: merge_shards(x[:3], x[3], "tiles"), axis_name="tiles", out_axes=None)(
        *parts, has_target
    )
    return outputs[0], outputs[1] if spec.entropy else None, outputs[2]


def d_logits(
    spec: LogprobSpec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    *columns: Float[Array, "M"] | None,
    interpret: bool = False,
) -> Float[Array, "M V"]:
    """Compute `reference.d_logits`."""
    plan = _plan(spec, hidden, head, interpret)
    width = plan.rows if interpret else next_multiple(plan.vocab, SLICE)
    out = jax.ShapeDtypeStruct((plan.tokens, width), hidden.dtype)
    scratch = {"epilogue": matrix_memory((CONSUMERS, ROWS, SLICE), hidden.dtype, SLICE)}
    columns = [targets, *(x for x in columns if x is not None)]
    (gradient,) = _call(plan, _d_logits_tile, (out,), scratch, targets.shape[0], hidden, head, columns)
    return gradient[: targets.shape[0], : head.shape[0]]


class _Plan(NamedTuple):
    """Static parameters of a kernel."""

    spec: LogprobSpec
    vocab: int
    """Rows of the head."""
    tokens: int
    dim: int
    interpret: bool

    @property
    def vocab_tiles(self) -> int:
        return pl.cdiv(self.vocab, WIDTH)

    @property
    def rows(self) -> int:
        """Rows of whole tiles, to which the interpreter's arrays are padded."""
        return self.vocab_tiles * WIDTH

    def layout(self, x, layout):
        return x if self.interpret else plgpu.layout_cast(x, layout)


def _plan(spec: LogprobSpec, hidden, head, interpret: bool) -> _Plan:
    (tokens, dim), vocab = hidden.shape, head.shape[0]
    return _Plan(spec, vocab, next_multiple(tokens, TOKENS), next_multiple(dim, DEPTH), interpret)


def _call(plan: _Plan, tile_fn, outputs, scratch, count, hidden, head, columns):
    """Call tile_fn for each tile of logits. `columns` are numbers of each token, the first its target."""
    fill = lambda x, *shape: jnp.pad(x, [(0, to - size) for size, to in zip(x.shape, shape, strict=True)])
    columns = jnp.stack([fill(x.astype(jnp.float32), plan.tokens) for x in columns])
    rows = plan.rows if plan.interpret else max(next_multiple(plan.vocab, TILE_ROWS), WIDTH)
    hidden, head = fill(hidden, plan.tokens, plan.dim), fill(head, rows, plan.dim)
    scratch = {
        **scratch,
        "a": matrix_memory((STAGES, TOKENS, DEPTH), hidden.dtype, DEPTH),
        "b": matrix_memory((STAGES, WIDTH, DEPTH), hidden.dtype, DEPTH),
        "of_tokens": plgpu.SMEM((columns.shape[0], TOKENS), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
        "columns_ready": plgpu.Barrier(),
        "columns_free": plgpu.Barrier(num_arrivals=CONSUMERS),
    }
    grid = {"sm": 1 if plan.interpret else num_multiprocessors()}
    body = functools.partial(_kernel, plan, tile_fn, len(outputs))
    kernel = launch(body, outputs, scratch, grid, CONSUMERS, plan.interpret)
    return kernel(jnp.asarray(count, jnp.int32)[None], columns, hidden, head)


class _Ring(NamedTuple):
    """Shared memory between the producer and the consumers."""

    a: Any
    b: Any
    ready: Any
    free: Any
    of_tokens: Any
    columns_ready: Any
    columns_free: Any


def _kernel(plan: _Plan, tile_fn, num_outputs: int, count, columns, hidden, head, *refs, epilogue, **ring):
    outputs, ring = refs[:num_outputs], _Ring(**ring)
    warpgroup, steps = lax.axis_index("group"), plan.dim // DEPTH
    # The producer warpgroup streams blocks of hidden and head; consumers multiply, then run the epilogue.
    num_tiles, tile_at = share_tiles(pl.cdiv(count[0], TOKENS), plan.vocab_tiles, GROUP)

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _copy(plan, ring, num_tiles, tile_at, columns, hidden, head)

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        own = pl.ds(warpgroup * ROWS, ROWS)

        def multiply(acc, stage, _):
            add_product(acc, ring.a.at[stage, own], ring.b.at[stage], transpose=True)

        @pl.loop(0, num_tiles)
        def _(n):
            i, j = tile_at(n)
            product = ring_product(
                multiply, (ROWS, WIDTH), ring.ready, ring.free, n * steps, steps, plan.interpret
            )
            plgpu.barrier_wait(ring.columns_ready)
            of_tokens = [plan.layout(ring.of_tokens[c, own], PER_ROW) for c in range(columns.shape[0])]
            plgpu.commit_smem()  # reads end before TMA writes there again
            plgpu.barrier_arrive(ring.columns_free)
            rows = pl.ds(i * TOKENS + warpgroup * ROWS, ROWS)
            tile_fn(plan, j, product, of_tokens, epilogue.at[warpgroup], rows, outputs)

        plgpu.wait_smem_to_gmem(0)


def _copy(plan: _Plan, ring: _Ring, num_tiles, tile_at, columns, hidden, head):
    steps, slot = plan.dim // DEPTH, lambda step: lax.rem(step, jnp.int32(STAGES))

    @pl.loop(0, num_tiles)
    def _(n):
        i, j = tile_at(n)
        rows, width = pl.ds(i * TOKENS, TOKENS), pl.ds(j * WIDTH, WIDTH)

        @pl.loop(0, steps)
        def _(k):
            step = n * steps + k
            stage, depth = slot(step), pl.ds(k * DEPTH, DEPTH)
            pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, ring.free.at[stage]))
            plgpu.copy_gmem_to_smem(hidden.at[rows, depth], ring.a.at[stage], ring.ready.at[stage])
            plgpu.copy_gmem_to_smem(head.at[width, depth], ring.b.at[stage], ring.ready.at[stage])

        pl.when(n > 0)(functools.partial(plgpu.barrier_wait, ring.columns_free))
        plgpu.copy_gmem_to_smem(columns.at[:, rows], ring.of_tokens, ring.columns_ready)

    @pl.loop(jnp.maximum(num_tiles * steps - STAGES, 0), num_tiles * steps)  # wait for every phase
    def _(step):
        plgpu.barrier_wait(ring.free.at[slot(step)])

    pl.when(num_tiles > 0)(functools.partial(plgpu.barrier_wait, ring.columns_free))


def _slices(plan: _Plan, j, product):
    """Yield (first column, logits, rows of the head) of each slice of a tile: a slice needs few registers."""
    lanes = plan.layout(lax.broadcasted_iota(jnp.int32, (ROWS, SLICE), 1), MATRIX)
    for column in range(0, WIDTH, SLICE):
        index = lanes + (j * WIDTH + column)
        yield column, plan.spec.logits(product[:, column : column + SLICE]), index


def _forward_tile(plan: _Plan, j, product, of_tokens, epilogue, rows, outputs):
    """Write log-prob, entropy and lse over these rows of the head."""
    slices = [
        (jnp.where(index < plan.vocab, logits, MASKED_LOGIT), index)
        for _, logits, index in _slices(plan, j, product)
    ]
    top = functools.reduce(jnp.maximum, [jnp.max(logits, axis=1) for logits, _ in slices])
    target = of_tokens[0].astype(jnp.int32)
    target = jnp.where(target < plan.vocab, target, -1)
    total, weighted, logprob = 0.0, 0.0, 0.0
    for logits, index in slices:
        below = logits - _over_rows(top)
        weights = jnp.exp(below)
        total += jnp.sum(weights, axis=1)
        weighted += jnp.sum(weights * below, axis=1)
        logprob += jnp.sum(jnp.where(index == _over_rows(target), below, 0.0), axis=1)
    log_total = jnp.log(total)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, x in enumerate((logprob - log_total, log_total - weighted / total, log_total + top)):
        epilogue[i] = x
    plgpu.commit_smem()
    for i, out in enumerate(outputs):
        plgpu.copy_smem_to_gmem(epilogue.at[i], out.at[j, rows])


def _d_logits_tile(plan: _Plan, j, product, of_tokens, epilogue, rows, outputs):
    """Write the gradient of these logits."""
    target, *columns = [_over_rows(x) for x in (of_tokens[0].astype(jnp.int32), *of_tokens[1:])]
    lse, *rest = columns  # and entropy, d_logprob, d_entropy; or d_logprob alone
    entropy, d_logprob, d_entropy = rest if plan.spec.entropy else (None, rest[0], None)
    for column, logits, index in _slices(plan, j, product):
        slope = plan.spec.slope(logits, index == target, lse, entropy, d_logprob, d_entropy)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        epilogue[...] = slope.astype(outputs[0].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(epilogue, outputs[0].at[rows, pl.ds(j * WIDTH + column, SLICE)])


def _over_rows(x: Float[Array, "R"] | Int[Array, "R"]) -> Array:
    return lax.broadcast_in_dim(x, (ROWS, SLICE), [0])
