"""Each implementation of attention against the dense definition: values, log-sum-exp, gradients, skipping."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels import target
from jaxrl_kernels.flash_attention import api, blocks, blockwise, pallas_tpu, reference, shapes
from jaxrl_kernels.flash_attention.spec import EVERYTHING, NOTHING, Place, Spec

FAST = {"xla_backend_optimization_level": 0}  # of compilation
fast_jit = functools.partial(jax.jit, compiler_options=FAST)


class Case(NamedTuple):
    spec: Spec
    heads: tuple[int, int] = (2, 1)  # of queries, of keys
    lengths: tuple[int, int] = (130, 130)
    dim: int = 64
    dtype: str = "float32"
    place: Place = Place()
    packed: bool = True
    rows: int = 2


CASES = {
    "grouped heads": Case(Spec(0.2), heads=(4, 2), packed=False),
    "packed, a window": Case(Spec(0.2), heads=(1, 1), dim=96, place=Place(window=40)),
    "softcap, all see all": Case(Spec(1.0, False, 2.0), dim=128, lengths=(50, 200)),
    "part of a longer row": Case(Spec(0.2), lengths=(200, 70), dim=40, place=Place(30, 100, 90)),
    "bfloat16": Case(Spec(0.1, True, 5.0), dim=256, dtype="bfloat16"),
}
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
CHECKED = [(name, case) for name in ("blockwise", "pallas_tpu") for case in CASES]
CHECKED += [("reference", "softcap, all see all"), ("reference", "part of a longer row")]
OURS = pytest.mark.parametrize("name", ["blockwise", "pallas_tpu"])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks in short rows, on the CPU."""
    monkeypatch.setattr(blockwise, "BLOCK", 64)
    monkeypatch.setattr(blockwise, "SCORES", 10_000)
    monkeypatch.setattr(shapes, "SIZES", (shapes.Blocks(128, 128),))
    monkeypatch.setattr(pallas_tpu, "INTERPRET", True)


def inputs(case: Case):
    """(q, k, v, segments of queries, of keys, place as arrays, d_out, d_lse)."""
    (queries, keys), (heads, kv_heads), rows = case.lengths, case.heads, case.rows
    shape = {"q": (rows, queries, heads, case.dim), "k": (rows, keys, kv_heads, case.dim)}
    random = jax.random.split(jax.random.key(0), 5)
    arrays = [
        jax.random.normal(key, shape[name]).astype(case.dtype)
        for key, name in zip(random, "qkkq", strict=False)
    ]
    d_lse = jax.random.normal(random[4], (rows, heads, queries))

    def segments(length, start):  # 1 and 2 with padding between, then padding; and one over everything
        index = start + np.arange(length)
        first = np.select([index < 60, index < 66, index < 120], [1, 0, 2], 0)
        ids = np.stack([first if case.packed else np.ones(length), np.ones(length)])
        return jnp.asarray(ids[:rows], jnp.int32)

    q_segments, kv_segments = segments(queries, case.place.q_start), segments(keys, case.place.kv_start)
    return *arrays[:3], q_segments, kv_segments, Place(*case.place.array()), arrays[3], d_lse


def run(module, case: Case):
    """(out, lse, dq, dk, dv) of an implementation, twice the same bits."""
    *known, d_out, d_lse = inputs(case)

    @fast_jit
    def both(*known):
        results = module.forward(case.spec, *known)
        return *results, *module.backward(case.spec, *known, *results, d_out, d_lse)

    first, second = both(*known), both(*known)
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)
    return first


@functools.cache
def dense(case: Case):
    """As `run`, by automatic differentiation of the dense forward in float32."""
    q, k, v, q_segments, kv_segments, place, d_out, d_lse = inputs(case)
    q, k, v, d_out = (x.astype(jnp.float32) for x in (q, k, v, d_out))
    forward = lambda *qkv: reference.forward(case.spec, *qkv, q_segments, kv_segments, place)

    def both(q, k, v):
        results, pull = jax.vjp(forward, q, k, v)
        return *results, *pull((d_out, d_lse))

    return fast_jit(both)(q, k, v)


def close(ours, wanted, dtype):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), ours, wanted, strict=True):
        size = max(1.0, float(jnp.abs(jnp.where(y > NOTHING, y, 0)).max()))
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=TOLERANCE[dtype] * size, err_msg=name)


@pytest.mark.parametrize(("name", "case"), CHECKED)
def test_values_and_gradients_are_those_of_the_dense_definition(name, case):
    case = CASES[case]
    ours = run(api.IMPLEMENTATIONS[name], case)
    close(ours, dense(case), case.dtype)
    assert all(x.dtype == case.dtype for x in (ours[0], *ours[2:]))
    assert ours[1].dtype == jnp.float32
    blind = np.asarray(inputs(case)[3] == 0)
    out, lse, dq = (np.asarray(x, np.float32) for x in ours[:3])
    assert (
        (out[blind] == 0).all()
        and (dq[blind] == 0).all()
        and (np.moveaxis(lse, 1, 2)[blind] == NOTHING).all()
    )


@OURS
def test_blocks_that_nobody_sees_are_not_computed(name):
    """Not a number in the keys of segment 2 would reach every query of a block that computes with them."""
    case = Case(Spec(0.2, causal=False), heads=(1, 1), lengths=(256, 256), dim=8, packed=False, rows=1)
    q, k, v, *_ = inputs(case)
    segments = jnp.repeat(jnp.array([[1, 2]], jnp.int32), 128, axis=1)
    forward = lambda *qkv: api.IMPLEMENTATIONS[name].forward(case.spec, *qkv, segments, segments, Place())
    out, _ = fast_jit(forward)(q, k.at[:, 128:].set(jnp.nan), v.at[:, 128:].set(jnp.nan))
    assert jnp.isfinite(out[:, :128]).all() and jnp.isnan(out[:, 128:]).all()


def test_which_blocks_are_needed_by_hand():
    """Blocks of 2 in a row of 8: causal order below the diagonal, a window, and three segments."""
    of = lambda *ids: blocks.segments_of(jnp.array([ids], jnp.int32), 2)
    one = of(*[1] * 8)
    need = lambda spec, place, x, y: np.asarray(blocks.needed(spec, place, x, y, (2, 2))[0]).astype(int)
    np.testing.assert_array_equal(need(Spec(1.0), Place(), one, one), np.tril(np.ones((4, 4))))
    band = np.tril(np.ones((4, 4))) - np.tril(np.ones((4, 4)), -2)
    np.testing.assert_array_equal(need(Spec(1.0), Place(window=3), one, one), band)
    assert need(Spec(1.0), Place(window=4), one, one).sum() == band.sum() + 2  # index 4 sees index 1
    packed = of(1, 1, 1, 2, 2, 2, 0, 0)
    wanted = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(need(Spec(1.0), Place(), packed, packed), wanted)
    assert packed.only.tolist() == [[1, 0, 2, 0]]
    later = need(Spec(1.0), Place(q_start=0, kv_start=4), one, one)  # keys of which most come later
    np.testing.assert_array_equal(later, [[0] * 4, [0] * 4, [1, 0, 0, 0], [1, 1, 0, 0]])
    first, end = blocks.bounds(jnp.array([[[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]]], bool))
    assert (first.tolist(), end.tolist()) == ([[1, 0, 0]], [[3, 0, 4]])


def test_the_tpu_kernels_have_no_races(monkeypatch, capfd):
    monkeypatch.setattr(pallas_tpu, "INTERPRET", pltpu.InterpretParams(detect_races=True))
    case = Case(Spec(0.2), heads=(1, 1), lengths=(100, 130), dim=8, rows=1)
    close(run(pallas_tpu, case), dense(case), case.dtype)
    assert "RACE" not in "".join(capfd.readouterr()).upper()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernels_lower_for_tpu(monkeypatch, dtype):
    monkeypatch.setattr(pallas_tpu, "INTERPRET", False)
    q, k = (jax.ShapeDtypeStruct((2, 300, heads, 64), dtype) for heads in (4, 2))
    loss = lambda q, k, v, w: api.flash_attention(
        q, k, v, scale=0.1, window=w, softcap=9.0, implementation="pallas_tpu"
    ).sum()
    window = jax.ShapeDtypeStruct((), jnp.int32)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, window)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3


def test_gradients_through_a_scan_with_a_window_a_layer():
    """As a model calls it: the window is traced, the log-sum-exp has a gradient too."""
    q, k, v, segments, *_ = inputs(Case(Spec(0.3), dim=8))
    windows = jnp.array([20, EVERYTHING])

    def ours(x, k, v, window):
        return api.flash_attention(x, k, v, segments, scale=0.3, window=window, return_lse=True)

    def wanted(x, k, v, window):
        return reference.forward(Spec(0.3), x, k, v, segments, segments, Place(window=window))

    def loss(attend, *qkv):
        def layer(x, window):
            out, lse = attend(x, *qkv[1:], window)
            lse = jnp.moveaxis(jnp.where(lse > NOTHING, lse, 0), 1, 2)[..., None]
            return x + out * jnp.sin(lse), None

        return jax.lax.scan(layer, qkv[0], windows)[0].sum()

    gradients = [fast_jit(jax.grad(functools.partial(loss, f), (0, 1, 2)))(q, k, v) for f in (ours, wanted)]
    for x, y in zip(*gradients, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_what_the_backward_pass_needs_can_be_kept():
    """A policy that keeps SAVED runs no second forward pass: 2 + 5 products a step, not 2 + 2 + 5."""
    q, k, v, *_ = inputs(Case(Spec(0.2), heads=(2, 2), lengths=(40, 40), dim=8))

    def products(policy):
        attend = lambda q: api.flash_attention(q, k, v, scale=0.3, implementation="blockwise").sum()
        text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(attend, policy=policy)))(q))
        return text.count("dot_general")

    keep = jax.checkpoint_policies.save_only_these_names(api.SAVED)
    assert (products(keep), products(jax.checkpoint_policies.nothing_saveable)) == (7, 9)


def on(monkeypatch, platform, kind):
    monkeypatch.setattr(target, "device", lambda: (platform, kind))


def test_the_choice_says_why(monkeypatch):
    assert api.choose(64, jnp.float32)[0] == "blockwise"
    on(monkeypatch, "tpu", "TPU v5 lite")
    assert api.choose(64, jnp.bfloat16) == ("pallas_tpu", "TPU v5 lite: Pallas kernels for TPU")
    name, why = api.choose(512, jnp.bfloat16)
    assert name == "blockwise" and "head_dim 512" in why and "256" in why
    assert "float16" in api.choose(64, jnp.float16)[1]
    monkeypatch.setenv("JAXRL_KERNELS", "jax")
    assert api.choose(64, jnp.bfloat16) == ("blockwise", "TPU v5 lite: plain JAX, as JAXRL_KERNELS says")
    monkeypatch.setenv("JAXRL_KERNELS", "pallas")
    with pytest.raises(ValueError, match='JAXRL_KERNELS=pallas: must be "auto" or "jax"'):
        api.choose(64, jnp.bfloat16)
    monkeypatch.delenv("JAXRL_KERNELS")
    on(monkeypatch, "gpu", "NVIDIA A100-SXM4-80GB")
    assert api.choose(64, jnp.bfloat16)[0] == "blockwise"


def test_errors_name_what_would_do(monkeypatch):
    q = jnp.zeros((1, 8, 4, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"flash.*reference, blockwise, pallas_tpu, pallas_gpu, cudnn, auto"):
        api.flash_attention(q, q, q, scale=1.0, implementation="flash")
    with pytest.raises(ValueError, match="4 query heads cannot share 3"):
        api.flash_attention(q, q[:, :, :3], q[:, :, :3], scale=1.0)
    with pytest.raises(ValueError, match=r"cannot do packed segments, a softcap; .auto. can"):
        segments = jnp.ones((1, 8), jnp.int32)
        api.flash_attention(q, q, q, segments, scale=1.0, softcap=1.0, implementation="cudnn")
    wide = jnp.zeros((1, 8, 1, 320))
    with pytest.raises(ValueError, match=r"head_dim 320.*up to 256.*implementation=.blockwise."):
        api.flash_attention(wide, wide, wide, scale=1.0, implementation="pallas_tpu")
    half = q.astype(jnp.float16)
    with pytest.raises(ValueError, match=r"dtype float16.*bfloat16 and float32"):
        api.flash_attention(half, half, half, scale=1.0, implementation="pallas_tpu")
    monkeypatch.setattr(shapes, "SIZES", (shapes.Blocks(2048, 2048),))
    on(monkeypatch, "tpu", "TPU v4")
    with pytest.raises(
        ValueError, match=r"2048 queries and 2048 keys.*a kernel on v4 has 16 MiB.*\(512, 2048\)"
    ):
        api.flash_attention(q, q, q, scale=1.0, implementation="pallas_tpu")
