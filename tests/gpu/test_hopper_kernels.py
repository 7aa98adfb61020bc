"""The Hopper kernels on a Hopper GPU (`make test-gpu`): sizes of models, against definitions in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import is_hopper
from jaxrl_kernels.decode_attention import pallas_gpu as decode_gpu
from jaxrl_kernels.decode_attention import reference as decode_reference
from jaxrl_kernels.flash_attention import cudnn, pallas_gpu, reference
from jaxrl_kernels.flash_attention.spec import NO_WINDOW, AttentionSpec, DynamicMask, row_windows
from jaxrl_kernels.gated_delta import pallas_gpu as delta_gpu
from jaxrl_kernels.gated_delta import reference as delta_reference
from jaxrl_kernels.grouped_matmul import pallas_gpu as grouped_gpu
from jaxrl_kernels.grouped_matmul import tiled
from jaxrl_kernels.grouped_matmul.bench import group_sizes
from jaxrl_kernels.linear_logprob.api import linear_logprob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_hopper(dispatch.device()[1]), reason="needs a Hopper GPU"),
]
TOLERANCE = {"bfloat16": 1.2e-2, "float16": 2e-3}
"""Largest norm of the error relative to the norm: operands are rounded to 8 and 11 bits."""
REPEATS = 5
"""Runs with the same inputs, whose bits must be equal: a race would show."""


def check(name, got, wanted, dtype):
    got, wanted = (np.asarray(x).astype(np.float64) for x in (got, wanted))
    assert np.isfinite(got).all(), f"{name}: {np.mean(~np.isfinite(got)):.1%} of the numbers are not finite"
    error = np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30)
    largest = np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30)
    print(f"{name}: relative error {error:.1e}, largest {largest:.1e}")
    assert error < TOLERANCE[dtype] and largest < 10 * TOLERANCE[dtype], f"{name}: {error:.1e}, {largest:.1e}"


def same_bits(function, *args):
    """Return the results of the function, of which all runs must have the same bits."""
    first = function(*args)
    for _ in range(REPEATS - 1):
        jax.tree.map(np.testing.assert_array_equal, first, function(*args))
    return first


def exact(function):
    """Return the compiled function with float32 products that are not rounded to TF32."""

    def run(*args):
        with jax.default_matmul_precision("highest"):
            return function(*args)

    return jax.jit(run)


def rows_of_trees(length):
    """(segments, last, positions) of two rows: packed sequences with padding between; trees."""
    packed = np.repeat([1, 2, 0, 3, 0], [length // 3, length // 4, 7, length // 5, length])[:length]
    lengths = [length // 4, *[length // 10] * 4, length // 8, *[length // 16] * 2, length]
    tree = np.repeat([1, 2, 3, 4, 5, 6, 7, 8, 0], lengths)[:length]  # 2, 3, 4, 5 continue 1; 7, 8 continue 6
    last = np.array([0, 5, 2, 3, 4, 5, 8, 7, 8])[tree]
    starts = np.concatenate([[True], tree[1:] != tree[:-1]])
    begin = np.maximum.accumulate(np.where(starts, np.arange(length), 0))
    parents = np.array([0, 0, 1, 1, 1, 1, 0, 6, 6])[tree]
    sizes = np.bincount(tree, minlength=9)
    positions = np.arange(length) - begin + np.where(parents > 0, sizes[parents], 0)
    of_packed = np.arange(length)  # only differences count
    arrays = (packed, tree), (packed, last), (of_packed, positions)
    return [jnp.asarray(np.stack(rows).astype(np.int32)) for rows in arrays]


ATTENTION = {
    "64": (64, "bfloat16", {}),
    "96, float16": (96, "float16", {}),
    "128": (128, "bfloat16", {}),
    "128, 8 heads a key head": (128, "bfloat16", {"heads": (16, 2)}),
    "256": (256, "bfloat16", {}),
    "256, soft-cap, window": (256, "bfloat16", {"softcap": 30.0, "window": 300}),
    "128, soft-cap": (128, "bfloat16", {"softcap": 30.0}),
    "128, window": (128, "bfloat16", {"window": 200}),
    "64, branches": (64, "bfloat16", {"branches": True}),
    "128, branches": (128, "bfloat16", {"branches": True}),
    "128, branches, a window of each": (128, "bfloat16", {"branches": True, "window": 200}),
    "80, part of a longer row": (80, "bfloat16", {"offsets": (700, 300)}),
}


def exact_attention(spec, operands, d_out, *d_lse):
    """(out, lse, (dq, dk, dv)) of the definition, in float32."""
    wide = *(x.astype(jnp.float32) for x in operands[:3]), *operands[3:]
    results = exact(functools.partial(reference.forward, spec))(*wide)
    d_out = d_out.astype(jnp.float32)
    return *results, exact(functools.partial(reference.backward, spec))(*wide, *results, d_out, *d_lse)


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case):
    length, (dim, dtype, options) = 1001, ATTENTION[case]
    heads, kv_heads = options.get("heads", (4, 2))
    branches, window = options.get("branches", False), options.get("window", NO_WINDOW)
    spec = AttentionSpec(dim**-0.5, options.get("softcap"), branches=branches)
    segments, last, positions = rows_of_trees(length)
    mask = DynamicMask(*options.get("offsets", (0, 0)), window)
    if "offsets" in options:
        segments = last = jnp.ones_like(segments)
    if branches and window != NO_WINDOW:
        mask = mask._replace(window=row_windows(segments, last, positions, window))
    last = last if branches else segments
    keys = jax.random.split(jax.random.key(length), 5)
    shape = lambda n: (2, length, n, dim)
    q, k, v, d_out = (
        jax.random.normal(key, shape(n), dtype)
        for key, n in zip(keys, (heads, kv_heads, kv_heads, heads), strict=False)
    )
    q, d_lse = 2 * q, jax.random.normal(keys[4], (2, heads, length))
    operands = q, k, v, segments, last, jax.tree.map(jnp.int32, mask)
    forward = jax.jit(functools.partial(pallas_gpu.forward, spec))
    out, lse = same_bits(forward, *operands)
    *wanted, wide_d = exact_attention(spec, operands, d_out, d_lse)
    check("out", out, wanted[0], dtype)
    attends = np.asarray(wanted[1]) > -1e29
    np.testing.assert_array_equal(np.asarray(lse) > -1e29, attends)
    np.testing.assert_allclose(np.asarray(lse)[attends], np.asarray(wanted[1])[attends], atol=2e-2)
    gradients = jax.jit(functools.partial(pallas_gpu.backward, spec))
    got = same_bits(gradients, *operands, out, lse, d_out, d_lse)
    for name, one, other in zip(("dq", "dk", "dv"), got, wide_d, strict=True):
        check(name, one, other, dtype)


@pytest.mark.parametrize("window", [NO_WINDOW, 200])
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_of_cudnn(dim, window):
    spec = AttentionSpec(dim**-0.5, windows=(window,))
    segments, *_ = rows_of_trees(1024)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (
        jax.random.normal(key, (2, 1024, n, dim), "bfloat16")
        for key, n in zip(keys, (4, 2, 2, 4), strict=True)
    )
    operands = q, k, v, segments, segments, DynamicMask(window=jnp.int32(window))
    out, lse = jax.jit(functools.partial(cudnn.forward, spec))(*operands)
    wanted, _, wide_d = exact_attention(spec, operands, d_out)
    check("out", out, wanted, "bfloat16")
    got = jax.jit(functools.partial(cudnn.backward, spec))(*operands, out, lse, d_out)
    for name, one, other in zip(("dq", "dk", "dv"), got, wide_d, strict=True):
        check(name, one, other, "bfloat16")


@pytest.mark.parametrize(
    ("tokens", "vocab", "dim", "softcap"),
    [(1000, 5003, 576, None), (4096, 49_152, 576, None), (2048, 32_000, 1024, 30.0), (300, 1000, 64, None)],
)
def test_logprob(tokens, vocab, dim, softcap):
    keys = jax.random.split(jax.random.key(0), 5)
    hidden = jax.random.normal(keys[0], (1, tokens, dim), "bfloat16")
    head = (3 * jax.random.normal(keys[1], (vocab, dim)) / dim**0.5).astype("bfloat16")
    targets = jax.random.randint(keys[2], (1, tokens), 0, vocab)
    mask = (jax.random.uniform(keys[3], (1, tokens)) < 0.7).astype(jnp.float32)
    weights = jax.random.normal(keys[4], (2, 1, tokens))

    def loss(name, hidden, head):
        settings = dict(temperature=0.8, softcap=softcap, implementation=name)
        results = linear_logprob(hidden, head, targets, mask, **settings)
        return sum((w * x).sum() for w, x in zip(weights, results, strict=True)), results

    run = lambda name: jax.value_and_grad(functools.partial(loss, name), (0, 1), has_aux=True)
    (_, got), gradients = same_bits(jax.jit(run("pallas_gpu")), hidden, head)
    (_, wanted), wide = exact(run("reference"))(hidden.astype(jnp.float32), head.astype(jnp.float32))
    for name, one, other in zip(("log-prob", "entropy"), got, wanted, strict=True):
        check(name, one, other, "bfloat16")
    for name, one, other in zip(("d_hidden", "d_head"), gradients, wide, strict=True):
        check(name, one, other, "bfloat16")


@pytest.mark.parametrize("splits", [None, 1, 5])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "softcap", "window"),
    [
        (16, 8, 128, 64, None, NO_WINDOW),
        (9, 3, 64, 64, None, NO_WINDOW),
        (32, 4, 128, 128, None, 300),
        (8, 4, 256, 32, 30.0, NO_WINDOW),
    ],
)
def test_decode_attention(heads, kv_heads, dim, page, *, softcap, window, splits):
    slots, longest = 37, 1536
    row = -(-longest // page)
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(1), 3)
    lengths = jnp.asarray(np.append(rng.integers(1, longest, slots - 2), [0, longest]), jnp.int32)
    q = 2 * jax.random.normal(keys[0], (slots, heads, dim), "bfloat16")
    shape = (slots * row + 3, kv_heads, page, dim)
    k, v = (jax.random.normal(key, shape, "bfloat16") for key in keys[1:])
    table = jnp.asarray(rng.permutation(shape[0])[: slots * row].reshape(slots, row), jnp.int32)
    settings = dict(scale=dim**-0.5, softcap=softcap)
    run = functools.partial(decode_gpu.decode_attention, splits=splits, **settings)
    compiled = jax.jit(lambda *args: run(*args, window=jnp.int32(window)))
    got = same_bits(compiled, q, k, v, table, lengths)
    wide = *(x.astype(jnp.float32) for x in (q, k, v)), table, lengths
    wanted = exact(
        lambda *args: decode_reference.decode_attention(*args, window=jnp.int32(window), **settings)
    )(*wide)
    check("out", got[0], wanted[0], "bfloat16")
    full = np.asarray(lengths) > 0
    np.testing.assert_allclose(np.asarray(got[1])[full], np.asarray(wanted[1])[full], atol=2e-2)


@pytest.mark.parametrize("skew", [0.0, 1.0])
@pytest.mark.parametrize(
    ("rows", "groups", "depth", "columns"),
    [
        (8192, 128, 2048, 768),
        (8192, 128, 768, 2048),
        (4096, 32, 2880, 720),
        (3000, 8, 96, 4),
        (70, 64, 256, 320),
    ],
)
def test_grouped_matmul(rows, groups, depth, columns, *, skew):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = group_sizes(rows, groups, skew)
    sizes[1] = 0  # an empty group, and rows after the last one
    lhs = jax.random.normal(keys[0], (rows, depth), "bfloat16")
    rhs = (jax.random.normal(keys[1], (groups, depth, columns)) / depth**0.5).astype("bfloat16")
    d_out = jax.random.normal(keys[2], (rows, columns), "bfloat16")

    def run(product, lhs, rhs, *others):
        sizes, d_out = others
        out, pull = jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes, lhs.dtype), lhs, rhs)
        return out, *pull(d_out)

    args = lhs, rhs, jnp.asarray(sizes), d_out
    got = same_bits(jax.jit(functools.partial(run, grouped_gpu.grouped_matmul)), *args)
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
    wanted = exact(functools.partial(run, tiled.grouped_matmul))(*wide)
    for name, one, other in zip(("out", "d_lhs", "d_rhs"), got, wanted, strict=True):
        check(name, one, other, "bfloat16")


@pytest.mark.parametrize("branches", [False, True], ids=["packed", "shared prefix"])
@pytest.mark.parametrize("dims", [(128, 128), (96, 192)], ids=["Qwen3.5", "OLMo-hybrid"])
def test_gated_delta(dims, branches):
    """Values and gradients of two rows of 5,000 tokens, 16 value heads."""
    segments, last, _ = rows_of_trees(5000)
    last = last if branches else None
    rng, (key_dim, value_dim) = np.random.default_rng(0), dims
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = (unit(rng.normal(size=(2, 5000, 8, key_dim))) for _ in range(2))
    v = rng.normal(size=(2, 5000, 16, value_dim))
    g, beta = -np.exp(rng.normal(size=(2, 5000, 16)) - 2), rng.uniform(0, 1, (2, 5000, 16))
    tokens = [jnp.asarray(x, jnp.bfloat16) for x in (q * key_dim**-0.5, k, v)]
    tokens += [jnp.asarray(x, jnp.float32) for x in (g, beta)]
    weights = jnp.asarray(rng.normal(size=v.shape), jnp.float32)

    def both(function):
        def total(*tokens):
            out, final = function(*tokens, segments=segments, last=last)
            return jnp.sum(weights * out) + jnp.sum(final), (out, final)

        gradients = jax.value_and_grad(total, argnums=range(5), has_aux=True)
        return lambda *tokens: (lambda found: (*found[0][1], *found[1]))(gradients(*tokens))

    got = same_bits(jax.jit(both(delta_gpu.gated_delta)), *tokens)
    wanted = exact(both(delta_reference.gated_delta))(*tokens)
    for name, x, y in zip(("out", "final", "dq", "dk", "dv", "dg", "dbeta"), got, wanted, strict=True):
        check(name, x, y, "bfloat16")
