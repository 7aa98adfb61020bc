"""The kernels of the gated delta rule: against the definition, under a mesh, compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from slow_cases import with_slow

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import TPUS
from jaxrl_kernels.gated_delta import pallas_tpu, reference
from jaxrl_kernels.gated_delta.api import gated_delta
from jaxrl_kernels.gated_delta.paths import all_chunk_paths, follow_paths

PACKED = [(1, 1, 137), (2, 2, 1), (3, 3, 30), (4, 4, 95), (0, 0, 7)]
GROUP = [(1, 3, 145), (1, 1, 70), (2, 2, 17), (3, 3, 50), (4, 4, 20), (0, 0, 3)]
TREE = [
    *[
        (1, 5, 120),
        (1, 2, 9),
        (1, 1, 38),
        (2, 2, 7),
        (3, 5, 11),
        (3, 4, 2),
        (3, 3, 75),
        (4, 4, 1),
        (5, 5, 140),
    ],
    *[(6, 8, 3), (6, 6, 18), (7, 8, 4), (7, 7, 16), (8, 8, 13)],
]
"""Rows as (segment, last, number of tokens); chunks of 128 tokens end inside segments."""
LEFT = [(0, 0, 140), (1, 1, 100)]


def make_row(parts):
    """Return segments and last, [1, T]."""
    counts = [count for *_, count in parts]
    return tuple(np.repeat([part[i] for part in parts], counts).astype(np.int32)[None] for i in range(2))


def make_inputs(shape, heads=(2, 4), dims=(16, 24), dtype=np.float32):
    """Return (q, k, v, g, beta) of `shape` [B, T], states, and weights of the outputs."""
    rng = np.random.default_rng(0)
    (hk, hv), (key_dim, value_dim) = heads, dims
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k, v, out = (
        rng.normal(size=(*shape, *d)) for d in ((hk, key_dim), (hk, key_dim), *[(hv, value_dim)] * 2)
    )
    g, beta = -np.exp(rng.normal(size=(*shape, hv)) - 2), rng.uniform(0, 1, (*shape, hv))
    states = jnp.asarray(rng.normal(size=(2, shape[0], hv, key_dim, value_dim)), jnp.float32)
    tokens = [jnp.asarray(x, dtype) for x in (unit(q) * key_dim**-0.5, unit(k), v)]
    return (
        [*tokens, *(jnp.asarray(x, jnp.float32) for x in (g, beta))],
        states[0],
        (out.astype(np.float32), states[1]),
    )


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def run(function, tokens, initial, weights, *rows):
    """Return (out, final) and the gradients of sum(weights * (out, final)) for the tokens and `initial`.

    Args:
        rows: segments, and last if given.
    """
    segments, last = (*rows, None)[:2]

    def total(tokens, initial):
        outputs = function(*tokens, segments=segments, last=last, initial=initial, levels=4)
        return sum(jnp.sum(w * x) for w, x in zip(weights, outputs, strict=True)), outputs

    (_, outputs), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(tokens, initial)
    return outputs, gradients


def assert_close(got, expected, tolerance):
    """Compare trees of arrays with an error relative to the largest number of each, at least 1."""
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1))


@pytest.fixture
def interpreted(monkeypatch):
    """Run the kernels on a CPU."""
    monkeypatch.setattr(pallas_tpu, "INTERPRET", True)


CASES = {
    "packed": (PACKED, (2, 4), (128, 128)),
    "group": (GROUP, (2, 2), (64, 64)),
    "tree": (TREE, (1, 3), (16, 24)),
    "left padding": (LEFT, (3, 3), (96, 192)),
}


@pytest.mark.parametrize("name", with_slow(CASES, {"packed", "group", "left padding"}))
def test_kernels_equal_the_definition(name, interpreted):
    """Packed rows of odd length, trees, padding; out, final state and all gradients, in float32."""
    parts, heads, dims = CASES[name]
    segments, last = make_row(parts)
    last = None if (segments == last).all() else last
    given = *make_inputs(segments.shape, heads, dims), segments, last
    assert_close(run(pallas_tpu.gated_delta, *given), run(reference.gated_delta, *given), 1e-5)


@pytest.mark.slow
def test_bfloat16_is_as_exact(interpreted):
    """Products with queries and keys of bfloat16 lose no bits: only results are rounded, as in plain JAX."""
    segments, last = make_row(GROUP)
    given = *make_inputs(segments.shape, dims=(128, 64), dtype=jnp.bfloat16), segments, last
    (out, final), (tokens, initial) = run(pallas_tpu.gated_delta, *given)
    (of_out, of_final), (of_tokens, of_initial) = run(reference.gated_delta, *given)
    assert_close((final, tokens[3:], initial), (of_final, of_tokens[3:], of_initial), 1e-5)
    assert_close((out, tokens[:3]), (of_out, of_tokens[:3]), 2**-8)


@pytest.mark.parametrize("beta", [0.99, 1.9])
def test_alike_keys(beta, interpreted):
    """Repeated text has equal keys, for which powers of the corrections overflow."""
    (q, k, v, g, _), initial, weights = make_inputs((1, 256))
    k = k[:, :1] + 0.01 * k
    k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
    tokens = [q, k, v, g * 0.01, np.full_like(g, beta)]
    given = tokens, initial, weights, np.ones((1, 256), np.int32)
    assert_close(run(pallas_tpu.gated_delta, *given), run(reference.gated_delta, *given), 1e-4)


def test_strong_decays_and_rows_of_a_batch(interpreted):
    """Sums of g to -3,200 in a chunk; rows of a batch have separate segments."""
    (q, k, v, g, beta), initial, weights = make_inputs((2, 200))
    g = np.where(np.arange(200)[:, None] % 50 < 25, -25, g).astype(np.float32)
    segments = np.stack([np.repeat([1, 2], [150, 50]), np.repeat([1, 2, 0], [20, 170, 10])]).astype(np.int32)
    given = [q, k, v, g, beta], initial, weights, segments
    assert_close(run(pallas_tpu.gated_delta, *given), run(reference.gated_delta, *given), 1e-5)


@pytest.mark.slow
def test_too_few_levels_are_nan(interpreted):
    """TREE has paths of three levels: no token that reads a lost state gets a wrong number."""
    segments, last = map(jnp.asarray, make_row(TREE))
    tokens, *_ = make_inputs(segments.shape)
    apply = jax.jit(pallas_tpu.gated_delta, static_argnames="levels")
    expected, _ = reference.gated_delta(*tokens, segments=segments, last=last, levels=3)
    out, _ = apply(*tokens, segments=segments, last=last, levels=2)
    out, expected = np.asarray(out), np.asarray(expected)
    lost = np.isnan(out)
    assert lost.any() and not lost.all()
    np.testing.assert_allclose(out[~lost], expected[~lost], atol=1e-5)


def test_paths_of_all_chunks_equal_the_paths_one_by_one():
    """The stack before each chunk, found at once, is the stack that the chunks before it leave."""
    segments, last = (x[:, :448] for x in make_row(TREE))
    find = jax.jit(all_chunk_paths, static_argnames=("chunk", "levels"))
    found = jax.device_get(find(segments, last, chunk=16, levels=3))
    before, follow = np.pad(last[:, :1], ((0, 0), (0, 2))), jax.jit(follow_paths)
    for n in range(28):
        paths = follow(before, *(x[:, 16 * n : 16 * n + 16] for x in (segments, last)))
        jax.tree.map(np.testing.assert_array_equal, [x[:, n] for x in found], list(paths))
        before = paths.last
    assert found.fit.all()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 4, 1), id="2 key heads on 4 devices"),
        pytest.param((2, 2, 2), id="2 key heads on 2", marks=pytest.mark.slow),
    ],
)
def test_devices_compute_their_rows_and_heads(shape, interpreted):
    rows, heads, _ = shape
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "tensor", "other"))
    segments = make_row([(1, 1, 60), (2, 2, 90)])[0].repeat(2, axis=0)
    tokens, initial, weights = make_inputs(segments.shape)
    given = tokens, initial, weights, segments
    sharded = functools.partial(
        gated_delta, implementation="pallas_tpu", partition_spec=PartitionSpec("data", None, "tensor", None)
    )
    with jax.set_mesh(mesh):
        got = run(sharded, *given)
    assert_close(got, run(reference.gated_delta, *given), 1e-5)
    assert got[0][0].sharding.shard_shape(got[0][0].shape)[:3] == (2 // rows, 150, 4 // heads)


def test_auto_takes_the_kernels_on_tpu(monkeypatch):
    choose = functools.partial(dispatch.choose, "gated_delta")
    assert choose(128, 128, 2, "bfloat16", True)[0] == "reference"
    monkeypatch.setattr(dispatch, "device", lambda: ("tpu", "TPU v5p"))
    for shape in ((128, 128, 2), (96, 192, 1), (128, 128, 4)):
        assert choose(*shape, "bfloat16", True)[0] == "pallas_tpu"
    for shape, message in (
        ((128, 64, 16, "bfloat16", False), "no beta"),
        ((128, 128, 2, "float16", True), "dtype float16"),
        ((512, 128, 2, "bfloat16", True), "2 states of 512 x 128 a key head"),
        ((128, 128, 16, "bfloat16", True), "16 states of 128 x 128 a key head"),
    ):
        name, reason = choose(*shape)
        assert name == "reference" and message in reason
        with pytest.raises(ValueError, match=f"{message}.*use implementation='reference'"):
            choose(*shape, implementation="pallas_tpu")


def test_short_rows_are_one_chunk_of_plain_jax(monkeypatch):
    """Drafts of a few tokens a slot, which a kernel would pad to 128."""
    monkeypatch.setattr(dispatch, "device", lambda: ("tpu", "TPU v5p"))
    tokens, initial, _ = make_inputs((3, 5))
    given = {"segments": jnp.ones((3, 5), jnp.int32), "initial": initial}
    got, expected = gated_delta(*tokens, **given), reference.gated_delta(*tokens, **given)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def compiled(devices, tokens, *, heads=(16, 32), dims=(128, 128), dtype="bfloat16", branches=False):
    """The program of the rule and its gradients for a row of packed segments on one device."""
    mesh = Mesh(np.array(devices[:1]), ("x",))
    array = lambda *shape, kind=dtype: jax.ShapeDtypeStruct(
        shape, kind, sharding=NamedSharding(mesh, PartitionSpec())
    )
    keys, values = ((1, tokens, count, dim) for count, dim in zip(heads, dims, strict=True))
    numbers = array(1, tokens, heads[1], kind=jnp.float32)
    segments = array(1, tokens, kind=jnp.int32)

    def loss(tokens, segments):
        out, final = gated_delta(*tokens, segments=segments, last=segments if branches else None)
        return out.astype(jnp.float32).sum() + final.sum()

    with jax.set_mesh(mesh):
        arguments = (array(*keys), array(*keys), array(*values), numbers, numbers), segments
        traced = jax.jit(jax.value_and_grad(loss)).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",)).compile()


PREFIXES = "Qwen3.5-9B, shared prefixes"
SHAPES = {
    "Qwen3.5-9B": {},
    PREFIXES: {"branches": True},
    "OLMo-hybrid": {"heads": (30, 30), "dims": (96, 192), "branches": True},
    "64, float32": {"heads": (2, 8), "dims": (64, 64), "dtype": "float32", "branches": True},
    "256": {"heads": (2, 2), "dims": (256, 256), "dtype": "float32", "branches": True},
}


@pytest.mark.compilers
@pytest.mark.parametrize(
    ("chip", "shape"),
    [*((chip, PREFIXES) for chip in TPUS), *(("v4", shape) for shape in SHAPES if shape != PREFIXES)],
)
def test_both_kernels_compile(chip, shape, tpu):
    """Compiled, not run: blocks fit, also into a v4, which has the least VMEM; chips have every operation."""
    text = compiled(tpu(chip), 1000, **SHAPES[shape]).as_text()
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', text)) == 2
