"""The Hopper kernels: values and gradients in Pallas' interpreter, and what the compilers say without a GPU.

In the interpreter copies, barriers and warpgroups are the kernels'; a product on the tensor cores is jnp's.
"""

import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from jaxrl_kernels import gpu_target, hopper
from jaxrl_kernels.flash_attention import gpu_plan, pallas_gpu, reference
from jaxrl_kernels.flash_attention.spec import EVERYTHING, NOTHING, Place, Spec


def packed(*parts):
    return jnp.concatenate([jnp.full((1, count), segment, jnp.int32) for segment, count in parts], axis=1)


def inputs(q_length, kv_length, heads, kv_heads, dim, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 4)
    lengths = (q_length, heads), (kv_length, kv_heads), (kv_length, kv_heads), (q_length, heads)
    return [
        jax.random.normal(key, (1, *size, dim)).astype(dtype) for key, size in zip(keys, lengths, strict=True)
    ]


def close(got, want, tolerance):
    """To a part of the largest value, which NOTHING is not."""
    want = np.float32(want)
    scale = max(np.abs(want[want != NOTHING]).max(), 1.0)
    np.testing.assert_allclose(np.float32(got), want, atol=tolerance * scale, rtol=0)


PACKED = packed((3, 70), (1, 60), (0, 6), (2, 94))
"""Ids out of order, padding in the middle; 230 tokens, no whole tiles of 128."""
CASES = {
    # The last 100 queries of 230 tokens, as if of a ring; two heads share keys; some see nothing.
    "quick": (
        Spec(0.125, softcap=2.0),
        Place(130, 0, 90),
        (100, 230, 2, 1, 64),
        (PACKED[:, 130:], PACKED),
    ),
    "packed": (Spec(96**-0.5), Place(), (230, 230, 2, 1, 96), (PACKED, PACKED)),
    "both directions": (
        Spec(1 / 16, causal=False),
        Place(),
        (200, 130, 1, 1, 256),
        (PACKED[:, :200], PACKED[:, 100:]),
    ),
}
"""Name -> spec, place, (queries, keys, heads, key heads, head dim), segments of both."""


@pytest.fixture
def compiled_once(monkeypatch):
    """The interpreter compiles a kernel's program anew for every warpgroup of every tile; here once."""
    programs, lock = {}, threading.Lock()

    def run(jaxpr, consts, *args):
        with lock:
            if id(jaxpr) not in programs:
                program = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args))
                programs[id(jaxpr)] = jaxpr, program.lower(consts, *args).compile()
        programs[id(jaxpr)][1](consts, *args)

    monkeypatch.setattr(thread_map, "_run_jaxpr", run)


@pytest.mark.parametrize(
    "name", ["quick", *(pytest.param(name, marks=pytest.mark.slow) for name in ("packed", "both directions"))]
)
def test_values_and_gradients_are_those_of_the_definition(name, compiled_once):
    spec, place, shape, segments = CASES[name]
    q, k, v, d_out = inputs(*shape)
    place = jax.tree.map(jnp.int32, place)  # traced: one compilation serves every place
    d_lse = jax.random.normal(jax.random.key(1), (1, shape[2], shape[0]))
    ours = functools.partial(jax.jit, static_argnums=0, static_argnames="interpret")
    out, lse = ours(pallas_gpu.forward)(spec, q, k, v, *segments, place, interpret=True)
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    definition = functools.partial(jax.jit, static_argnums=0)
    want_out, want_lse = definition(reference.forward)(spec, *exact, *segments, place)
    assert not interpret_pallas_call.get_races().races_found
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    close(out, want_out, 0.01)
    close(lse, want_lse, 1e-3)
    blind = np.asarray(want_lse)[0, 0] == NOTHING
    assert (
        blind.any()
        and not np.asarray(out)[0, blind].any()
        and (np.asarray(lse)[0, :, blind] == NOTHING).all()
    )

    got = ours(pallas_gpu.backward)(spec, q, k, v, *segments, place, out, lse, d_out, d_lse, interpret=True)
    want = definition(reference.backward)(spec, *exact, *segments, place, want_out, want_lse, d_out, d_lse)
    for x, y in zip(got, want, strict=True):
        close(x, y, 0.02)
    assert not interpret_pallas_call.get_races().races_found


def test_blocks_a_tile_reads():
    """512 tokens, the first 256 one segment: tiles of 128 queries against blocks of 64 keys."""
    segments = packed((1, 256), (2, 200), (0, 56))
    find = functools.partial(gpu_plan.walks, Spec(1.0), Place(), segments, segments)
    find = jax.jit(find, static_argnums=(0, 1), static_argnames="of_keys")
    walks = np.asarray(find(128, 64, of_keys=False))[0].tolist()  # first, [first full, end full), end
    assert walks == [[0, 0, 0, 2], [0, 0, 2, 4], [4, 4, 4, 6], [4, 4, 4, 8]]
    of_keys = np.asarray(find(64, 128, of_keys=True))[0].tolist()
    assert of_keys == [[0, 2, 4, 4], [2, 2, 2, 4], [4, 6, 7, 8], [6, 6, 6, 8]]
    walk = gpu_plan.Walk(*jnp.array([2, 4, 7, 9]))  # 2, 3 and 7, 8 hide something
    assert int(walk.masked) == 4 and [int(walk.block(jnp.int32(i))) for i in range(7)] == [
        2,
        3,
        7,
        8,
        4,
        5,
        6,
    ]


def test_a_window_leaves_blocks_out_and_nothing_visible_reads_one():
    ones = jnp.ones((1, 512), jnp.int32)
    find = functools.partial(gpu_plan.walks, Spec(1.0), q_segments=ones, kv_segments=ones, of_keys=False)
    find = jax.jit(find, static_argnames=("q_block", "kv_block"))
    walks = np.asarray(find(place=Place(window=130), q_block=128, kv_block=64))[0].tolist()
    assert walks[3] == [3, 3, 3, 8]  # keys 255 to 511; no block is seen whole by all 128 queries
    walks = np.asarray(find(place=Place(0, 512, EVERYTHING), q_block=128, kv_block=64))[0].tolist()
    assert walks == [[0, 0, 0, 1]] * 4


def test_bad_input_is_named():
    q = k = v = jnp.zeros((1, 16, 1, 64))
    ones = jnp.ones((1, 16), jnp.int32)
    with pytest.raises(ValueError, match="bfloat16 and float16, not float32; take another implementation"):
        pallas_gpu.forward(Spec(1.0), q, k, v, ones, ones, Place())
    assert "head_dim 320 is over 256" in pallas_gpu.unsupported(320, jnp.bfloat16)
    assert pallas_gpu.unsupported(256, jnp.float16) is None
    q = k = v = jnp.zeros((1, 16, 1, 256), jnp.bfloat16)
    big = pallas_gpu.Blocks(128, 64, 64)
    with pytest.raises(
        ValueError, match=r"head_dim 256: two blocks of 128 rows .* lengths that fit: \[32, 64\]"
    ):
        pallas_gpu.forward(Spec(1.0), q, k, v, ones, ones, Place(), blocks=big)


def test_stages_are_as_many_as_fit():
    assert hopper.stages_that_fit("x", 64, 0, 512) == 4  # at most
    assert hopper.stages_that_fit("x", 128, 90_000, 512) == 2  # 138,352 bytes for 65,536 each
    with pytest.raises(ValueError, match=r"48 rows .* lengths that fit: \[32, 64, 128\]"):
        hopper.stages_that_fit("x", 48, 0, 512)


def program(dim, dtype=jnp.bfloat16, softcap=None, sharding=None):
    """(forward and backward of two layers' worth of traced scalars, its abstract arguments)."""
    spec = Spec(dim**-0.5, softcap=softcap)

    def both(q, k, v, segments, place, d_out):
        out, lse = pallas_gpu.forward(spec, q, k, v, segments, segments, Place(*place))
        return pallas_gpu.backward(spec, q, k, v, segments, segments, Place(*place), out, lse, d_out)

    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    q, kv = array((2, 1024, 4, dim), dtype), array((2, 1024, 2, dim), dtype)
    return both, (q, kv, kv, array((2, 1024), jnp.int32), array((3,), jnp.int32), q)


@pytest.mark.parametrize("dim, dtype, softcap", [(96, jnp.float16, None), (256, jnp.bfloat16, 30.0)])
def test_lowers_for_cuda_without_one(dim, dtype, softcap):
    both, args = program(dim, dtype, softcap)
    text = jax.jit(both).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2 + len(gpu_plan.passes(dim))  # forward, dq


@pytest.mark.parametrize("divided", [True, False])
def test_blocks_are_what_the_registers_hold(divided, monkeypatch):
    """Sums, scores and weights: of 232 registers a lane beside a warpgroup that copies, or of 168."""
    monkeypatch.setattr(gpu_plan, "registers_divided", lambda: divided)
    for dim in (64, 96, 128):
        forward, _, dkv = gpu_plan.default_blocks(dim)
        most = 232 if divided else 168
        sums, scores, weights = dim // 2, forward // 2, forward // 4  # of 64 rows, over 128 lanes; 16 bits
        assert sums + scores + weights <= most - 32  # for statistics and indices
        assert len(gpu_plan.passes(dim)[0]) * sums + 2 * dkv // 2 <= most - 32
    assert gpu_plan.default_blocks(256) == (64, 32, 32) and len(gpu_plan.passes(256)) == 2


@pytest.mark.compilers
@pytest.mark.parametrize("dim, softcap", [(64, None), (96, None), (128, None), (128, 30.0), (256, None)])
def test_compiles_for_an_h100_that_is_not_here(dim, softcap, monkeypatch, capfd):
    if why := gpu_target.unavailable():
        pytest.skip(why)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    devices = np.array(gpu_target.gpu_topology("h100").devices)
    mesh = jax.sharding.Mesh(devices, ("x",))
    both, args = program(
        dim, softcap=softcap, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(both).trace(*args).lower(lowering_platforms=("cuda",)).compile()
    gradients = 2 * 1024 * (4 + 2 + 2) * dim
    assert compiled.memory_analysis().output_size_in_bytes == 2 * gradients + 3 * 8  # and three pointers
    said = capfd.readouterr().out
    assert said.count("Compiling entry function") == 2 + len(gpu_plan.passes(dim))
    assert gpu_plan.registers_divided() == ("C7504" not in said), "whether set_max_registers is heeded"
    assert dim > 128 or "C7512" not in said, "products run in turn, for want of registers"


def test_targets_are_named(monkeypatch):
    with pytest.raises(ValueError, match="no GPU kind 'a100': one of h100, h200"):
        gpu_target.gpu_topology("a100")
    finder = types.SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(gpu_target, "importlib", types.SimpleNamespace(util=finder))
    with pytest.raises(RuntimeError, match="pip install jax-cuda13-plugin"):
        gpu_target.gpu_topology("h100")
