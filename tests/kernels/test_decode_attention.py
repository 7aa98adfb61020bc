"""Attention over a paged cache: the definition against hand numbers, the kernels against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxrl_kernels import gpu_target
from jaxrl_kernels.decode_attention import api, pallas_gpu, pallas_tpu, reference
from jaxrl_kernels.flash_attention import shapes
from jaxrl_kernels.flash_attention.reference import attention

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2}
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
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return *arrays, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)


def quantized(dtype, **shape):
    """The same, k and v in 8 bits with a scale a token and head."""
    q, k, v, table, lengths = inputs(jnp.bfloat16, **shape)
    most = 127 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scales = [jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / most for x in (k, v)]
    narrow = [x.astype(jnp.float32) / s[..., None] for x, s in zip((k, v), scales, strict=True)]
    narrow = [(jnp.round(x) if dtype == jnp.int8 else x).astype(dtype) for x in narrow]
    return (q, *narrow, table, lengths), dict(k_scales=scales[0], v_scales=scales[1])


def close(got, expected, dtype=jnp.float32):
    assert got.dtype == expected.dtype
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_definition_by_hand():
    """Pages of 2 tokens, out of order: scores 0 and ln 3 weigh 1/4 and 3/4; nobody is in slot 2."""
    k = jnp.array([50.0, 50.0, 9.0, 9.0, 0.0, np.log(3.0)]).reshape(3, 1, 2, 1)
    v = jnp.array([1e3, 1e3, 7.0, 7.0, 8.0, 4.0]).reshape(3, 1, 2, 1)
    table = jnp.array([[2, 0], [1, 0], [1, 1]], jnp.int32)
    out = api.decode_attention(
        jnp.full((3, 1, 1), 2.0), k, v, table, jnp.array([2, 1, 0], jnp.int32), scale=0.5
    )
    np.testing.assert_allclose(out.ravel(), [0.25 * 8 + 0.75 * 4, 7, 0], rtol=1e-6)


def test_the_definition_is_dense_attention_of_the_last_token():
    q, k, v, table, lengths = inputs(lengths=(37,))
    flat = lambda pages: jnp.concatenate(list(pages[table[0]]), axis=1)[:, :37].swapaxes(0, 1)[None]
    for window in (2**30, 5):
        visible = (36 - jnp.arange(37) < window)[None, None]
        expected = attention(q[:, None], flat(k), flat(v), visible, scale=0.3, softcap=4.0)[:, 0]
        got = reference.decode_attention(q, k, v, table, lengths, scale=0.3, window=window, softcap=4.0)
        close(got, expected)


FAST = {"xla_backend_optimization_level": 0}  # of compilation
CASES = {
    "plain, two heads": (jnp.bfloat16, dict(heads=2), dict(block=32)),
    "gqa, a window in two parts": (jnp.float32, dict(heads=8, dim=128), dict(window=40, splits=2, block=32)),
    "softcap, one page a block": (jnp.bfloat16, dict(dim=96), dict(softcap=3.0, window=20, block=16)),
    "three parts": (jnp.float32, dict(heads=2, kv_heads=1, dim=256), dict(splits=3, block=64)),
}


@pytest.mark.parametrize("case", CASES)
def test_tpu_kernel_equals_the_definition(case):
    dtype, shape, options = CASES[case]
    arrays = inputs(dtype, **shape)
    options = {"window": 2**30, "softcap": None} | options
    seen = {name: options[name] for name in ("window", "softcap")} | {"scale": 0.2}
    window = jnp.int32(options.pop("window"))  # a scanned stack of layers traces it
    kernel = lambda window, *x: pallas_tpu.decode_attention(
        *x, window=window, scale=0.2, interpret=True, **options
    )
    got = jax.jit(kernel, compiler_options=FAST)(window, *arrays)
    close(got, reference.decode_attention(*arrays, **seen), dtype)
    assert (got[0] == 0).all()  # a slot of length 0


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=lambda d: d.__name__)
def test_tpu_kernel_reads_8_bits_with_scales(dtype):
    arrays, scales = quantized(dtype, page=128, row=2, lengths=(200, 3))
    kernel = lambda arrays, scales: pallas_tpu.decode_attention(
        *arrays, **scales, scale=0.2, window=2**30, block=128, interpret=True
    )
    got = jax.jit(kernel, compiler_options=FAST)(arrays, scales)
    close(got, reference.decode_attention(*arrays, **scales, scale=0.2), jnp.bfloat16)
    exact = reference.decode_attention(*inputs(jnp.bfloat16, page=128, row=2, lengths=(200, 3)), scale=0.2)
    np.testing.assert_allclose(got.astype(jnp.float32), exact.astype(jnp.float32), atol=0.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=lambda d: d.__name__)
def test_a_token_of_each_slot_is_written(dtype):
    """By scatter and by the TPU's kernel, the latter without races; every other number stays."""
    if dtype == jnp.int8:
        (_, k, v, *_), scales = quantized(dtype, page=128, row=1, lengths=(100, 3))
        pages = {"k": k, "v": v, **scales}
    else:
        pages = dict(zip("kv", inputs(dtype)[1:3], strict=True))
    new = {name: -x[:2, :, 5] for name, x in pages.items()}
    numbers, offsets = jnp.array([3, 1], jnp.int32), jnp.array([7, 0], jnp.int32)
    expected = {name: np.array(x) for name, x in pages.items()}
    for name, x in expected.items():
        x[3, :, 7], x[1, :, 0] = new[name]
    for got in (
        api.write(pages, new, numbers, offsets, "reference"),
        pallas_tpu.write(pages, new, numbers, offsets, interpret=RACES),
    ):
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


def test_tpu_kernel_has_no_race_and_reads_no_unwritten_memory():
    """The interpreter that checks: buffers begin as NaN, and copies are ordered by their semaphores alone."""
    arrays = inputs(lengths=(0, 37, 64, 5), kv_heads=1)
    got = pallas_tpu.decode_attention(*arrays, scale=0.2, window=45, block=32, splits=2, interpret=RACES)
    close(got, reference.decode_attention(*arrays, scale=0.2, window=45))
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


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


def run(splits, q, k, v, table, lengths, k_scales, v_scales):
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
            jax.jit(functools.partial(run, None)).trace(*abstract(case)).lower(lowering_platforms=("tpu",))
        )
    assert "tpu_custom_call" in lowered.as_text()


@pytest.fixture
def quick_to_compile():
    """The interpreter compiles a program for every warpgroup."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_hopper_kernel_equals_the_definition(quick_to_compile):
    """A slot of nobody, pages that the window hides, a part without any page; 2 of 8 rows are query heads."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    arrays = inputs(jnp.bfloat16, heads=2, kv_heads=1, page=32, row=3, lengths=(0, 80))
    kernel = functools.partial(pallas_gpu.decode_attention, scale=0.2, softcap=3.0, splits=2, interpret=True)
    for window in (40, 10):
        got = jax.jit(kernel)(*arrays, window=jnp.int32(window))
        close(got, reference.decode_attention(*arrays, scale=0.2, softcap=3.0, window=window), jnp.bfloat16)
    assert (got[0] == 0).all()
    assert not interpret_pallas_call.get_races().races_found


def test_hopper_parts_fill_the_card():
    assert pallas_gpu.splits_for(blocks=8, pages=100) == 33  # 264 blocks of threads, two a core
    assert pallas_gpu.splits_for(blocks=8, pages=4) == 4 and pallas_gpu.splits_for(blocks=2048, pages=9) == 1


def test_who_is_chosen_and_why():
    q, k, _, table, _, *_ = abstract("bf16 128")
    assert api.choose(q, k, table)[0] == "reference"
    assert api.tpu_block(k) == 512 and api.tpu_obstacle(q, k, table) is None
    assert api.tpu_block(abstract("float32 128")[1]) == 512
    with jax.sharding.use_abstract_mesh(V5E):
        assert api.choose(q, k, table)[0] == "pallas_tpu"
        other = jax.ShapeDtypeStruct((100, 8, 64, 80), jnp.bfloat16)
        assert api.choose(q, other, table) == ("reference", "head_dim 80 is not one of 64, 96, 128, 256")
    with jax.sharding.use_abstract_mesh(H100):
        assert api.choose(q, k, table)[0] == "pallas_gpu"
        q, k, _, table, *_ = abstract("int8 128")
        why = "queries of bfloat16, pages of int8: give both bfloat16 or both float16"
        assert api.choose(q, k, table) == ("reference", why)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (dict(dim=80), 'head_dim 80 is not one of 64, 96, 128, 256, or use implementation="reference"'),
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
        jax.eval_shape(functools.partial(run, 1), *arrays, spec((5,), jnp.int32), None, None)


def test_refuses_8_bits_without_scales():
    (q, k, v, table, lengths), _ = quantized(jnp.int8)
    with pytest.raises(ValueError, match="pages of int8 need k_scales and v_scales"):
        api.decode_attention(q, k, v, table, lengths, scale=1.0)


@pytest.fixture(params=shapes.VMEM)
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
        assert "tpu_custom_call" in compiled(functools.partial(run, splits), *abstract(case)).as_text()


@pytest.mark.compilers
@pytest.mark.parametrize("case", [case for case in SHAPES if SHAPES[case][3] % 128 == 0])
def test_a_step_on_tpu_copies_no_pages(compiled, case):
    """Write a token of each slot, then look at all: nothing wants the pages in another layout."""
    q, k, v, table, lengths, *scales = abstract(case)
    token = jax.ShapeDtypeStruct((len(table), k.shape[1], k.shape[3]), k.dtype)
    scale = scales[0] and jax.ShapeDtypeStruct(token.shape[:2], jnp.float32)

    def step(pages, new, q, table, lengths):
        pages = api.write(pages, new, table[:, 0], lengths % k.shape[2], "pallas_tpu")
        return pages, run(None, q, *pages[:2], table, lengths, *pages[2:])

    found = compiled(step, (k, v, *scales), (token, token, scale, scale), q, table, lengths)
    assert found.memory_analysis().temp_size_in_bytes < k.size * k.dtype.itemsize / 4


@pytest.mark.compilers
@pytest.mark.parametrize(("dim", "page"), [(64, 64), (96, 128), (128, 128), (256, 32)])
def test_compiles_for_hopper(dim, page):
    if why := gpu_target.unavailable():
        pytest.skip(why)
    mesh = jax.sharding.Mesh(np.array(gpu_target.gpu_topology("h100").devices[:1]), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    spec = functools.partial(jax.ShapeDtypeStruct, sharding=where)
    pages = spec((100, 4, page, dim), jnp.bfloat16)
    arrays = spec((8, 8, dim), jnp.bfloat16), pages, pages, spec((8, 16), jnp.int32), spec((8,), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(functools.partial(api.decode_attention, scale=0.1, softcap=30.0)).trace(*arrays)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.compile().as_text()
