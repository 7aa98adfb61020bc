"""The kernels of log-probs: values, gradients, sizes that no tile divides, shards of the vocabulary."""

import functools

import jax
import jax.numpy as jnp
import kernel_oracles as oracles
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from kernel_oracles import assert_close

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import TPUS
from jaxrl_kernels.linear_logprob import pallas_gpu, pallas_tpu, reference, shapes
from jaxrl_kernels.linear_logprob.api import linear_logprob
from jaxrl_kernels.linear_logprob.bench import measure
from jaxrl_kernels.linear_logprob.reference import LogprobSpec
from jaxrl_kernels.linear_logprob.shapes import Tiles

FAST = {"xla_backend_optimization_level": 0}  # of compilation


def inputs(tokens=200, vocab=300, dim=200, dtype=jnp.float32):
    """Targets in other shards of the head too: below 0 and from `vocab` on."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(tokens, dim)).astype(dtype)
    head = (rng.normal(size=(vocab, dim)) / 8).astype(dtype)
    targets = rng.integers(-20, vocab + 20, tokens).astype(np.int32)
    return hidden, head, targets, *rng.normal(size=(2, tokens)).astype(np.float32)


def jitted(function, **settings):
    return jax.jit(functools.partial(function, **settings), static_argnums=0, compiler_options=FAST)


SMALL = {"tiles": Tiles(128, 128, 128), "interpret": True}
dense, dense_d_logits = jitted(reference.forward), jitted(reference.d_logits)


def close(got, wanted, dtype=jnp.float32):
    assert got.dtype == wanted.dtype
    assert_close(got, np.asarray(wanted).astype(np.float32), dtype)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(LogprobSpec(), jnp.float32), (LogprobSpec(0.7, 2.0), jnp.bfloat16)],
    ids=["plain", "capped, bfloat16"],
)
def test_the_tpu_kernels_equal_the_reference(spec, dtype):
    """Two tiles of tokens, three of the vocabulary, two of the depth; no tile divides a size."""
    hidden, head, targets, d_logprob, d_entropy = inputs(dtype=dtype)
    wanted = dense(spec, hidden, head, targets)
    run = jitted(pallas_tpu.forward, **SMALL)
    jax.tree.map(close, run(spec, hidden, head, targets, np.int32(targets.size)), wanted)
    logprob, entropy = oracles.logprob(
        hidden, head, targets, temperature=spec.temperature, softcap=spec.softcap
    )
    assert_close(wanted[0], logprob, dtype)
    assert_close(wanted[1], entropy, dtype)
    columns = wanted[2] + 0.3, wanted[1], d_logprob, d_entropy  # of a larger head
    d_logits = jitted(pallas_tpu.d_logits, **SMALL)(spec, hidden, head, targets, *columns)
    close(d_logits, dense_d_logits(spec, hidden, head, targets, *columns), dtype)
    if dtype == jnp.float32:  # tiles of tokens that are not in the mask are skipped
        hidden[128:] = np.nan
        got = run(spec, hidden, head, targets, np.int32(100))
        jax.tree.map(lambda x, y: close(x[:100], y[:100]), got, wanted)


def test_the_hopper_kernels_equal_the_reference_and_do_not_race(compile_once):
    """Two tiles of tokens, two of the vocabulary that overlap, two steps of the depth; a third tile of tokens
    is not in the mask."""
    spec = LogprobSpec(0.7, 2.0)
    hidden, head, targets, *weights = inputs(tokens=290, vocab=300, dim=100, dtype=jnp.bfloat16)
    hidden[256:] = np.nan
    wanted = dense(spec, hidden, head, targets)
    got = jitted(pallas_gpu.forward, interpret=True)(spec, hidden, head, targets, np.int32(250))
    jax.tree.map(lambda x, y: close(x[:250], y[:250]), got, wanted)
    columns = [x[:140] for x in (wanted[2] + 0.3, wanted[1], *weights)]
    d_logits = jitted(pallas_gpu.d_logits, interpret=True)(spec, hidden[:140], head, targets[:140], *columns)
    close(d_logits, dense_d_logits(spec, hidden[:140], head, targets[:140], *columns), jnp.bfloat16)
    assert not interpret_pallas_call.get_races().races_found


def test_a_kernel_through_the_api(monkeypatch):
    """Values and gradients, with a mask, in several chunks of the backward pass."""
    for name in ("forward", "d_logits"):
        monkeypatch.setattr(pallas_tpu, name, functools.partial(getattr(pallas_tpu, name), **SMALL))
    hidden, head, _, weights, _ = inputs(tokens=390, vocab=70, dim=40)
    hidden, weights = hidden.reshape(3, 130, 40), weights.reshape(3, 130)
    targets = np.random.default_rng(5).integers(0, 70, (3, 130)).astype(np.int32)
    mask = np.ones((3, 130), np.float32)
    mask[1, 100:], mask[2] = 0, 0

    def total(hidden, head):
        settings = {"temperature": 1.3, "softcap": 3.0, "with_entropy": False}
        found, entropy = linear_logprob(hidden, head, targets, mask, **settings, implementation="pallas_tpu")
        assert entropy is None
        return jnp.sum(weights * found), found

    run = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True), compiler_options=FAST)
    (d_hidden, d_head), found = run(hidden, head)
    logprob, _, *gradients = oracles.logprob(
        hidden, head, targets, temperature=1.3, softcap=3.0, d_logprob=weights * mask
    )
    assert_close(found, logprob * mask)
    jax.tree.map(assert_close, [d_hidden, d_head], gradients)


def test_shards_of_a_head_merge_to_the_outputs_of_the_whole():
    """Logits up to 40 apart, so that a shard may have next to no mass."""
    hidden, head, targets, *_ = inputs(vocab=300)
    hidden, targets = 3 * hidden, np.clip(targets, 0, 299)
    own = targets - np.arange(0, 300, 60, dtype=np.int32)[:, None]

    @functools.partial(jax.jit, compiler_options=FAST)
    @functools.partial(jax.vmap, axis_name="shards")
    def in_shards(head, own):
        outputs = reference.forward(LogprobSpec(), hidden, head, own)
        return reference.merge_shards(outputs, (own >= 0) & (own < 60), "shards")

    hidden = jnp.asarray(hidden)
    merged = in_shards(head.reshape(5, 60, -1), own)
    for got, wanted in zip(merged, oracles.logprob(hidden, head, targets), strict=False):
        assert_close(got, np.broadcast_to(wanted, got.shape))


@pytest.mark.parametrize(
    ("platform", "call"), [("tpu", "tpu_custom_call"), ("cuda", "custom_call @mosaic_gpu")]
)
def test_lowers_for(platform, call):
    """Both passes, of a vocabulary that no tile divides."""
    shapes = ((1, 2048, 1024), jnp.bfloat16), ((50257, 1024), jnp.bfloat16), ((1, 2048), jnp.int32)
    name = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}[platform]
    loss = lambda *x: sum(found.sum() for found in linear_logprob(*x, implementation=name))
    step = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*(jax.ShapeDtypeStruct(*x) for x in shapes))
    assert step.lower(lowering_platforms=(platform,)).as_text().count(call) == 2


def test_the_choice_and_its_reason():
    chosen = functools.partial(dispatch.choose, "linear_logprob", 64)
    assert chosen(jnp.float32) == ("chunked", "cpu: plain JAX, there are no kernels for it")
    assert chosen(jnp.float32, implementation="reference") == ("reference", "requested")
    with pytest.raises(
        ValueError, match="no implementation 'fast'; known: auto, reference, chunked, pallas_tpu"
    ):
        chosen(jnp.float32, implementation="fast")
    with pytest.raises(ValueError, match=r"pallas_tpu: takes bfloat16 and float32, not float16.*'chunked'"):
        chosen(jnp.float16, implementation="pallas_tpu")


def test_tiles_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match=r"needs .* MiB of vector memory, v4 has 16; Tiles\(.*\) fits"):
        shapes.check_vmem("v4", Tiles(2048, 2048, 512), 2)
    for chip in TPUS:
        for size in (2, 4):
            assert shapes.tiles(chip, 16384, 151936, 4096, size).depth <= 512


def test_bench_counts_the_work():
    """6 M D V FLOPs a step, 2 of them forward; 8 done."""
    found = measure("auto", 64, 16, 100, "float32", repeat=1)
    assert found["implementation"] == "chunked"
    np.testing.assert_allclose(found["forward_tflops"] * found["forward_s"], 2e-12 * 64 * 16 * 100)
    np.testing.assert_allclose(found["tflops"] * found["step_s"], 6e-12 * 64 * 16 * 100)
    np.testing.assert_allclose(found["tflops_done"] * found["step_s"], 8e-12 * 64 * 16 * 100)
