"""Each implementation of attention against the NumPy oracle: values, log-sum-exp, gradients, skipping."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import kernel_oracles as oracles
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernel_oracles import MASKED_LSE, assert_close
from slow_cases import with_slow

from jaxrl_kernels import dispatch
from jaxrl_kernels.dispatch import choose, load_implementation
from jaxrl_kernels.flash_attention import blocks, blockwise, pallas_tpu, shapes
from jaxrl_kernels.flash_attention.api import SAVED, flash_attention
from jaxrl_kernels.flash_attention.sinks import add_sinks, d_sinks
from jaxrl_kernels.flash_attention.spec import NO_WINDOW, AttentionSpec, DynamicMask, row_windows

FAST = {"xla_backend_optimization_level": 0}  # of compilation
fast_jit = functools.partial(jax.jit, compiler_options=FAST)


class Case(NamedTuple):
    """Attention compiled once, and run with each mask."""

    spec: AttentionSpec
    masks: tuple[DynamicMask, ...] = (DynamicMask(),)
    heads: tuple[int, int] = (1, 1)  # of queries, of keys
    lengths: tuple[int, int] = (130, 200)
    dim: int = 64
    dtype: str = "float32"
    rows: int = 2
    sinks: tuple[float, ...] | None = None  # a score a head
    window: int | None = None  # of each sequence, whatever stands between in the row


CASES = {
    "branches, grouped heads, sinks; a window; part of a longer row": Case(
        AttentionSpec(0.2, branches=True),
        (DynamicMask(), DynamicMask(window=40), DynamicMask(30, 100, 90)),
        (4, 2),
        dim=40,
        sinks=(1.0, -2.0, 5.0, 3.0),
    ),
    "softcap": Case(AttentionSpec(1.0, 2.0), lengths=(70, 200), dim=96),
    "branches with a window of their own; part of a longer row": Case(
        AttentionSpec(0.2, branches=True), (DynamicMask(), DynamicMask(30, 100)), dim=8, window=33
    ),
    "branches, bfloat16, softcap": Case(AttentionSpec(0.1, 5.0, branches=True), dim=256, dtype="bfloat16"),
}
CHECKED = [(name, case) for name in ("blockwise", "pallas_tpu") for case in CASES]
CHECKED += [("reference", case) for case in CASES if "bfloat16" not in case]
OURS = pytest.mark.parametrize("name", ["blockwise", "pallas_tpu"])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks in short rows, on the CPU."""
    monkeypatch.setattr(blockwise, "MAX_SCORES", 10_000)
    monkeypatch.setattr(shapes, "SIZES", (shapes.Blocks(128, 128),))
    monkeypatch.setattr(pallas_tpu, "INTERPRET", True)


def inputs(case: Case):
    """(q, k, v, d_out, d_lse)."""
    rng, (queries, keys), (heads, kv_heads) = np.random.default_rng(0), case.lengths, case.heads
    sizes = (queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)
    arrays = [rng.normal(size=(case.rows, *size, case.dim)) for size in sizes]
    dtype = jnp.dtype(case.dtype)
    return *(x.astype(dtype) for x in arrays), rng.normal(size=(case.rows, heads, queries)).astype(np.float32)


PARENTS = {3: 2, 4: 3, 5: 2, 7: 6, 8: 6}
"""Of the second row, with branches: segment -> the one that it continues."""


def segments(case: Case, mask: DynamicMask):
    """(segments of queries, of keys, last ones that continue those of keys).

    The first row is 1 and 2 with padding between and after; the second 1, with branches 1 and two trees.
    """
    packed = np.repeat([1, 0, 2, 0], [60, 6, 54, 180])
    lengths = [20, 30, 25, 15, 35, 5, 20, 25, 30, 95] if case.spec.branches else [300]
    tree = np.repeat([1, 2, 3, 4, 5, 0, 6, 7, 8, 0][: len(lengths)], lengths)
    whole = np.stack([packed, tree]).astype(np.int32)[: case.rows]
    last = np.stack([oracles.last_segments(row, of) for row, of in zip(whole, ({}, PARENTS), strict=False)])
    queries, keys = (slice(at, at + n) for at, n in zip(mask, case.lengths, strict=False))
    return whole[:, queries], whole[:, keys], last[:, keys]


def visible(case: Case, mask: DynamicMask):
    """The keys that each query attends to, by PARENTS."""
    if case.window:
        _, (queries, keys), allowed = whole_rows(case, mask)
        return oracles.newest(allowed, case.window)[:, queries, keys]
    q_segments, kv_segments, _ = segments(case, mask)
    rows = zip(q_segments[:, None], kv_segments[:, None], ({}, PARENTS), strict=False)
    return np.concatenate([oracles.visible(mask, *row) for row in rows])


def whole_rows(case: Case, mask: DynamicMask):
    """(segments and last ones of whole rows), the parts of queries and of keys, what whole rows see."""
    everything = case._replace(lengths=(300, 300), window=None)
    ids, _, last = segments(everything, DynamicMask())
    parts = [slice(at, at + n) for at, n in zip(mask, case.lengths, strict=False)]
    return (ids, last), parts, visible(everything, DynamicMask())


def traced(case: Case, mask: DynamicMask) -> DynamicMask:
    """The mask as the program gets it."""
    if case.window:
        rows, (queries, _), allowed = whole_rows(case, mask)
        windows = row_windows(*map(jnp.asarray, (*rows, allowed.sum(-1) - 1)), case.window)
        mask = mask._replace(window=windows[:, queries])
    return jax.tree.map(jnp.int32, mask)


def compiled(module, case: Case):
    """(out, lse, dq, dk, dv), and with sinks their gradient, of an implementation, for every mask."""

    @fast_jit
    def both(*arrays):
        *operands, d_out, d_lse = arrays  # the first are q, k, v, q_segments, kv_last, mask
        results, rest = module.forward(case.spec, *operands), ()
        if case.sinks:
            results = add_sinks(*results, jnp.array(case.sinks))
            rest = (d_sinks(jnp.array(case.sinks), *results, d_out, d_lse),)
        return *results, *module.backward(case.spec, *operands, *results, d_out, d_lse), *rest

    return both


def check(case: Case, mask: DynamicMask, results) -> None:
    """Compare with the oracle, in values, types and zeros of masked queries."""
    q, k, v, d_out, d_lse = inputs(case)
    allowed = visible(case, mask)
    wanted = oracles.attention(
        q,
        k,
        v,
        allowed,
        scale=case.spec.scale,
        softcap=case.spec.softcap,
        d_out=d_out,
        d_lse=d_lse,
        sinks=case.sinks,
    )
    names = ("out", "lse", "dq", "dk", "dv", "d_sinks")[: len(wanted)]
    for name, got, expected in zip(names, results, wanted, strict=True):
        assert_close(got, expected, case.dtype, name)
        assert got.dtype == (jnp.float32 if name == "lse" else case.dtype)
    out, lse, dq = (np.asarray(x, np.float32) for x in results[:3])
    masked = ~allowed.any(axis=-1)
    assert masked.any() and not out[masked].any() and not dq[masked].any()
    assert (np.moveaxis(lse, 1, 2)[masked] == (case.sinks or MASKED_LSE)).all()


@pytest.mark.parametrize(("name", "case"), CHECKED)
def test_values_and_gradients_are_those_of_the_oracle(name, case):
    check_all_masks(name, CASES[case])


@pytest.mark.parametrize("case", with_slow(CASES, {"softcap", "branches, bfloat16, softcap"}))
def test_larger_blocks_on_a_cpu(case, monkeypatch):
    monkeypatch.setattr(blockwise, "CPU_BLOCKS", (16, 72))
    monkeypatch.setattr(blockwise, "MIN_LARGE", 0)
    monkeypatch.setattr(blockwise, "LARGE_SCORES", 1e6)
    check_all_masks("blockwise", CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_short_rows_of_one_block_on_a_cpu(case, monkeypatch):
    monkeypatch.setattr(blockwise, "CPU_ROW", 200)
    monkeypatch.setattr(blockwise, "CPU_ROW_DIM", 8)
    check_all_masks("blockwise", CASES[case])


def test_larger_blocks_are_chosen_for_long_sequences():
    """One sequence fills blocks of 320 almost as well as those of 64, eight short ones do not; a long prompt
    and eight responses do."""

    choose = functools.partial(blockwise._is_dense, DynamicMask())

    def is_dense(segments, last=None):
        segments, last = (np.array([x], np.int32) for x in (segments, segments if last is None else last))
        return bool(jax.jit(choose)(np.full_like(segments, NO_WINDOW), segments, last))

    assert is_dense([1] * 1024)
    assert not is_dense(np.repeat(np.arange(1, 9), 128))
    tree = np.repeat(np.arange(1, 10), [1024] + [65] * 8)
    assert is_dense(tree, np.where(tree == 1, 9, tree))


def check_all_masks(name: str, case: Case) -> None:
    """Compare an implementation with the oracle, and with itself to the last bit."""
    q, k, v, *gradients = inputs(case)
    run = compiled(load_implementation("flash_attention", name), case)
    for mask in case.masks:
        q_segments, _, kv_last = segments(case, mask)
        arguments = q, k, v, q_segments, kv_last, traced(case, mask), *gradients
        results, again = run(*arguments), run(*arguments)
        check(case, mask, results)
        jax.tree.map(np.testing.assert_array_equal, results, again)


@OURS
def test_masked_blocks_are_not_computed(name, monkeypatch):
    """NaNs in the keys of segment 2 would reach every query of a block that computes with them.

    Segments 2 and 3 continue 1, so that 2 is between the blocks that 3 needs. The TPU copies 2, too, where it
    has no table.
    """
    monkeypatch.setattr(pallas_tpu, "MAX_READS", 0)
    case = Case(AttentionSpec(0.2, branches=True), lengths=(384, 384), dim=8, rows=1)
    q, k, v, *_ = inputs(case)
    ids, last = (np.repeat(np.array([x], np.int32), 128, axis=1) for x in ([1, 2, 3], [3, 2, 3]))
    k[:, 128:256], v[:, 128:256] = np.nan, np.nan

    @fast_jit
    def out_and_dq(*operands):
        out, lse = module.forward(case.spec, *operands)
        return out, module.backward(case.spec, *operands, out, lse, operands[0])[0]

    module = load_implementation("flash_attention", name)
    for result in out_and_dq(q, k, v, ids, last, traced(case, DynamicMask())):
        assert np.isfinite(result[:, :128]).all() and np.isfinite(result[:, 256:]).all()
        assert np.isnan(result[:, 128:256]).all()


def test_visible_blocks_by_hand():
    """Blocks of 2 in a row of 8: causal order below the diagonal, a window, segments, and branches."""

    def needed(mask, ids, last=None, full=False):
        q, kv = (jnp.array([x], jnp.int32) for x in (ids, last or ids))
        of = blocks.query_blocks(mask, q, mask.windows(q), 2), blocks.key_blocks(kv, 2)
        return np.asarray(blocks.visible_blocks(mask, *of, (2, 2))[full][0]).astype(int)

    one = [1] * 8
    np.testing.assert_array_equal(needed(DynamicMask(), one, full=True), np.tril(np.ones((4, 4)), -1))
    wanted = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]  # index 5 attends to 2 and later
    np.testing.assert_array_equal(needed(DynamicMask(window=4), one, full=True), wanted)
    np.testing.assert_array_equal(needed(DynamicMask(), one), np.tril(np.ones((4, 4))))
    band = np.tril(np.ones((4, 4))) - np.tril(np.ones((4, 4)), -2)
    np.testing.assert_array_equal(needed(DynamicMask(window=3), one), band)
    assert needed(DynamicMask(window=4), one).sum() == band.sum() + 2  # index 4 attends to index 1
    wanted = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(needed(DynamicMask(), [1, 1, 1, 2, 2, 2, 0, 0]), wanted)
    wanted = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]  # 2 and 3 continue 1
    np.testing.assert_array_equal(
        needed(DynamicMask(), [1, 1, 2, 2, 3, 3, 4, 0], [3, 3, 2, 2, 3, 3, 4, 0]), wanted
    )
    windows = jnp.array([[1, 2, 1, 2, 4, 5, 1, 0]])  # 4 and 5 reach back to the end of 1
    wanted = [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    branches = [1, 1, 2, 2, 3, 3, 4, 0], [3, 3, 2, 2, 3, 3, 4, 0]
    np.testing.assert_array_equal(needed(DynamicMask(window=windows), *branches), wanted)
    later = needed(DynamicMask(q_offset=0, kv_offset=4), one)  # most keys come later
    np.testing.assert_array_equal(later, [[0] * 4, [0] * 4, [1, 0, 0, 0], [1, 1, 0, 0]])
    first, end = blocks.block_range(jnp.array([[[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]]], bool))
    assert (first.tolist(), end.tolist()) == ([[1, 0, 0]], [[3, 0, 4]])
    needed = jnp.array([[[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 1]]], bool)
    assert blocks.nearest_blocks(needed).tolist() == [[[1, 1, 1, 3, 3], [0] * 5, [0, 0, 0, 0, 4]]]


def test_windows_of_branches_by_hand():
    """Segments 2 and 3 continue 1, then 4 and padding: a window of 3 tokens, that of 3 over those of 2."""
    ids, last, positions = (
        [1, 1, 1, 2, 2, 3, 3, 4, 0],
        [3, 3, 3, 2, 2, 3, 3, 4, 0],
        [0, 1, 2, 3, 4, 3, 4, 0, 0],
    )
    got = row_windows(*(jnp.array([x]) for x in (ids, last, positions)), 3)
    assert got.tolist() == [[1, 2, 3, 3, 3, 5, 5, 1, 1]]


@pytest.mark.slow
def test_the_tpu_kernels_have_no_races(monkeypatch, capfd):
    monkeypatch.setattr(pallas_tpu, "INTERPRET", pltpu.InterpretParams(detect_races=True))
    case = Case(AttentionSpec(0.2), lengths=(100, 130), dim=8, rows=1)
    q, k, v, *gradients = inputs(case)
    mask = DynamicMask()
    q_segments, _, kv_last = segments(case, mask)
    check(case, mask, compiled(pallas_tpu, case)(q, k, v, q_segments, kv_last, mask, *gradients))
    assert "RACE" not in "".join(capfd.readouterr()).upper()


@pytest.mark.parametrize(("dtype", "branches"), [("bfloat16", False), ("float32", True)])
def test_the_kernels_lower_for_tpu(monkeypatch, dtype, branches):
    monkeypatch.setattr(pallas_tpu, "INTERPRET", False)
    q, k = (jax.ShapeDtypeStruct((2, 300, heads, 64), dtype) for heads in (4, 2))
    loss = lambda q, k, v, ids, w: flash_attention(
        q, k, v, ids, ids if branches else None, scale=0.1, window=w, softcap=9.0, implementation="pallas_tpu"
    ).sum()
    ids, window = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 300), ()))
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, ids, window)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3


def test_gradients_through_a_scan_with_a_window_a_layer():
    """As a model calls it: the window is traced, the log-sum-exp has a gradient too, and so have sinks."""
    case = Case(AttentionSpec(0.3), lengths=(130, 130), dim=8)
    windows = (20, NO_WINDOW)
    q, k, v, *_ = inputs(case)
    ids, *_ = segments(case, DynamicMask())

    sinks = np.array([1.5], np.float32)

    def loss(q, k, v, sinks):
        def layer(x, window):
            settings = {"scale": 0.3, "window": window, "sinks": sinks, "return_lse": True}
            out, lse = flash_attention(x, k, v, ids, **settings)
            lse = jnp.moveaxis(lse, 1, 2)[..., None]
            return x + out * jnp.sin(lse), None

        return jax.lax.scan(layer, q, jnp.array(windows))[0].sum()

    ids = jnp.asarray(ids)
    ours = fast_jit(jax.grad(loss, (0, 1, 2, 3)))(*(jnp.asarray(x) for x in (q, k, v, sinks)))

    x, seen = q.astype(np.float64), []  # the chain rule, by hand
    for window in windows:
        allowed = oracles.visible(DynamicMask(window=window), np.asarray(ids), np.asarray(ids))
        out, lse = oracles.attention(x, k, v, allowed, scale=0.3, sinks=sinks)
        seen.append((x, allowed, out, lse))
        x = x + out * np.moveaxis(np.sin(lse), 1, 2)[..., None]
    d_x, d_k, d_v, d_s = np.ones_like(x), 0.0, 0.0, 0.0
    for x, allowed, out, lse in reversed(seen):
        d_lse = np.moveaxis((d_x * out).sum(-1), 2, 1) * np.cos(lse)
        d_out = d_x * np.moveaxis(np.sin(lse), 1, 2)[..., None]
        *_, dq, dk, dv, ds = oracles.attention(
            x, k, v, allowed, scale=0.3, d_out=d_out, d_lse=d_lse, sinks=sinks
        )
        d_x, d_k, d_v, d_s = d_x + dq, d_k + dk, d_v + dv, d_s + ds
    for name, got, expected in zip(("q", "k", "v", "sinks"), ours, (d_x, d_k, d_v, d_s), strict=True):
        assert_close(got, expected, name=name)


def test_what_the_backward_pass_needs_can_be_kept():
    """A policy that keeps SAVED runs no second forward pass: 2 + 5 products a step, not 2 + 2 + 5."""
    q, k, v, *_ = inputs(Case(AttentionSpec(0.2), heads=(2, 2), lengths=(40, 40), dim=8))
    k, v = jnp.asarray(k), jnp.asarray(v)

    def products(policy):
        attend = lambda q: flash_attention(q, k, v, scale=0.3, implementation="blockwise").sum()
        text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(attend, policy=policy)))(q))
        return text.count("dot_general")

    keep = jax.checkpoint_policies.save_only_these_names(SAVED)
    assert (products(keep), products(jax.checkpoint_policies.nothing_saveable)) == (7, 9)


def on(monkeypatch, platform, kind):
    monkeypatch.setattr(dispatch, "device", lambda: (platform, kind))


def test_the_choice_says_why(monkeypatch):
    chosen = functools.partial(choose, "flash_attention")
    assert chosen(64, jnp.float32)[0] == "blockwise"
    on(monkeypatch, "tpu", "TPU v5 lite")
    assert chosen(64, jnp.bfloat16) == ("pallas_tpu", "TPU v5 lite: Pallas kernels for TPU")
    name, reason = chosen(512, jnp.bfloat16)
    assert name == "blockwise" and "head_dim 512" in reason and "256" in reason
    assert "float16" in chosen(64, jnp.float16)[1]
    assert chosen(64, jnp.float16, implementation="blockwise") == ("blockwise", "requested")
    monkeypatch.setenv("JAXRL_KERNELS", "jax")
    assert chosen(64, jnp.bfloat16) == ("blockwise", "TPU v5 lite: plain JAX, as JAXRL_KERNELS says")
    monkeypatch.setenv("JAXRL_KERNELS", "pallas")
    with pytest.raises(ValueError, match='JAXRL_KERNELS=pallas: must be "auto", "jax"'):
        chosen(64, jnp.bfloat16)
    monkeypatch.delenv("JAXRL_KERNELS")
    on(monkeypatch, "gpu", "Tesla V100-SXM2-16GB")
    assert chosen(64, jnp.bfloat16)[0] == "blockwise"
    on(monkeypatch, "gpu", "NVIDIA H100 80GB HBM3")
    assert chosen(64, jnp.bfloat16)[0] == "pallas_gpu"
    assert chosen(64, jnp.float32) == ("blockwise", "wgmma multiplies bfloat16 and float16, not float32")


@pytest.mark.parametrize("operation", dispatch.OPERATIONS)
def test_every_implementation_of_every_operation_is_a_module(operation):
    names, portable, *_ = dispatch.OPERATIONS[operation]
    assert portable in names and "reference" in names
    for name in names:
        assert load_implementation(operation, name).__name__.endswith(f".{operation}.{name}")


def test_errors_name_what_would_do(monkeypatch):
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    q, k = array(1, 8, 4, 64), array(1, 8, 3, 64)

    def attend(implementation, q, k=None, segments=None, **options):
        run = functools.partial(flash_attention, scale=1.0, implementation=implementation, **options)
        return jax.eval_shape(run, q, k or q, k or q, segments)

    with pytest.raises(
        ValueError, match=r"'flash'; known: auto, reference, blockwise, pallas_tpu, pallas_gpu"
    ):
        attend("flash", q)
    with pytest.raises(ValueError, match="4 query heads cannot share 3"):
        attend("auto", q, k)
    with pytest.raises(
        ValueError, match=r"cudnn: no segment may continue another.*implementation='blockwise'"
    ):
        attend("cudnn", q, last=jnp.ones((1, 8), jnp.int32))
    with pytest.raises(ValueError, match=r"cudnn: cuDNN attention has no soft-cap"):
        attend("cudnn", q, softcap=1.0)
    with pytest.raises(ValueError, match=r"cudnn: cuDNN attention takes bfloat16 and float16, not float32"):
        attend("cudnn", array(1, 8, 4, 64, dtype=jnp.float32))
    with pytest.raises(ValueError, match=r"head_dim 320.*up to 256.*implementation='blockwise'"):
        attend("pallas_tpu", array(1, 8, 1, 320))
    with pytest.raises(ValueError, match=r"dtype float16.*bfloat16 and float32"):
        attend("pallas_tpu", array(1, 8, 4, 64, dtype=jnp.float16))
    monkeypatch.setattr(shapes, "SIZES", (shapes.Blocks(2048, 2048),))
    on(monkeypatch, "tpu", "TPU v4")
    with pytest.raises(
        ValueError, match=r"2048 queries and 2048 keys.*a kernel on v4 has 16 MiB.*\(512, 2048\)"
    ):
        attend("pallas_tpu", q)
