"""Grouped matrix products: every implementation against NumPy, values and gradients, races, compilers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from kernel_oracles import assert_close

from jaxrl_kernels import dispatch, hopper, topology
from jaxrl_kernels.chips import TPUS
from jaxrl_kernels.grouped_matmul import pallas_gpu, ragged_dot, reference, tiled
from jaxrl_kernels.grouped_matmul.api import grouped_matmul
from jaxrl_kernels.grouped_matmul.bench import group_sizes, measure_product

FAST = {"xla_backend_optimization_level": 0}  # of compilation
MISSING = topology.missing_compiler("cuda")


def inputs(rows, depth, columns, sizes, *, dtype):
    """NaN in the rows after the last group."""
    rng, sizes = np.random.default_rng(0), np.array(sizes, np.int32)
    lhs, d_out = rng.normal(size=(rows, depth)).astype(dtype), rng.normal(size=(rows, columns))
    lhs[sizes.sum() :] = np.nan
    return lhs, rng.normal(size=(len(sizes), depth, columns)).astype(dtype), sizes, d_out.astype(np.float32)


def oracle(lhs, rhs, sizes, d_out):
    """(out, d_lhs, d_rhs) in float64."""
    lhs, rhs, d_out = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, d_out))
    out, d_lhs, d_rhs = np.zeros((len(lhs), rhs.shape[2])), np.zeros(lhs.shape), np.zeros(rhs.shape)
    ends = np.cumsum(sizes)
    for group, rows in enumerate(map(slice, ends - sizes, ends)):
        out[rows], d_lhs[rows] = lhs[rows] @ rhs[group], d_out[rows] @ rhs[group].T
        d_rhs[group] = lhs[rows].T @ d_out[rows]
    return out, d_lhs, d_rhs


def check(product, *args, dtype):
    @functools.partial(jax.jit, compiler_options=FAST)
    def run(lhs, rhs, sizes, d_out):
        out, gradients = jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes, jnp.float32), lhs, rhs)
        return out, *gradients(d_out)

    got = run(*args)
    assert [x.dtype for x in got] == [jnp.float32, dtype, dtype]
    for x, wanted in zip(got, oracle(*args), strict=True):
        assert_close(x, wanted, dtype)
        assert not np.asarray(x)[wanted == 0].any()  # rows after the last group, and an empty group's matrix


@pytest.mark.parametrize("module", [reference, ragged_dot, tiled], ids=lambda module: module.__name__)
def test_plain_products_and_gradients(module):
    args = inputs(20, 6, 5, [3, 0, 8, 1, 4], dtype=np.float32)
    check(module.grouped_matmul, *args, dtype=jnp.float32)


@pytest.mark.parametrize("sizes", [(40, 0, 1, 23), (0, 0, 0, 64), (9, 8, 7, 6), (0, 0, 0, 0)])
def test_tiles_of_rows(sizes):
    """Tiles of 16 rows: groups that begin within another's last tile, empty ones, none."""
    check(tiled.grouped_matmul, *inputs(64, 6, 5, sizes, dtype=np.float32), dtype=jnp.float32)


def test_groups_and_tiles_in_order():
    """Rows 0 to 9, 10 and 11 to 30 in tiles of 8; groups 1 and 4 have none."""

    def step(group, seen):
        def visit(row, inside, seen):
            count, visits = seen
            one = jnp.array([group.number, row, jnp.sum(inside)])
            return count + 1, visits.at[count].set(one)

        return group.for_each_tile(8, visit, seen)

    count, visits = tiled.for_each_group(jnp.array([10, 0, 1, 20, 0]), step, (0, jnp.zeros((9, 3), int)))
    wanted = [[0, 0, 8], [0, 8, 2], [2, 10, 1], [3, 11, 8], [3, 19, 8], [3, 27, 4]]
    np.testing.assert_array_equal(visits[:count], wanted)


def test_matrices_of_groups_without_rows_are_not_read():
    """As most experts have none where few tokens are decoded."""
    _, rhs, sizes, _ = inputs(16, 6, 5, [0, 9, 0, 7], dtype=np.float32)
    rhs = jnp.asarray(rhs).at[jnp.array([0, 2])].set(jnp.nan)
    add = lambda group, total: total + jnp.sum(rhs[group.number])
    assert jnp.isfinite(tiled.for_each_group(jnp.asarray(sizes), add, jnp.float32(0)))


def test_tiled_products_compute_no_row_by_every_matrix():
    """1,024 rows of 8 groups, 128 rows at a time, where `ragged_dot` computes 8,192 rows."""
    args = inputs(1024, 64, 32, [128] * 8, dtype=np.float32)[:3]
    text = jax.jit(tiled.grouped_matmul).lower(*args).compile().as_text()
    assert "f32[128,32]" in text and 'known_trip_count":{"n":"8"}' in text.replace(" ", "")
    assert "f32[1024,32]{1,0} dot(" not in text


def test_the_hopper_kernels(compile_once):
    """Groups that begin within a tile, one of no row, one of all of a consumer's rows; the last of two tiles
    of rows is padded, as are depth and columns."""
    settings = {"static_argnums": 3, "static_argnames": "interpret", "compiler_options": FAST}
    lhs, rhs, sizes, d_out = inputs(140, 60, 40, [6, 0, 122, 7], dtype=jnp.bfloat16)
    d_out[135:] = 0
    d_out = d_out.astype(jnp.bfloat16)
    out, _, d_rhs = oracle(lhs, rhs, sizes, d_out)
    rows, groups = (jax.jit(f, **settings) for f in (pallas_gpu.rows_product, pallas_gpu.groups_product))
    got = rows(lhs, rhs, sizes, jnp.dtype("float32"), interpret=True)
    assert_close(got[:135], out[:135], jnp.bfloat16)
    assert not interpret_pallas_call.get_races().races_found
    got = groups(lhs, d_out, sizes, jnp.dtype("bfloat16"), interpret=True)
    assert_close(got, d_rhs, jnp.bfloat16)
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.slow
def test_the_hopper_kernels_in_several_steps_of_the_ring(compile_once):
    """Two tiles of columns, three slabs of rhs, of which a tile has two, and more steps than stages; with
    both gradients."""
    product = functools.partial(pallas_gpu.grouped_matmul, interpret=True)
    args = inputs(384, 192, 320, [70, 1, 0, 300], dtype=jnp.bfloat16)
    check(product, *args, dtype=jnp.bfloat16)
    assert not interpret_pallas_call.get_races().races_found


def test_visits():
    """Tiles of 128 rows: group 0 has rows of both, group 1 none, groups 2 and 3 share the second."""
    count, visits = jax.jit(pallas_gpu._visits, static_argnums=1)(np.array([130, 0, 20, 3], np.int32), 2)
    assert int(count[0]) == 4
    wanted = [[0, 0, 0, 130], [0, 1, 0, 130], [2, 1, 130, 150], [3, 1, 150, 153]]
    np.testing.assert_array_equal(visits[:, :4].T, wanted)


@pytest.mark.parametrize(("begin", "end"), [(0, 64), (7, 7), (3, 90), (100, 101), (121, 192), (64, 128)])
def test_blocks_of_a_group_begin_where_shared_memory_has_tiles(begin, end):
    """TMA copies tiles of 8 rows: another start would be rounded down, but not in the interpreter."""
    rows = pallas_gpu._GroupRows(jnp.int32(begin), jnp.int32(end), 192)
    starts = [int(rows.block_start(k)) for k in range(int(rows.steps))]
    assert all(start % hopper.TILE_ROWS == 0 and start + 64 <= 192 for start in starts)
    summed = [row for k, at in enumerate(starts) for row in range(at, at + 64) if rows.are_of(k, row)]
    assert summed == list(range(begin, end))


def test_the_choice_and_bad_input(monkeypatch):
    chosen = functools.partial(dispatch.choose, "grouped_matmul", jnp.bfloat16)
    assert chosen() == ("tiled", "cpu: plain JAX, there are no kernels for it")
    monkeypatch.setattr(dispatch, "device", lambda: ("tpu", "TPU v5p"))
    assert chosen() == ("ragged_dot", "TPU v5p: XLA's kernel")
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", "NVIDIA H100 80GB HBM3"))
    assert chosen() == ("pallas_gpu", "NVIDIA H100 80GB HBM3: Pallas kernels for Hopper")
    name, reason = dispatch.choose("grouped_matmul", jnp.float32)
    assert (name, reason) == ("tiled", "wgmma multiplies bfloat16 and float16, not float32")
    args = inputs(4, 3, 2, [4], dtype=np.float32)[:3]
    with pytest.raises(ValueError, match=r"pallas_gpu: wgmma multiplies .*; use implementation='tiled'"):
        grouped_matmul(*map(jnp.asarray, args), implementation="pallas_gpu")


def test_bench_counts_the_work():
    """Zipf: shares of 6/11, 3/11 and 2/11 of 110 rows."""
    np.testing.assert_array_equal(group_sizes(110, 3, skew=1.0), [60, 30, 20])
    np.testing.assert_array_equal(group_sizes(12, 3, skew=0.0), [4, 4, 4])
    row = measure_product("ragged_dot", 64, 4, 16, 8, dtype="float32", repeat=1)
    np.testing.assert_allclose(row["forward_tflops"] * row["forward_s"], 2e-12 * 64 * 16 * 8)
    np.testing.assert_allclose(row["gradients_tflops"] * row["gradients_s"], 4e-12 * 64 * 16 * 8)


def compiled(devices, platform, shape):
    """Compile value and gradients, with the choice of `dispatch`, for one device."""
    rows, groups, depth, columns = shape
    mesh = Mesh(np.array(devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))

    def step(lhs, rhs, sizes, d_out):
        product = lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, preferred_element_type=jnp.float32)
        out, gradients = jax.vjp(product, lhs, rhs)
        return out, *gradients(d_out)

    shapes = ((rows, depth), jnp.bfloat16), ((groups, depth, columns), jnp.bfloat16)
    shapes = *shapes, ((groups,), jnp.int32), ((rows, columns), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(step).trace(*(array(*shape) for shape in shapes))
        return traced.lower(lowering_platforms=(platform,)).compile()


QWEN_UP, QWEN_DOWN = (8192, 128, 2048, 768), (8192, 128, 768, 2048)


@pytest.mark.compilers
@pytest.mark.parametrize("shape", [QWEN_UP, QWEN_DOWN], ids=["up", "down"])
@pytest.mark.parametrize("chip", TPUS)
def test_xla_has_kernels_for_tpu(chip, shape, tpu):
    """A kernel for the product and one for each gradient; no [rows, groups, columns] anywhere."""
    program = compiled(tpu(chip), "tpu", shape)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') >= 3
    assert program.memory_analysis().temp_size_in_bytes < 1.2 * 2**30  # dense: 1.5 GiB or more


@pytest.mark.compilers
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    "shape",
    [QWEN_UP, QWEN_DOWN, (4096, 32, 2880, 2880), (100, 8, 96, 4)],
    ids=["up", "down", "gpt-oss", "adapter"],
)
def test_kernels_for_h100(shape, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    program = compiled(topology.gpu_devices("h100"), "cuda", shape)
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 3
    output = capfd.readouterr().out
    assert output.count("Compiling entry function") == output.count(" 0 bytes spill stores") == 3
    assert "C7512" not in output, "products are serialised for want of registers"
