"""cuDNN attention: packed rows, their classes of lengths and fallbacks with an emulated cuDNN, and lowering.

cuDNN itself needs a GPU: compiled, not run.
"""

import functools
import re

import jax
import jax.numpy as jnp
import kernel_oracles as oracles
import numpy as np
import pytest
from kernel_oracles import MASKED_LSE, assert_close

from jaxrl_kernels import dispatch, topology
from jaxrl_kernels.decode_attention import api as decode
from jaxrl_kernels.flash_attention import blockwise, cudnn, reference
from jaxrl_kernels.flash_attention.api import flash_attention
from jaxrl_kernels.flash_attention.sinks import add_sinks
from jaxrl_kernels.flash_attention.spec import NO_WINDOW, AttentionSpec, DynamicMask
from jaxrl_kernels.linear_logprob.api import linear_logprob

FAST = {"xla_backend_optimization_level": 0}  # of compilation
LENGTH, HEADS, KV_HEADS, DIM = 200, 4, 2, 8


def rows(*parts):
    """Segments of a row of LENGTH: (id, tokens) each, the rest padding."""
    row = np.concatenate([np.full(count, segment, np.int32) for segment, count in parts])
    return np.pad(row, (0, LENGTH - len(row)))


SEGMENTS = np.stack([rows((1, 101), (0, 5), (2, 60), (3, 1), (4, 20)), rows((1, 30), (2, 30), (3, 30))])
"""Every class of lengths: 101 to 200, 51 to 100, and 1 to 50."""


def emulated_call(is_backward, spec, window, slots, *arrays):
    """`cudnn.fused_call` in jnp: each slot is a row of its own; what cuDNN does not write is NaN."""
    q, k, v, *residuals = arrays
    size, longest = slots.first.size, slots.longest
    tokens = len(q)
    assert size * longest == 2 * tokens and slots.lengths.shape == (size,)
    position = jnp.arange(longest)
    index = jnp.minimum(slots.first[:, None] + position, tokens - 1)
    inside = position < slots.lengths[:, None]
    take = lambda x: jnp.where(inside[..., None, None], x[index], 0)

    def put(x):
        target = jnp.where(inside, index, tokens)
        return jnp.full((tokens, *x.shape[2:]), jnp.nan, x.dtype).at[target].set(x, mode="drop")

    ids, mask = inside.astype(jnp.int32), DynamicMask(window=window or NO_WINDOW)
    operands = spec, take(q), take(k), take(v), ids, ids, mask
    if not is_backward:
        out, lse = reference.forward(*operands)
        return put(out), jnp.where(inside[:, None], lse, jnp.nan)
    statistics, d_out, out = residuals
    return tuple(map(put, reference.backward(*operands, take(out), statistics, take(d_out))))


@pytest.fixture
def emulator(monkeypatch):
    """cuDNN emulated; `blockwise` gives NaN."""
    monkeypatch.setattr(cudnn, "fused_call", emulated_call)
    only_nan = lambda function: lambda *x: jax.tree.map(lambda y: y * jnp.nan, function(*x))
    for name in ("forward", "backward"):
        monkeypatch.setattr(blockwise, name, only_nan(getattr(blockwise, name)))


def inputs():
    rng = np.random.default_rng(0)
    sizes = HEADS, KV_HEADS, KV_HEADS, HEADS
    return [rng.normal(size=(2, LENGTH, heads, DIM)).astype(np.float32) for heads in sizes]


def both_passes(spec, with_lse, sinks, *arrays):
    segments, window, q, k, v, d_out, d_lse = arrays
    mask = DynamicMask(window=window)
    out, lse = cudnn.forward(spec, q, k, v, segments, segments, mask)
    out, lse = (out, lse) if sinks is None else add_sinks(out, lse, jnp.asarray(sinks))
    extra = (d_lse,) if with_lse else ()
    return out, lse, *cudnn.backward(spec, q, k, v, segments, segments, mask, out, lse, d_out, *extra)


def check(spec, segments, window, *, with_lse=False, sinks=None):
    q, k, v, d_out = inputs()
    d_lse = np.random.default_rng(1).normal(size=(2, HEADS, LENGTH)).astype(np.float32) * with_lse
    run = jax.jit(lambda *x: both_passes(spec, with_lse, sinks, *x), compiler_options=FAST)  # traced anew
    results = run(segments, np.int32(window), q, k, v, d_out, d_lse)
    allowed = oracles.visible(DynamicMask(window=window), segments, segments)
    wanted = oracles.attention(q, k, v, allowed, scale=spec.scale, d_out=d_out, d_lse=d_lse, sinks=sinks)
    for name, got, expected in zip(("out", "lse", "dq", "dk", "dv"), results, wanted[:5], strict=True):
        assert_close(got, expected, name=name)
    padding = segments == 0
    masked_lse = MASKED_LSE if sinks is None else sinks
    assert (np.moveaxis(np.asarray(results[1]), 1, 2)[padding] == masked_lse).all()
    assert not any(np.asarray(x)[padding].any() for x in (results[0], *results[2:]))


@pytest.mark.parametrize(
    ("window", "sinks"),
    [
        pytest.param(NO_WINDOW, None, marks=pytest.mark.slow),
        (40, np.linspace(-1, 4, HEADS, dtype=np.float32)),
    ],
)
def test_packed_rows_are_those_of_the_oracle(window, sinks, emulator):
    """Values and gradients of every class of lengths, without `blockwise`; one program for both windows.

    Sinks change out and lse between the passes.
    """
    check(AttentionSpec(0.3, windows=(40, NO_WINDOW)), SEGMENTS, window, sinks=sinks)


@pytest.mark.parametrize(
    ("segments", "window", "windows", "with_lse"),
    [
        pytest.param(SEGMENTS, 40, None, False, marks=pytest.mark.slow),  # no window was compiled
        (SEGMENTS, 30, (40,), False),  # another one was
        (np.tile(np.arange(1, LENGTH + 1, dtype=np.int32), (2, 1)), NO_WINDOW, None, False),  # too many
    ],
)
def test_what_cudnn_cannot_compute_blockwise_does(segments, window, windows, *, with_lse, monkeypatch):
    broken = lambda *x: tuple(jnp.nan * y for y in emulated_call(*x))
    monkeypatch.setattr(cudnn, "fused_call", broken)
    check(AttentionSpec(0.3, windows=windows), segments, window, with_lse=with_lse)


def test_the_gradient_of_the_log_sum_exp_is_blockwise(monkeypatch):
    monkeypatch.setattr(cudnn, "fused_call", emulated_call)
    check(AttentionSpec(0.3), SEGMENTS, NO_WINDOW, with_lse=True)


def test_classes_of_lengths_by_hand():
    assert cudnn._classes(256) == [(129, 256), (65, 128), (1, 64)]
    assert cudnn._classes(40) == [(1, 40)]
    assert [cudnn._padded_length(n) for n in (1, 64, 65, 200, 8192, 3000)] == [1, 64, 66, 200, 8192, 3008]


def test_segments_by_hand():
    segments = jnp.array([[1, 1, 0, 5, 5, 5], [2, 0, 0, 3, 3, 3]])
    runs, fits = cudnn.find_runs(segments)
    assert fits
    assert runs.length.tolist() == [2, 2, 0, 3, 3, 3, 1, 0, 0, 3, 3, 3]
    real = np.asarray(runs.length) > 0
    assert np.asarray(runs.start)[real].tolist() == [0, 0, 3, 3, 3, 6, 9, 9, 9]
    slots = cudnn.Slots.of(runs, 3, 6)
    assert slots.first.tolist() == [3, 9, 12, 12] and slots.lengths.tolist() == [3, 3, 0, 0]
    assert np.asarray(slots.slot)[np.asarray(slots.member)].tolist() == [0, 0, 0, 1, 1, 1]
    assert np.asarray(slots.position)[np.asarray(slots.member)].tolist() == [0, 1, 2, 0, 1, 2]


KINDS = {
    "NVIDIA A100-SXM4-80GB": "cudnn",
    "NVIDIA A10G": "cudnn",
    "NVIDIA L4": "cudnn",
    "NVIDIA GeForce RTX 4090": "cudnn",
    "NVIDIA RTX 6000 Ada Generation": "cudnn",
    "NVIDIA B200": "cudnn",
    "NVIDIA H100 80GB HBM3": "pallas_gpu",
    "NVIDIA GH200 480GB": "pallas_gpu",
    "Tesla T4": "blockwise",
    "Quadro RTX 4000": "blockwise",
    "Tesla V100-SXM2-16GB": "blockwise",
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_generation_has_its_attention(kind, monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", kind))
    monkeypatch.setattr(cudnn, "installed_version", lambda: None)
    assert dispatch.choose("flash_attention", 128, "bfloat16")[0] == KINDS[kind]
    logprob, reason = dispatch.choose("linear_logprob", 4096, "bfloat16")
    if KINDS[kind] != "pallas_gpu":
        assert (logprob, reason) == ("chunked", f"{kind}: plain JAX, there are no kernels for it")


@pytest.mark.parametrize(
    ("shape", "version", "message"),
    [
        ((128, "float32"), None, "takes bfloat16 and float16, not float32"),
        ((256, "bfloat16"), None, "multiples of 8 up to 128, not 256"),
        ((100, "float16"), None, "multiples of 8 up to 128, not 100"),
        ((128, "bfloat16", 30.0), None, "no soft-cap"),
        ((128, "bfloat16"), (9, 12, 0), r"cuDNN 9\.12\.0: packed rows need 9\.18\.1 or newer"),
        ((128, "bfloat16", None), (9, 18, 1), None),
    ],
)
def test_dispatch_says_why_it_is_not_cudnn(shape, version, message, monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", "NVIDIA L4"))
    monkeypatch.setattr(cudnn, "installed_version", lambda: version)
    name, reason = dispatch.choose("flash_attention", *shape)
    assert name == ("blockwise" if message else "cudnn")
    assert re.search(message or "NVIDIA L4: cuDNN", reason)


def attention_gradient(dim, dtype, length=512, **arguments):
    """(gradient of attention, abstract arguments)."""
    array = lambda *shape, kind=dtype: jax.ShapeDtypeStruct(shape, kind)
    q, kv = array(1, length, 8, dim), array(1, length, 2, dim)

    def loss(q, k, v, segments):
        return flash_attention(q, k, v, segments, scale=0.1, **arguments).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2)), (q, kv, kv, array(1, length, kind=jnp.int32))


def test_lowers_to_cudnns_custom_calls(monkeypatch):
    """Four classes of lengths in 512 tokens, both passes; the window is in XLA's configuration."""
    monkeypatch.setattr(cudnn, "installed_version", lambda: None)
    gradient, args = attention_gradient(64, "float16", implementation="cudnn", window=100)
    text = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 4
    assert text.count('\\"sliding_window_length\\": 100') + text.count("sliding_window_length\\22: 100") == 8


@pytest.fixture(params=["a100", "l4", "rtx4090", "b200", "t4"])
def gpu(request):
    """`compile_for(function, *arrays)` for a GPU that is not here, and its kind."""
    if problem := topology.missing_compiler("cuda"):
        pytest.skip(problem)
    mesh = jax.sharding.Mesh(np.array(topology.gpu_devices(request.param)), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def compile_for(function, *arrays):
        with jax.set_mesh(mesh):
            put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
            traced = jax.jit(function).trace(*jax.tree.map(put, arrays))
            return traced.lower(lowering_platforms=("cuda",)).compile().as_text()

    return compile_for, request.param


@pytest.mark.compilers
def test_attention_compiles_for_a_gpu_that_is_not_here(gpu):
    """float16 on T4, bfloat16 elsewhere; head_dim 256 is more than cuDNN's backward pass takes."""
    compile_for, kind = gpu
    dtype = "float16" if kind == "t4" else "bfloat16"
    for dim in (64, 128, 256) if kind == "a100" else (128,):
        gradient, args = attention_gradient(dim, dtype)
        calls = 4 if kind != "t4" and dim <= 128 else 0
        text = compile_for(gradient, *args)
        for target in ("fmhaSoftmax", "fmhaSoftmaxBackward"):
            assert text.count(f'custom_call_target="__cudnn${target}"') == calls


@pytest.mark.compilers
def test_decoding_and_log_probs_compile_for_a_gpu_that_is_not_here(gpu):
    compile_for, kind = gpu
    dtype = jnp.dtype("float16" if kind == "t4" else "bfloat16")
    array = lambda *shape, kind=dtype: jax.ShapeDtypeStruct(shape, kind)
    pages, integers = array(100, 4, 64, 128), functools.partial(array, kind=jnp.int32)
    attend = functools.partial(decode.decode_attention, scale=0.1)
    assert compile_for(attend, array(8, 8, 128), pages, pages, integers(8, 16), integers(8))
    loss = lambda *x: sum(y.sum() for y in linear_logprob(*x, temperature=0.7))
    text = compile_for(
        jax.value_and_grad(loss, (0, 1)), array(1, 4096, 1024), array(50257, 1024), integers(1, 4096)
    )
    assert "[4096,50257]" not in text and 'custom_call_target="mosaic' not in text
