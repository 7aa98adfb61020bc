"""The Hopper kernels: values and gradients in Pallas' interpreter, and what the compilers say without a GPU.

In the interpreter copies, barriers and warpgroups are the kernels'; a product on the tensor cores is jnp's.
"""

import functools
import types

import jax
import jax.numpy as jnp
import kernel_oracles as oracles
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from kernel_oracles import MASKED_LSE, assert_close

from jaxrl_kernels import hopper, topology
from jaxrl_kernels.flash_attention import gpu_plan, pallas_gpu
from jaxrl_kernels.flash_attention.spec import NO_WINDOW, AttentionSpec, DynamicMask, row_windows


def packed(*parts):
    return np.concatenate([np.full((1, count), segment, np.int32) for segment, count in parts], axis=1)


PACKED = packed((1, 70), (2, 60), (0, 6), (3, 94))
"""Padding in the middle; 230 tokens, no whole tiles of 128."""
TREE = packed((1, 128), (2, 70), (3, 58), (4, 90), (0, 6), (5, 20))
PARENTS = {2: 1, 3: 2, 4: 1}
"""Segment -> the one that it continues; the last tile needs no key of the second one."""
CASES = {
    # The last 100 queries of 230 tokens, as in a ring; two heads share keys; some queries are fully masked.
    "quick": (
        AttentionSpec(0.125, softcap=2.0),
        DynamicMask(130, 0, 90),
        (100, 230, 2, 1, 64),
        (PACKED[:, 130:], PACKED),
    ),
    "branches": (AttentionSpec(0.125, branches=True), DynamicMask(), (372, 372, 2, 1, 64), (TREE, TREE)),
    "branches, a window of each": (
        AttentionSpec(0.125, branches=True),
        DynamicMask(window=100),
        (372, 372, 2, 1, 64),
        (TREE, TREE),
    ),
    "packed": (AttentionSpec(96**-0.5), DynamicMask(), (230, 230, 2, 1, 96), (PACKED, PACKED)),
    "wide heads": (
        AttentionSpec(1 / 16),
        DynamicMask(0, 100),
        (200, 130, 1, 1, 256),
        (PACKED[:, :200], PACKED[:, 100:]),
    ),
}
"""Name -> spec, mask, (queries, keys, heads, key heads, head dim), segments of both."""


@pytest.mark.parametrize(
    "case",
    ["quick", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "quick")],
)
def test_values_and_gradients_are_those_of_the_oracle(case, compile_once):
    spec, mask, (queries, keys, heads, kv_heads, dim), segments = CASES[case]
    rng = np.random.default_rng(0)
    sizes = (queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)
    q, k, v, d_out = (rng.normal(size=(1, *size, dim)).astype(jnp.bfloat16) for size in sizes)
    d_lse = rng.normal(size=(1, heads, queries)).astype(np.float32)
    parents = PARENTS if spec.branches else {}
    operands = q, k, v, segments[0], oracles.last_segments(segments[1], parents)
    allowed, traced = oracles.visible(mask, *segments, parents), mask
    if "of each" in case:
        whole = oracles.visible(DynamicMask(), *segments, parents)
        allowed = oracles.newest(whole, mask.window)
        rows = (segments[0], operands[4], whole.sum(-1) - 1)
        traced = mask._replace(window=row_windows(*map(jnp.asarray, rows), mask.window))
    traced = jax.tree.map(np.int32, traced)  # one compilation serves every offset and window
    ours = functools.partial(
        jax.jit, static_argnums=0, static_argnames="interpret",
        compiler_options={"xla_backend_optimization_level": 0},
    )  # fmt: skip
    out, lse = ours(pallas_gpu.forward)(spec, *operands, traced, interpret=True)
    assert not interpret_pallas_call.get_races().races_found
    got = ours(pallas_gpu.backward)(spec, *operands, traced, out, lse, d_out, d_lse, interpret=True)
    assert not interpret_pallas_call.get_races().races_found

    wanted = oracles.attention(
        q, k, v, allowed, scale=spec.scale, softcap=spec.softcap, d_out=d_out, d_lse=d_lse
    )
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    finite = wanted[1][wanted[1] > MASKED_LSE]
    np.testing.assert_allclose(lse, wanted[1], atol=1e-3 * np.abs(finite).max())
    names, wanted = ("out", "dq", "dk", "dv"), (wanted[0], *wanted[2:])
    for name, x, expected in zip(names, (out, *got), wanted, strict=True):
        assert_close(x, expected, jnp.bfloat16, name)
    masked = ~allowed.any(axis=-1)[0]
    assert masked.any() and not np.asarray(out)[0, masked].any()
    assert (np.asarray(lse)[0, :, masked] == MASKED_LSE).all()


def arrays(segments, last=None, mask=None):
    """Inputs of a kernel whose tokens are of no interest."""
    tokens = jnp.zeros((*segments.shape, 1, 32))
    last = segments if last is None else last
    return gpu_plan.padded_inputs(tokens, tokens, tokens, segments, last, mask or DynamicMask(), True)


def test_blocks_a_tile_reads():
    """512 tokens, the first 256 one segment: tiles of 128 queries against blocks of 64 keys."""
    segments = jnp.asarray(packed((1, 256), (2, 200), (0, 56)))
    find = functools.partial(gpu_plan.blocks_to_read, AttentionSpec(1.0), DynamicMask(), arrays(segments))
    find = jax.jit(find, static_argnums=(0, 1), static_argnames="of_keys")
    ranges = np.asarray(find(128, 64, of_keys=False))[0].tolist()  # first, [first full, end full), end
    assert ranges == [[0, 0, 0, 2], [0, 0, 2, 4], [4, 4, 4, 6], [4, 4, 4, 8]]
    of_keys = np.asarray(find(64, 128, of_keys=True))[0].tolist()
    assert of_keys == [[0, 2, 4, 4], [2, 2, 2, 4], [4, 6, 7, 8], [6, 6, 6, 8]]
    blocks = gpu_plan.BlockRange(*jnp.array([2, 4, 7, 9]))  # 2, 3 and 7, 8 have masked pairs
    assert int(blocks.masked) == 4
    assert blocks.block(jnp.arange(7)).tolist() == [2, 3, 7, 8, 4, 5, 6]


def test_blocks_a_tile_reads_where_segments_have_branches():
    """512 tokens, the last 128 padding; tiles of 128 queries against blocks of 64 keys."""
    segments = jnp.asarray(np.pad(TREE, ((0, 0), (0, 140))))
    last = jnp.asarray(oracles.last_segments(np.asarray(segments), PARENTS))
    spec = AttentionSpec(1.0, branches=True)
    found = jax.jit(
        lambda: gpu_plan.blocks_to_read(spec, DynamicMask(), arrays(segments, last), 128, 64, of_keys=False)
    )
    lists = [row[: 2 + row[1]] for row in np.asarray(found())[0].tolist()]  # masked, count, blocks
    assert lists == [[2, 2, 0, 1], [2, 4, 2, 3, 0, 1], [4, 4, 0, 1, 4, 5], [1, 1, 0]]


def test_a_window_skips_blocks_and_a_fully_masked_tile_reads_one():
    ones = jnp.ones((1, 512), jnp.int32)
    settings = {"q_block": 128, "kv_block": 64, "of_keys": False}
    find = jax.jit(
        lambda mask: gpu_plan.blocks_to_read(AttentionSpec(1.0), mask, arrays(ones, mask=mask), **settings)
    )
    ranges = np.asarray(find(DynamicMask(window=130)))[0].tolist()
    assert ranges[3] == [3, 3, 3, 8]  # keys 255 to 511; no block is visible to all 128 queries
    assert np.asarray(find(DynamicMask(0, 512, NO_WINDOW)))[0].tolist() == [[0, 0, 0, 1]] * 4


def test_bad_input_is_named():
    ones = jnp.ones((1, 16), jnp.int32)
    assert "bfloat16 and float16, not float32" in pallas_gpu.unsupported(64, jnp.float32)
    assert "head_dim 320 is over 256" in pallas_gpu.unsupported(320, jnp.bfloat16)
    assert pallas_gpu.unsupported(256, jnp.float16) is None
    q = k = v = jnp.zeros((1, 16, 1, 256), jnp.bfloat16)
    big = gpu_plan.RingBlocks(128, 64, 64)
    with pytest.raises(
        ValueError, match=r"head_dim 256: two blocks of 128 rows .* lengths that fit: \[32, 64\]"
    ):
        pallas_gpu.forward(AttentionSpec(1.0), q, k, v, ones, ones, DynamicMask(), blocks=big)


def test_stages_are_as_many_as_fit():
    assert hopper.stages_that_fit("x", 64, 0, 512) == 4  # at most
    assert hopper.stages_that_fit("x", 128, 90_000, 512) == 2  # 138,352 bytes for 65,536 each
    with pytest.raises(ValueError, match=r"48 rows .* lengths that fit: \[32, 64, 128\]"):
        hopper.stages_that_fit("x", 48, 0, 512)


def program(dim, dtype=jnp.bfloat16, softcap=None, branches=False, *, sharding=None):
    """(forward and backward with a traced mask, its abstract arguments)."""
    spec = AttentionSpec(dim**-0.5, softcap=softcap, branches=branches)

    def both(q, k, v, *others):
        segments, place, d_out = others
        out, lse = pallas_gpu.forward(spec, q, k, v, segments, segments, DynamicMask(*place))
        return pallas_gpu.backward(spec, q, k, v, segments, segments, DynamicMask(*place), out, lse, d_out)

    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    q, kv = array((2, 1024, 4, dim), dtype), array((2, 1024, 2, dim), dtype)
    return both, (q, kv, kv, array((2, 1024), jnp.int32), array((3,), jnp.int32), q)


@pytest.mark.parametrize(
    "case",
    [
        (96, jnp.float16, None, True),
        pytest.param((256, jnp.bfloat16, 30.0, False), marks=pytest.mark.slow),
    ],
)
def test_lowers_for_cuda_without_one(case):
    (dim, *_), (both, args) = case, program(*case)
    text = jax.jit(both).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2 + len(gpu_plan.passes(dim))  # forward, dq


@pytest.mark.parametrize("divided", [True, False])
def test_blocks_are_what_the_registers_hold(divided, monkeypatch):
    """Sums, scores and weights: of 232 registers a lane beside a warpgroup that copies, or of 168."""
    monkeypatch.setattr(gpu_plan, "has_register_reallocation", lambda: divided)
    for dim in (64, 96, 128):
        forward, _, dkv = gpu_plan.default_blocks(dim)
        most = 232 if divided else 168
        sums, scores, weights = dim // 2, forward // 2, forward // 4  # of 64 rows, over 128 lanes; 16 bits
        assert sums + scores + weights <= most - 32  # for statistics and indices
        assert len(gpu_plan.passes(dim)[0]) * sums + 2 * dkv // 2 <= most - 32
    assert gpu_plan.default_blocks(256) == (64, 32, 32) and len(gpu_plan.passes(256)) == 2


@pytest.mark.compilers
@pytest.mark.parametrize(
    "dim, softcap, branches",
    [
        *((dim, None, False) for dim in (64, 96, 128, 256)),
        (128, 30.0, False),
        (128, None, True),
        (256, 30.0, True),
    ],
)
def test_compiles_for_an_h100_that_is_not_here(dim, softcap, branches, *, monkeypatch, capfd):
    if problem := topology.missing_compiler("cuda"):
        pytest.skip(problem)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    devices = np.array(topology.gpu_devices("h100"))
    mesh = jax.sharding.Mesh(devices, ("x",))
    both, args = program(
        dim,
        softcap=softcap,
        branches=branches,
        sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(both).trace(*args).lower(lowering_platforms=("cuda",)).compile()
    gradients = 2 * 1024 * (4 + 2 + 2) * dim
    assert compiled.memory_analysis().output_size_in_bytes == 2 * gradients + 3 * 8  # and three pointers
    output = capfd.readouterr().out
    assert output.count("Compiling entry function") == 2 + len(gpu_plan.passes(dim))
    assert gpu_plan.has_register_reallocation() == ("C7504" not in output), (
        "whether set_max_registers is honoured"
    )
    assert dim > 128 or "C7512" not in output, "products are serialised for want of registers"


def test_an_unknown_gpu_and_a_missing_compiler_are_named(monkeypatch):
    with pytest.raises(ValueError, match="no GPU kind 'v100': one of h100, h200, b200"):
        topology.gpu_devices("v100")
    finder = types.SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(topology, "importlib", types.SimpleNamespace(util=finder))
    assert "pip install libtpu" in topology.missing_compiler("tpu")
    with pytest.raises(RuntimeError, match="pip install jax-cuda13-plugin"):
        topology.gpu_devices("h100")
