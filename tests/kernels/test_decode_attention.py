"""Attention over a paged cache: the definition by hand, the kernels against the NumPy oracle."""

import functools

import jax
import jax.numpy as jnp
import kernel_oracles as oracles
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh
from kernel_oracles import assert_close

from jaxrl_kernels import topology
from jaxrl_kernels.chips import TPUS
from jaxrl_kernels.decode_attention import api, chunks, pallas_gpu, pallas_tpu, reference
from jaxrl_kernels.dispatch import choose
from jaxrl_kernels.flash_attention.spec import NO_WINDOW

FAST = {"xla_backend_optimization_level": 0}  # of compilation
fast_jit = functools.partial(jax.jit, compiler_options=FAST)
RACES = pltpu.InterpretParams(detect_races=True)


def inputs(dtype=jnp.float32, *, heads=4, kv_heads=2, dim=64, page=16, row=4, lengths=(0, 1, 16, 64, 37)):
    """Slots of these lengths, pages in any order; what no token has written is large, but finite."""
    rng = np.random.default_rng(0)
    slots, pages = len(lengths), len(lengths) * row + 2
    q = rng.normal(size=(slots, heads, dim))
    k, v = rng.normal(size=(2, pages, kv_heads, page, dim))
    table = rng.permutation(pages)[: slots * row].reshape(slots, row).astype(np.int32)
    for s, length in enumerate(lengths):
        for i in range(length, row * page):
            k[table[s, i // page], :, i % page] = v[table[s, i // page], :, i % page] = 1e4
    dtype = jnp.dtype(dtype)
    return *(x.astype(dtype) for x in (q, k, v)), table, np.array(lengths, np.int32)


def quantized(dtype, **shape):
    """The same, k and v in 8 bits with a scale a token and head."""
    q, k, v, table, lengths = inputs(jnp.bfloat16, **shape)
    largest = 127 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scales = [np.abs(x.astype(np.float32)).max(axis=-1) / largest for x in (k, v)]
    narrow = [x.astype(np.float32) / s[..., None] for x, s in zip((k, v), scales, strict=True)]
    narrow = [(np.round(x) if dtype == jnp.int8 else x).astype(jnp.dtype(dtype)) for x in narrow]
    return (q, *narrow, table, lengths), dict(k_scales=scales[0], v_scales=scales[1])


def oracle(q, k, v, *pages, scale, window=NO_WINDOW, softcap=None, k_scales=None, v_scales=None):
    """(out, lse) of dense attention of each slot's newest token to its gathered pages, (table, lengths)."""
    table, lengths = pages

    def gathered(pages, scales):
        pages = pages.astype(np.float64) * (1 if scales is None else scales[..., None])
        pages = np.moveaxis(pages[table], 2, 3)  # [S, N, page, K, E]
        return pages.reshape(len(table), -1, *pages.shape[3:])

    keys, values = gathered(k, k_scales), gathered(v, v_scales)
    position, last = np.arange(keys.shape[1]), lengths[:, None] - 1
    allowed = (position <= last) & (last - position < window)
    out, lse = oracles.attention(q[:, None], keys, values, allowed[:, None], scale=scale, softcap=softcap)
    return out[:, 0], lse[..., 0]


def assert_both_close(got, expected, dtype="float32"):
    """The dtype is that of out; the log-sum-exp is float32."""
    for name, one, other in zip(("out", "lse"), got, expected, strict=True):
        assert_close(one, other, dtype, name)
    assert got[1].dtype == jnp.float32


def no_races() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return not interpret_pallas_call.races.races_found


def test_the_definition_by_hand():
    """Pages of 2 tokens, out of order: scores 0 and ln 3 weigh 1/4 and 3/4; slot 2 is empty."""
    k = np.array([50.0, 50.0, 9.0, 9.0, 0.0, np.log(3.0)], np.float32).reshape(3, 1, 2, 1)
    v = np.array([1e3, 1e3, 7.0, 7.0, 8.0, 4.0], np.float32).reshape(3, 1, 2, 1)
    table, lengths = np.array([[2, 0], [1, 0], [1, 1]], np.int32), np.array([2, 1, 0], np.int32)
    run = fast_jit(functools.partial(api.decode_attention, scale=0.5))
    out = run(np.full((3, 1, 1), 2.0, np.float32), k, v, table, lengths)
    np.testing.assert_allclose(np.ravel(out), [0.25 * 8 + 0.75 * 4, 7, 0], rtol=1e-6)


def test_the_definition_is_dense_attention_of_the_last_token():
    arrays = inputs()
    run = fast_jit(functools.partial(reference.decode_attention, scale=0.3, softcap=4.0))
    for window in (NO_WINDOW, 5):
        got = run(*arrays, window=np.int32(window))
        assert_both_close(got, oracle(*arrays, scale=0.3, window=window, softcap=4.0))


@pytest.mark.parametrize("scores", [2**20, 1])
def test_chunks_are_attention_of_each_token(monkeypatch, scores):
    """Five tokens a slot, some of them padding; of all slots at once, and of one slot after the other."""
    monkeypatch.setattr(chunks, "max_scores", lambda: scores)
    monkeypatch.setattr(chunks, "BLOCK", 32)
    (_, *pages, table, lengths), scales = quantized(jnp.int8)
    q = np.random.default_rng(1).normal(size=(len(lengths), 5, 4, 64)).astype(jnp.bfloat16)
    positions = np.maximum(lengths[:, None] - 5 + np.arange(5), -1)
    run = fast_jit(functools.partial(chunks.chunk_attention, scale=0.2, softcap=4.0))
    for window in (NO_WINDOW, 20):
        out, lse = run(q, *pages, table, positions, window=np.int32(window), **scales)
        for i in range(5):
            args = q[:, i], *pages, table, positions[:, i] + 1
            expected = oracle(*args, scale=0.2, window=window, softcap=4.0, **scales)
            assert_both_close((out[:, i], lse[..., i]), expected, "bfloat16")


CASES = {
    "gqa, two splits": (jnp.float32, dict(dim=128), dict(splits=2, block=32)),
    "softcap, one page a block, three splits": (
        jnp.bfloat16, dict(heads=2, kv_heads=1, dim=96), dict(softcap=3.0, splits=3, block=16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tpu_kernel_equals_the_oracle(case):
    """The window is traced, as in a scanned stack of layers."""
    dtype, shape, options = CASES[case]
    arrays = inputs(dtype, **shape)
    run = fast_jit(functools.partial(pallas_tpu.decode_attention, scale=0.2, interpret=True, **options))
    for window in (NO_WINDOW, 40, 20):
        got = run(*arrays, window=np.int32(window))
        assert_both_close(
            got, oracle(*arrays, scale=0.2, window=window, softcap=options.get("softcap")), dtype
        )
        assert got[0].dtype == dtype and not np.asarray(got[0][0]).any()  # a slot of length 0


@pytest.mark.parametrize(
    "dtype", [jnp.int8, pytest.param(jnp.float8_e4m3fn, marks=pytest.mark.slow)], ids=lambda d: d.__name__
)
def test_tpu_kernel_reads_8_bits_with_scales(dtype):
    shape = dict(heads=2, page=128, row=2, lengths=(200, 3))
    arrays, scales = quantized(dtype, **shape)
    kernel = functools.partial(pallas_tpu.decode_attention, scale=0.2, window=NO_WINDOW, interpret=True)
    got = fast_jit(kernel)(*arrays, **scales)
    assert_both_close(got, oracle(*arrays, scale=0.2, **scales), jnp.bfloat16)
    exact, _ = oracle(*inputs(jnp.bfloat16, **shape), scale=0.2)
    np.testing.assert_allclose(np.asarray(got[0]).astype(np.float32), exact, atol=0.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=lambda d: d.__name__)
def test_a_token_of_each_slot_is_written(dtype):
    """By scatter and by the TPU's kernel, the latter without races; every other number stays."""
    if dtype == jnp.int8:
        (_, k, v, *_), scales = quantized(dtype, page=128, row=1, lengths=(100, 3))
        pages = {"k": k, "v": v, **scales}
    else:
        pages = dict(zip("kv", inputs(dtype)[1:3], strict=True))
    new = {name: -x[:2, :, 5] for name, x in pages.items()}
    numbers, offsets = np.array([3, 1], np.int32), np.array([7, 0], np.int32)
    expected = {name: np.array(x) for name, x in pages.items()}
    for name, x in expected.items():
        x[3, :, 7], x[1, :, 0] = new[name]
    arguments = jax.tree.map(jnp.asarray, (pages, new, numbers, offsets))
    for got in (
        api.write_token(*arguments, "reference"),
        api.write_token(*arguments, "pallas_gpu"),  # which has no kernel for it
        pallas_tpu.write_token(*arguments, interpret=RACES),
    ):
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert no_races()


def test_tpu_kernel_has_no_race_and_reads_no_unwritten_memory():
    """The interpreter that checks: buffers begin as NaN, and copies are ordered by their semaphores alone."""
    arrays = inputs(lengths=(0, 37, 64, 5), heads=2, kv_heads=1)
    kernel = functools.partial(pallas_tpu.decode_attention, scale=0.2, window=45, block=32, splits=2)
    got = fast_jit(functools.partial(kernel, interpret=RACES))(*arrays)
    assert_both_close(got, oracle(*arrays, scale=0.2, window=45))
    assert no_races()


SHAPES = {
    "bf16 64": (jnp.bfloat16, 16, 8, 64, 64),
    "bf16 96": (jnp.bfloat16, 16, 4, 96, 32),
    "bf16 128": (jnp.bfloat16, 32, 8, 128, 64),
    "bf16 256": (jnp.bfloat16, 8, 4, 256, 64),
    "mha bf16 128": (jnp.bfloat16, 16, 16, 128, 16),
    "float32 128": (jnp.float32, 8, 4, 128, 64),
    "int8 128": (jnp.int8, 32, 8, 128, 128),
    "fp8 128": (jnp.float8_e4m3fn, 32, 8, 128, 128),
    "int8 64": (jnp.int8, 32, 8, 64, 128),
}
"""Type of the pages, query heads, kv heads, head_dim, page."""


def abstract(case, slots=8, row=32):
    dtype, heads, kv_heads, dim, page = SHAPES[case]
    spec = jax.ShapeDtypeStruct
    pages = spec((100, kv_heads, page, dim), dtype)
    scale = spec(pages.shape[:3], jnp.float32) if dtype.dtype.itemsize == 1 else None
    q = spec((slots, heads, dim), jnp.float32 if dtype == jnp.float32 else jnp.bfloat16)
    return q, pages, pages, spec((slots, row), jnp.int32), spec((slots,), jnp.int32), scale, scale


def on_tpu(splits, q, k, v, *others):
    table, lengths, k_scales, v_scales = others
    return api.decode_attention(
        q, k, v, table, lengths, scale=0.1, window=1000, softcap=30.0, k_scales=k_scales, v_scales=v_scales,
        implementation="pallas_tpu", splits=splits,
    )  # fmt: skip


def described(kind, platform):
    return AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(kind, num_cores=1, platform=platform))


V5E, H100 = described("TPU v5 lite", "tpu"), described("NVIDIA H100 80GB HBM3", "gpu")


@pytest.mark.parametrize("case", ["bf16 96", "int8 128"])
def test_lowers_for_tpu(case):
    with jax.sharding.use_abstract_mesh(V5E):
        lowered = (
            jax.jit(functools.partial(on_tpu, None)).trace(*abstract(case)).lower(lowering_platforms=("tpu",))
        )
    assert "tpu_custom_call" in lowered.as_text()


def test_hopper_kernel_equals_the_oracle(compile_once):
    """An empty slot, pages outside the window, a split without any page; 2 of 8 rows are query heads."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    arrays = inputs(jnp.bfloat16, heads=2, kv_heads=1, page=32, row=3, lengths=(0, 80))
    kernel = functools.partial(pallas_gpu.decode_attention, scale=0.2, softcap=3.0, splits=2, interpret=True)
    run = fast_jit(kernel)
    for window in (40, 10):
        got = run(*arrays, window=np.int32(window))
        assert_both_close(got, oracle(*arrays, scale=0.2, softcap=3.0, window=window), jnp.bfloat16)
    assert not np.asarray(got[0][0]).any()
    assert not interpret_pallas_call.get_races().races_found


def test_hopper_splits_occupy_the_card():
    assert pallas_gpu.splits_for(blocks=8, pages=100) == 33  # 264 blocks of threads, two a core
    assert pallas_gpu.splits_for(blocks=8, pages=4) == 4 and pallas_gpu.splits_for(blocks=2048, pages=9) == 1


def test_the_choice_and_its_reason():
    q, k, _, table, _, *_ = abstract("bf16 128")
    chosen = functools.partial(choose, "decode_attention")
    assert chosen(q, k, table)[0] == "reference"
    assert pallas_tpu.block_tokens(k) == 512 and pallas_tpu.unsupported(q, k, table) is None
    assert pallas_tpu.block_tokens(abstract("float32 128")[1]) == 512
    with jax.sharding.use_abstract_mesh(V5E):
        assert chosen(q, k, table)[0] == "pallas_tpu"
        other = jax.ShapeDtypeStruct((100, 8, 64, 80), jnp.bfloat16)
        assert chosen(q, other, table) == ("reference", "head_dim 80 is not one of 64, 96, 128, 256")
    with jax.sharding.use_abstract_mesh(H100):
        assert chosen(q, k, table)[0] == "pallas_gpu"
        q, k, _, table, *_ = abstract("int8 128")
        reason = "queries of bfloat16, pages of int8: give both bfloat16 or both float16"
        assert chosen(q, k, table) == ("reference", reason)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (dict(dim=80), "head_dim 80 is not one of 64, 96, 128, 256; use implementation='reference'"),
        (dict(page=12), "pages of 12 tokens of type float32: the page must be a multiple of 8"),
        (dict(kv_heads=64, heads=64, page=64, dim=128), "more than 4194304: give pages of at most 32 tokens"),
        (dict(row=40000), r"page table \(5, 40000\) takes 800000 bytes of scalar memory"),
        (dict(heads=3), "3 query heads over 2 kv heads: must be a multiple"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_refusals_name_what_fits(shape, message):
    spec = jax.ShapeDtypeStruct
    o = dict(heads=4, kv_heads=2, page=16, dim=64, row=4) | shape
    pages = spec((9, o["kv_heads"], o["page"], o["dim"]), jnp.float32)
    arrays = spec((5, o["heads"], o["dim"]), jnp.float32), pages, pages, spec((5, o["row"]), jnp.int32)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(on_tpu, 1), *arrays, spec((5,), jnp.int32), None, None)


def test_refuses_8_bits_without_scales():
    with pytest.raises(ValueError, match="pages of int8 need k_scales and v_scales"):
        jax.eval_shape(functools.partial(on_tpu, 1), *abstract("int8 128")[:5], None, None)


@pytest.fixture(params=TPUS)
def compiled(request, tpu):
    """`compiled(function, *arrays)` with the real compiler for one TPU; the first argument is donated."""
    mesh = jax.sharding.Mesh(np.array(tpu(request.param)[:1]), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    put = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def compile_it(function, *arrays):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            traced = jax.jit(function, donate_argnums=0).trace(*jax.tree.map(put, arrays))
            return traced.lower(lowering_platforms=("tpu",)).compile()

    return compile_it


@pytest.mark.compilers
@pytest.mark.parametrize("case", SHAPES)
def test_compiles_for_tpu(compiled, case):
    """With the real compiler; nothing runs."""
    for splits in (1, 2):
        assert "tpu_custom_call" in compiled(functools.partial(on_tpu, splits), *abstract(case)).as_text()


@pytest.mark.compilers
@pytest.mark.parametrize("case", [case for case in SHAPES if SHAPES[case][3] % 128 == 0])
def test_a_step_on_tpu_copies_no_pages(compiled, case):
    """Write a token of each slot, then attend to all: no operation changes the layout of the pages."""
    q, k, v, table, lengths, *scales = abstract(case)
    token = jax.ShapeDtypeStruct((len(table), k.shape[1], k.shape[3]), k.dtype)
    scale = scales[0] and jax.ShapeDtypeStruct(token.shape[:2], jnp.float32)

    def step(pages, new, q, *slots):
        table, lengths = slots
        pages = api.write_token(pages, new, table[:, 0], lengths % k.shape[2], "pallas_tpu")
        return pages, on_tpu(None, q, *pages[:2], table, lengths, *pages[2:])

    program = compiled(step, (k, v, *scales), (token, token, scale, scale), q, table, lengths)
    assert program.memory_analysis().temp_size_in_bytes < k.size * k.dtype.itemsize / 4


@pytest.mark.compilers
@pytest.mark.parametrize(("dim", "page"), [(64, 64), (96, 128), (128, 128), (256, 32)])
def test_compiles_for_hopper(dim, page):
    if problem := topology.missing_compiler("cuda"):
        pytest.skip(problem)
    mesh = jax.sharding.Mesh(np.array(topology.gpu_devices("h100")[:1]), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    spec = functools.partial(jax.ShapeDtypeStruct, sharding=where)
    pages = spec((100, 4, page, dim), jnp.bfloat16)
    arrays = spec((8, 8, dim), jnp.bfloat16), pages, pages, spec((8, 16), jnp.int32), spec((8,), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(functools.partial(api.decode_attention, scale=0.1, softcap=30.0)).trace(*arrays)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.compile().as_text()
