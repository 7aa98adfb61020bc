"""The Hopper kernel of the gated delta rule: its scan in the interpreter, the rule around it, compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from slow_cases import with_slow
from test_gated_delta_kernels import assert_close, make_inputs, make_row, run

from jaxrl_kernels import dispatch, topology
from jaxrl_kernels.gated_delta import gpu_scan, pallas_gpu, reference
from jaxrl_kernels.gated_delta.api import gated_delta
from jaxrl_kernels.gated_delta.gpu_scan import Scan, ScanSettings


def make_scan(levels, chunks=2, heads=2):
    """Two value heads of a key head."""
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=(1, heads, *shape)) / 10, jnp.float32)
    scan = Scan(
        array(chunks, 64, 128)[:, :1].astype(jnp.bfloat16),
        m=array(chunks, 64, 64),
        a=array(chunks, 64, 32),
        p=array(chunks, levels, 64),
        r=array(chunks, levels, 64),
        f=array(chunks, levels, levels),
        first=array(levels, 128, 32),
    )
    return scan, array(chunks, levels, 128, 32)


def plain_scan(scan, added=None):
    """The scan in float64, chunk by chunk; with `added` from the last one on."""
    exact = jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32), np.float64), scan)
    k, count = np.repeat(exact.k, 2, axis=1), exact.m.shape[2]
    state, us, states = exact.first, {}, {}
    for n in range(count) if added is None else reversed(range(count)):
        p, r, f = (x[:, :, n] for x in (exact.p, exact.r, exact.f))
        x = exact.a[:, :, n] + np.einsum("bhdc,bhck,bhdkv->bhcv", p, k[:, :, n], state)
        us[n], states[n] = exact.m[:, :, n] @ x, state
        state = np.einsum("bhde,bhekv->bhdkv", f, state) + (0 if added is None else added[:, :, n])
        state = state + np.einsum("bhck,bhdc,bhcv->bhdkv", k[:, :, n], r, us[n])
    return *(np.stack([x[n] for n in range(count)], axis=2) for x in (us, states)), state


@pytest.mark.parametrize("levels", with_slow([1, 2], {1}))
def test_the_kernel_equals_float64_and_does_not_race(levels, compile_once):
    """Forward, and from the last chunk on with gradients that are added: exact to float32."""
    scan, added = make_scan(levels)
    for given in (None, added):
        got = gpu_scan.run_shards(ScanSettings(None, interpret=True), scan, given)
        for x, y in zip(got, plain_scan(scan, given), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-7)
        assert not interpret_pallas_call.get_races().races_found


@pytest.fixture
def scanned(monkeypatch):
    """Compute the kernel's scan by jnp, which compiles faster than the interpreter."""

    def run_heads(scan, added, interpret):
        assert not interpret
        (heads, count, levels), state, results = scan.p.shape[:3], scan.first, {}
        k = jnp.repeat(scan.k.astype(jnp.float32), heads // len(scan.k), axis=0)
        nonzero = lambda weight, x: jnp.where(weight != 0, weight * x, 0)
        for n in range(count) if added is None else reversed(range(count)):
            read = [nonzero(scan.p[:, n, d, :, None], k[:, n] @ state[:, d]) for d in range(levels)]
            u = scan.m[:, n] @ (scan.a[:, n] + sum(read))
            results[n] = u, state
            kept = nonzero(scan.f[:, n, ..., None, None], state[:, None]).sum(axis=2)
            state = kept + jnp.einsum("hck,hdc,hcv->hdkv", k[:, n], scan.r[:, n], u)
            state = state if added is None else state + added[:, n]
        u, states = (jnp.stack([results[n][i] for n in range(count)], axis=1) for i in range(2))
        return u, states, state

    monkeypatch.setattr(gpu_scan, "run_heads", run_heads)


PACKED = [(1, 1, 137), (2, 2, 1), (3, 3, 30), (4, 4, 95), (0, 0, 7)]
GROUP = [(1, 3, 145), (1, 1, 70), (2, 2, 17), (3, 3, 50), (4, 4, 20), (0, 0, 3)]


@pytest.mark.parametrize("together", [64, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "parts", [pytest.param(PACKED, id="packed", marks=pytest.mark.slow), pytest.param(GROUP, id="group")]
)
def test_the_rule_around_the_kernel_equals_the_definition(parts, together, scanned, monkeypatch):
    """Out, final state and all gradients; groups of chunks, and several of them."""
    monkeypatch.setattr(pallas_gpu, "TOGETHER", together)
    segments, last = make_row(parts)
    last = None if (segments == last).all() else last
    (q, k, v, g, beta), initial, weights = make_inputs(segments.shape, heads=(2, 4), dims=(96, 40))
    q, k = (x.astype(jnp.bfloat16) for x in (q, k))
    given = [q, k, v, g, beta], initial, weights, segments, *(() if last is None else (last,))
    two = lambda function: lambda *tokens, levels, **rows: function(*tokens, levels=2, **rows)
    got, expected = run(two(pallas_gpu.gated_delta), *given), run(two(reference.gated_delta), *given)
    assert_close((got[0], got[1][0][2:], got[1][1]), (expected[0], expected[1][0][2:], expected[1][1]), 1e-5)
    assert_close(got[1][0][:2], expected[1][0][:2], 2**-8)


@pytest.mark.slow
def test_devices_compute_their_rows_and_heads(scanned):
    """Two key heads on four devices; the scan is the kernel's part."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    segments = make_row([(1, 1, 60), (2, 2, 90)])[0].repeat(2, axis=0)
    (q, k, v, g, beta), initial, weights = make_inputs(segments.shape)
    tokens = [q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), v, g, beta]
    given = tokens, initial, weights, segments
    spec = PartitionSpec("data", None, "tensor", None)
    sharded = functools.partial(gated_delta, implementation="pallas_gpu", partition_spec=spec)
    with jax.set_mesh(mesh):
        got = run(sharded, *given)
    expected = run(reference.gated_delta, *given)
    assert_close((got[0], got[1][0][2:], got[1][1]), (expected[0], expected[1][0][2:], expected[1][1]), 1e-5)
    assert_close(got[1][0][:2], expected[1][0][:2], 2**-6)  # sums of the gradients of repeated heads
    assert got[0][0].sharding.shard_shape(got[0][0].shape)[:3] == (1, 150, 1)


def program(devices, *, branches, dims=(128, 128)):
    """Trace the rule and its gradients for a row of packed segments on one device."""
    mesh = Mesh(np.array(devices[:1]), ("x",))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    keys, values = array((1, 1000, 2, dims[0]), jnp.bfloat16), array((1, 1000, 4, dims[1]), jnp.bfloat16)
    numbers, segments = array((1, 1000, 4), jnp.float32), array((1, 1000), jnp.int32)

    def loss(tokens, segments):
        last = segments if branches else None
        out, final = gated_delta(*tokens, segments=segments, last=last, implementation="pallas_gpu")
        return out.astype(jnp.float32).sum() + final.sum()

    with jax.set_mesh(mesh):
        traced = jax.jit(jax.grad(loss)).trace((keys, keys, values, numbers, numbers), segments)
        return traced.lower(lowering_platforms=("cuda",))


@pytest.mark.compilers
@pytest.mark.parametrize("branches", [False, True])
def test_compiles_for_an_h100_that_is_not_here(branches, monkeypatch, capfd):
    """Two calls: forward, and from the last chunk on."""
    if problem := topology.missing_compiler("cuda"):
        pytest.skip(problem)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    text = program(topology.gpu_devices("h100"), branches=branches).compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 2
    output = capfd.readouterr().out
    assert output.count("Compiling entry function") == output.count(" 0 bytes spill stores") == 2
    assert "C7512" not in output, "products are serialised for want of registers"


def test_auto_leaves_out_the_kernel_which_no_device_has_run(monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", "NVIDIA H100 80GB HBM3"))
    choose = functools.partial(dispatch.choose, "gated_delta")
    shapes = (96, 192, 1, "bfloat16", True), (128, 128, 16, "bfloat16", True)
    for shape in shapes:
        name, reason = choose(*shape)
        assert name == "reference" and "its kernel has run on no device; JAXRL_KERNELS=all takes it" in reason
        assert choose(*shape, implementation="pallas_gpu")[0] == "pallas_gpu"
    monkeypatch.setenv("JAXRL_KERNELS", "all")
    assert [choose(*shape)[0] for shape in shapes] == ["pallas_gpu"] * 2
    for shape, message in (
        ((128, 64, 16, "bfloat16", False), "no beta"),
        ((128, 128, 2, "float32", True), "dtype float32"),
        ((256, 128, 2, "bfloat16", True), "keys of 256"),
    ):
        name, reason = choose(*shape)
        assert name == "reference" and message in reason
