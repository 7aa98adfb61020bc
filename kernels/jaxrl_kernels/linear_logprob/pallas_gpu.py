"""Hopper kernels (H100, H200): Pallas Mosaic GPU with TMA, wgmma and specialised warpgroups.

One warpgroup does nothing but copy blocks of hidden and head into a ring in shared memory, on through all the
tiles of its SM; two others multiply 64 tokens each with the same 256 rows of the head. What is wanted of a
finished tile of logits is taken from the registers while the ring fills for the next: in the forward pass
log-prob, entropy and log-sum-exp of these 256 rows, which `reference.merge` joins; in the backward pass
the gradient of the logits of some tokens, from which two plain products follow (chunked.backward).

bfloat16 and float16 only: wgmma multiplies float32 as TF32, which is no float32.
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
    COMPUTE,
    FEW_REGISTERS,
    MANY_REGISTERS,
    MATRIX,
    PER_ROW,
    ROWS,
    launch,
    matrix_memory,
)
from jaxrl_kernels.linear_logprob.reference import Found, Spec, merge

LOWEST = -1e30
WIDTH, DEPTH = 256, 64
"""Of a step, which has ROWS tokens: rows of the head, numbers of each. Its sums take 128 registers a lane."""
TOKENS = COMPUTE * ROWS
STAGES = 4
"""Steps in the ring: 4 * (128 + 256) * 64 * 2 bytes = 192 KiB of the 227 of an SM."""
SLICE = 64
"""Columns of a tile of logits that are looked at, and of the gradient that are written, at a time."""
GROUP = 16
"""Tiles of tokens that share tiles of the head while those are in the level-2 cache."""
SMS = 132


def unsupported(dim: int, dtype: Any) -> str | None:
    """Why it cannot do this, or None."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"multiplies bfloat16 and float16, not {dtype}"
    return None


def forward(
    spec: Spec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    count: int | Int[Array, ""],
    interpret: bool = False,
) -> Found:
    plan = _plan(spec, hidden, head, interpret)
    part = jax.ShapeDtypeStruct((plan.vocab_tiles, plan.tokens), jnp.float32)
    scratch = {"found": plgpu.SMEM((COMPUTE, 3, ROWS), jnp.float32)}
    parts = _call(plan, _forward_tile, (part,) * 3, scratch, count, hidden, head, [targets])
    parts = [x[:, : targets.shape[0]] for x in parts]
    tile = jnp.where((targets >= 0) & (targets < plan.vocab), targets // WIDTH, -1)
    has_target = tile == jnp.arange(plan.vocab_tiles)[:, None]
    found = jax.vmap(lambda *x: merge(x[:3], x[3], "tiles"), axis_name="tiles", out_axes=None)(
        *parts, has_target
    )
    return found[0], found[1] if spec.entropy else None, found[2]


def d_logits(
    spec: Spec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    *columns: Float[Array, "M"] | None,
    interpret: bool = False,
) -> Float[Array, "M V"]:
    plan = _plan(spec, hidden, head, interpret)
    out = jax.ShapeDtypeStruct((plan.tokens, _up(plan.rows, SLICE)), hidden.dtype)
    scratch = {"found": matrix_memory((COMPUTE, ROWS, SLICE), hidden.dtype, SLICE)}
    columns = [targets, *(x for x in columns if x is not None)]
    (slope,) = _call(plan, _slope_tile, (out,), scratch, targets.shape[0], hidden, head, columns)
    return slope[: targets.shape[0], : head.shape[0]]


class _Plan(NamedTuple):
    """What a kernel knows when it is compiled."""

    spec: Spec
    vocab: int
    """Rows of the head."""
    rows: int
    """With those added so that TMA can write them: a multiple of 8, at least WIDTH."""
    tokens: int
    dim: int
    interpret: bool

    @property
    def vocab_tiles(self) -> int:
        return pl.cdiv(self.rows, WIDTH)

    def start(self, tile):
        """The first row of a tile; the last tile ends with the head and repeats some rows."""
        return jnp.minimum(tile * WIDTH, self.rows - WIDTH)

    def layout(self, x, layout):
        return x if self.interpret else plgpu.layout_cast(x, layout)


def _plan(spec: Spec, hidden, head, interpret: bool) -> _Plan:
    (tokens, dim), vocab = hidden.shape, head.shape[0]
    return _Plan(spec, vocab, max(_up(vocab, 8), WIDTH), _up(tokens, TOKENS), _up(dim, DEPTH), interpret)


def _up(x: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-x // to) * to


def _call(plan: _Plan, tile_fn, outputs, scratch, count, hidden, head, columns):
    """tile_fn of each tile of logits. `columns` are numbers of each token, the first its target."""
    fill = lambda x, *shape: jnp.pad(x, [(0, to - size) for size, to in zip(x.shape, shape, strict=True)])
    columns = jnp.stack([fill(x.astype(jnp.float32), plan.tokens) for x in columns])
    hidden, head = fill(hidden, plan.tokens, plan.dim), fill(head, plan.rows, plan.dim)
    scratch = {
        **scratch,
        "a": matrix_memory((STAGES, TOKENS, DEPTH), hidden.dtype, DEPTH),
        "b": matrix_memory((STAGES, WIDTH, DEPTH), hidden.dtype, DEPTH),
        "of_tokens": plgpu.SMEM((columns.shape[0], TOKENS), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=STAGES),
        "columns_ready": plgpu.Barrier(),
        "columns_free": plgpu.Barrier(num_arrivals=COMPUTE),
    }
    grid = {"sm": 1 if plan.interpret else _sms()}
    body = functools.partial(_kernel, plan, tile_fn, len(outputs))
    kernel = launch(body, outputs, scratch, grid, COMPUTE, plan.interpret)
    return kernel(jnp.asarray(count, jnp.int32)[None], columns, hidden, head)


class _Ring(NamedTuple):
    """Shared memory between the warpgroup that copies and those that compute."""

    a: Any
    b: Any
    ready: Any
    free: Any
    of_tokens: Any
    columns_ready: Any
    columns_free: Any


def _kernel(plan: _Plan, tile_fn, num_outputs: int, count, columns, hidden, head, *refs, found, **ring):
    outputs, ring = refs[:num_outputs], _Ring(**ring)
    me, steps = lax.axis_index("group"), plan.dim // DEPTH
    mine, place = _share(plan, count[0])

    @pl.when(me == COMPUTE)
    def _():
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        _copy(plan, ring, mine, place, columns, hidden, head)

    @pl.when(me < COMPUTE)
    def _():
        plgpu.set_max_registers(MANY_REGISTERS, action="increase")
        own = pl.ds(me * ROWS, ROWS)

        @pl.loop(0, mine)
        def _(n):
            i, j = place(n)
            product = _product(plan, ring.a.at[:, own], ring, n * steps, steps)
            plgpu.barrier_wait(ring.columns_ready)
            of_mine = [plan.layout(ring.of_tokens[c, own], PER_ROW) for c in range(columns.shape[0])]
            plgpu.commit_smem()  # what was read has been read, before TMA writes there again
            plgpu.barrier_arrive(ring.columns_free)
            rows = pl.ds(i * TOKENS + me * ROWS, ROWS)
            tile_fn(plan, j, product, of_mine, found.at[me], rows, outputs)

        plgpu.wait_smem_to_gmem(0)


def _share(plan: _Plan, count):
    """(how many tiles of logits are this SM's, n -> (tile of tokens, tile of the vocabulary) of its n-th)"""
    sm, sms = lax.axis_index("sm"), lax.axis_size("sm")
    token_tiles = pl.cdiv(count, TOKENS)

    def place(n):
        n, size = sm + n * sms, jnp.int32(GROUP * plan.vocab_tiles)
        first = lax.div(n, size) * GROUP
        wide, rest = jnp.minimum(token_tiles - first, GROUP), lax.rem(n, size)
        return first + lax.rem(rest, wide), lax.div(rest, wide)

    return jnp.maximum(pl.cdiv(token_tiles * plan.vocab_tiles - sm, sms), 0), place


def _copy(plan: _Plan, ring: _Ring, mine, place, columns, hidden, head):
    steps, slot = plan.dim // DEPTH, lambda step: lax.rem(step, jnp.int32(STAGES))

    @pl.loop(0, mine)
    def _(n):
        i, j = place(n)
        rows, width = pl.ds(i * TOKENS, TOKENS), pl.ds(plan.start(j), WIDTH)

        @pl.loop(0, steps)
        def _(k):
            step = n * steps + k
            here, depth = slot(step), pl.ds(k * DEPTH, DEPTH)
            pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, ring.free.at[here]))
            plgpu.copy_gmem_to_smem(hidden.at[rows, depth], ring.a.at[here], ring.ready.at[here])
            plgpu.copy_gmem_to_smem(head.at[width, depth], ring.b.at[here], ring.ready.at[here])

        pl.when(n > 0)(functools.partial(plgpu.barrier_wait, ring.columns_free))
        plgpu.copy_gmem_to_smem(columns.at[:, rows], ring.of_tokens, ring.columns_ready)

    @pl.loop(jnp.maximum(mine * steps - STAGES, 0), mine * steps)  # every phase is waited for
    def _(step):
        plgpu.barrier_wait(ring.free.at[slot(step)])

    pl.when(mine > 0)(functools.partial(plgpu.barrier_wait, ring.columns_free))


def _product(plan: _Plan, a, ring: _Ring, first, steps: int):
    """[ROWS, WIDTH] float32, of `steps` blocks of the ring from the one of step `first` on."""
    slot = lambda step: lax.rem(step, jnp.int32(STAGES))

    def interpreted(k, acc):
        here = slot(first + k)
        plgpu.barrier_wait(ring.ready.at[here])
        both = (((1,), (1,)), ((), ()))
        acc += lax.dot_general(a[here], ring.b[here], both, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # wgmma would need none
        plgpu.barrier_arrive(ring.free.at[here])
        return acc

    if plan.interpret:
        return lax.fori_loop(0, steps, interpreted, jnp.zeros((ROWS, WIDTH), jnp.float32))

    def whole(acc):
        @pl.loop(0, steps)
        def _(k):
            here = slot(first + k)
            plgpu.barrier_wait(ring.ready.at[here])
            plgpu.wgmma(acc, a.at[here], ring.b.at[here].transpose((1, 0)))
            plgpu.wgmma_wait(1)  # the step before this one is done
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(ring.free.at[slot(first + k - 1)]))

        done = acc[...]
        plgpu.barrier_arrive(ring.free.at[slot(first + steps - 1)])
        return done

    return pl.run_scoped(whole, plgpu.ACC((ROWS, WIDTH), jnp.float32))


def _slices(plan: _Plan, j, product):
    """(where it begins, its logits, which rows of the head they are of) of one slice of a tile after another:
    the arithmetic on one needs few registers."""
    lanes = plan.layout(lax.broadcasted_iota(jnp.int32, (ROWS, SLICE), 1), MATRIX)
    for place in range(0, WIDTH, SLICE):
        index = lanes + (plan.start(j) + place)
        yield place, plan.spec.logits(product[:, place : place + SLICE]), index


def _forward_tile(plan: _Plan, j, product, of_tokens, found, rows, outputs):
    """Log-prob, entropy and lse of these rows of the head alone."""
    first = j * WIDTH  # those before it are the tile's before
    slices = [
        (jnp.where((index >= first) & (index < plan.vocab), logits, LOWEST), index)
        for _, logits, index in _slices(plan, j, product)
    ]
    top = functools.reduce(jnp.maximum, [jnp.max(logits, axis=1) for logits, _ in slices])
    target = of_tokens[0].astype(jnp.int32)
    target = jnp.where((target >= first) & (target < plan.vocab), target, -1)
    total, weighted, logprob = 0.0, 0.0, 0.0
    for logits, index in slices:
        below = logits - _over_rows(top)
        weights = jnp.exp(below)
        total += jnp.sum(weights, axis=1)
        weighted += jnp.sum(weights * below, axis=1)
        logprob += jnp.sum(jnp.where(index == _over_rows(target), below, 0.0), axis=1)
    log_total = jnp.log(total)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for place, x in enumerate((logprob - log_total, log_total - weighted / total, log_total + top)):
        found[place] = x
    plgpu.commit_smem()
    for place, out in enumerate(outputs):
        plgpu.copy_smem_to_gmem(found.at[place], out.at[j, rows])


def _slope_tile(plan: _Plan, j, product, of_tokens, found, rows, outputs):
    """The gradient of these logits. Rows that two tiles have are written twice, alike."""
    target, *columns = [_over_rows(x) for x in (of_tokens[0].astype(jnp.int32), *of_tokens[1:])]
    lse, *rest = columns  # and entropy, d_logprob, d_entropy; or d_logprob alone
    entropy, d_logprob, d_entropy = rest if plan.spec.entropy else (None, rest[0], None)
    for place, logits, index in _slices(plan, j, product):
        slope = plan.spec.slope(logits, index == target, lse, entropy, d_logprob, d_entropy)
        plgpu.wait_smem_to_gmem(0, wait_read_only=not plan.interpret)  # it minds what is written twice, alike
        found[...] = slope.astype(outputs[0].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(found, outputs[0].at[rows, pl.ds(plan.start(j) + place, SLICE)])


def _over_rows(x: Float[Array, "R"] | Int[Array, "R"]) -> Array:
    return lax.broadcast_in_dim(x, (ROWS, SLICE), [0])


def _sms() -> int:
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu":
        return device.num_cores
    return getattr(jax.devices()[0], "core_count", SMS)
