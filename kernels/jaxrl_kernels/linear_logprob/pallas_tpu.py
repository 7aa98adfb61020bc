"""Log-probs on TPU: Pallas kernels that keep tiles of the product hidden head^T in VMEM.

Forward: the running maximum, sum, entropy and target logit of a tile of tokens while looping over the
vocabulary. Backward: the gradient of the logits of some tokens, from the saved log-sum-exp; the two products
that follow (chunked.backward) are XLA's.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import LANES
from jaxrl_kernels.linear_logprob import shapes
from jaxrl_kernels.linear_logprob.reference import MASKED_LOGIT, LogprobOutputs, LogprobSpec
from jaxrl_kernels.linear_logprob.shapes import STRIP, Tiles


def unsupported(dim: int, dtype) -> str | None:
    """Return why the kernels do not support hidden states of this size and type, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 and float32, not {jnp.dtype(dtype).name}"
    return None


def forward(
    spec: LogprobSpec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    count: int | Int[Array, ""],
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> LogprobOutputs:
    """Compute `reference.forward`."""
    column = jax.ShapeDtypeStruct((hidden.shape[0], 1), jnp.float32)
    kernel = functools.partial(_forward_kernel, spec, head.shape[0])
    outputs = _call(kernel, [column] * 3, tiles, interpret, count, hidden, head, [targets], scratch=1)
    logprob, entropy, lse = [x[:, 0] for x in outputs]
    return logprob, entropy if spec.entropy else None, lse


def d_logits(
    spec: LogprobSpec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    *columns: Float[Array, "M"] | None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "M V"]:
    """Compute `reference.d_logits`."""
    out = jax.ShapeDtypeStruct((hidden.shape[0], head.shape[0]), hidden.dtype)
    columns = [x for x in columns if x is not None]
    kernel = functools.partial(_d_logits_kernel, spec)
    return _call(kernel, [out], tiles, interpret, hidden.shape[0], hidden, head, [targets, *columns])[0]


def _call(kernel, outputs, tiles, interpret, count, hidden, head, columns, scratch: int = 0):
    """Run the kernel over (tokens, vocabulary, depth); it gets each finished tile of the product once."""
    (tokens, dim), vocab = hidden.shape, head.shape[0]
    if dim % LANES:  # padding of the depth must be 0
        hidden, head = [jnp.pad(x, ((0, 0), (0, -dim % LANES))) for x in (hidden, head)]
        dim = hidden.shape[1]
    # Tiles that fit the chip's vector memory.
    chip, itemsize = dispatch.tpu_generation(), hidden.dtype.itemsize
    if tiles is None:
        tiles = shapes.tiles(chip, tokens, vocab, dim, itemsize)
    shapes.check_vmem(chip, tiles, itemsize)
    rows, width, depth = tiles
    grid = pl.cdiv(tokens, rows), pl.cdiv(vocab, width), dim // depth

    def skipping_masked(index):
        """Return the index map that copies nothing for tiles of masked tokens: it repeats the last block."""

        def clamped(i, j, k, count):
            last = jnp.maximum(pl.cdiv(count[0], rows) - 1, 0)
            skip = i > last
            ends = [jnp.where(skip, end - 1, x) for x, end in ((j, grid[1]), (k, grid[2]))]
            return index(jnp.minimum(i, last), *ends)

        return clamped

    # The grid is (tokens, vocabulary, depth); the depth accumulates in scratch.
    token_spec = pl.BlockSpec((rows, 1), lambda i, j, k, count: (i, 0))
    logit_spec = pl.BlockSpec((rows, width), lambda i, j, k, count: (i, j))
    return pl.pallas_call(
        functools.partial(_product, kernel),
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                pl.BlockSpec((rows, depth), skipping_masked(lambda i, j, k: (i, k))),
                pl.BlockSpec((width, depth), skipping_masked(lambda i, j, k: (j, k))),
                *[token_spec] * len(columns),
            ],
            out_specs=[token_spec if out.shape[1] == 1 else logit_spec for out in outputs],
            scratch_shapes=[pltpu.VMEM((rows, size), jnp.float32) for size in (*[1] * scratch, width)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=shapes.vmem_bytes(tiles, itemsize),
        ),
        interpret=interpret,
        name=kernel.func.__name__.strip("_"),
    )(jnp.asarray(count, jnp.int32)[None], hidden, head, *[x[:, None] for x in columns])


def _product(kernel, count, hidden, head, *refs):
    """Accumulate one step of the depth; after the last, call `kernel` for each strip of tokens.

    Args:
        refs: columns, outputs, scratch, the product; `kernel` gets slices of the strip.
    """
    i, j, k = (pl.program_id(dim) for dim in range(3))
    product = refs[-1]
    rows = product.shape[0]

    @pl.when(i * rows < count[0])
    def _():
        step = jax.lax.dot_general(
            hidden[...], head[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        product[...] = jnp.where(k == 0, 0.0, product[...]) + step

        @pl.when(k == pl.num_programs(2) - 1)
        def _():
            @pl.loop(0, rows, step=STRIP)
            def _(start):
                strip = [x.at[pl.ds(start, STRIP)] for x in refs]
                kernel(j, *strip)


def _forward_kernel(spec: LogprobSpec, vocab: int, j, targets, logprob, entropy, lse, total, product):
    """Update the online softmax. Until the end, `logprob` holds the target's logit, `lse` the maximum,
    `total` sum(exp(logit - maximum)), and `entropy` sum(exp(logit - maximum) * (logit - maximum))."""

    @pl.when(j == 0)
    def _():
        lse[...] = jnp.full(lse.shape, MASKED_LOGIT, jnp.float32)
        for x in (logprob, entropy, total):
            x[...] = jnp.zeros(x.shape, jnp.float32)

    width = product.shape[1]
    index = j * width + jax.lax.broadcasted_iota(jnp.int32, product.shape, 1)
    logits = jnp.where(index < vocab, spec.logits(product[...]), MASKED_LOGIT)
    old = lse[...]
    top = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
    below, change = logits - top, old - top
    weights, keep = jnp.exp(below), jnp.exp(change)
    entropy[...] = keep * (entropy[...] + change * total[...]) + _sum(weights * below)
    total[...] = keep * total[...] + _sum(weights)
    logprob[...] += _sum(jnp.where(index == targets[...], logits, 0.0))
    lse[...] = top

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        log_total = jnp.log(total[...])
        here = (targets[...] >= 0) & (targets[...] < vocab)
        logprob[...] = jnp.where(here, logprob[...] - lse[...] - log_total, 0.0)
        entropy[...] = log_total - entropy[...] / total[...]
        lse[...] += log_total


def _d_logits_kernel(spec: LogprobSpec, j, targets, lse, *refs):
    *columns, out, product = refs  # entropy, d_logprob, d_entropy; or d_logprob alone
    entropy, d_logprob, d_entropy = columns if spec.entropy else (None, columns[0], None)
    index = j * product.shape[1] + jax.lax.broadcasted_iota(jnp.int32, product.shape, 1)
    read = lambda ref: None if ref is None else ref[...]
    slope = spec.slope(
        spec.logits(product[...]), index == targets[...], *map(read, (lse, entropy, d_logprob, d_entropy))
    )
    out[...] = slope.astype(out.dtype)


def _sum(x):
    return jnp.sum(x, axis=1, keepdims=True)
