"""Every implementation against the dense definition: values, gradients, sizes that no tile divides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from jaxrl_kernels.linear_logprob import pallas_gpu, pallas_tpu, reference, shapes
from jaxrl_kernels.linear_logprob.api import choose, linear_logprob
from jaxrl_kernels.linear_logprob.bench import measure
from jaxrl_kernels.linear_logprob.reference import Spec
from jaxrl_kernels.linear_logprob.shapes import Tiles


def inputs(tokens=200, vocab=300, dim=200, dtype=jnp.float32):
    """Targets in other parts of the head too: below 0 and from `vocab` on."""
    keys = jax.random.split(jax.random.key(0), 5)
    hidden = jax.random.normal(keys[0], (tokens, dim), dtype)
    head = (jax.random.normal(keys[1], (vocab, dim)) / 8).astype(dtype)
    targets = jax.random.randint(keys[2], (tokens,), -20, vocab + 20)
    return hidden, head, targets, *jax.random.normal(keys[3], (2, tokens))


def close(got, wanted, dtype=jnp.float32):
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    assert got.dtype == wanted.dtype
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


def jitted(function, **settings):
    return jax.jit(functools.partial(function, **settings), static_argnums=0)


SMALL = {"tiles": Tiles(128, 128, 128), "interpret": True}
dense, dense_slope = jitted(reference.forward), jitted(reference.d_logits)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(Spec(), jnp.float32), (Spec(0.7, 2.0), jnp.bfloat16)],
    ids=["plain", "capped, bfloat16"],
)
def test_the_tpu_kernels_equal_the_reference(spec, dtype):
    """Two tiles of tokens, three of the vocabulary, two of the depth; no tile divides a size."""
    hidden, head, targets, d_logprob, d_entropy = inputs(dtype=dtype)
    wanted = dense(spec, hidden, head, targets)
    got = jitted(pallas_tpu.forward, **SMALL)(spec, hidden, head, targets, targets.size)
    jax.tree.map(close, got, wanted)
    columns = wanted[2] + 0.3, wanted[1], d_logprob, d_entropy  # of a larger head
    slope = jitted(pallas_tpu.d_logits, **SMALL)(spec, hidden, head, targets, *columns)
    close(slope, dense_slope(spec, hidden, head, targets, *columns), dtype)


def test_the_tpu_kernel_leaves_out_tiles_of_tokens_that_are_not_wanted():
    hidden, head, targets, *_ = inputs(tokens=300)
    hidden = hidden.at[128:].set(jnp.nan)
    wanted = dense(Spec(), hidden[:100], head, targets[:100])
    got = jitted(pallas_tpu.forward, **SMALL)(Spec(), hidden, head, targets, jnp.int32(100))
    jax.tree.map(lambda x, y: close(x[:100], y), got, wanted)


def test_the_hopper_kernels_equal_the_reference_and_do_not_race():
    """Two tiles of tokens, two of the vocabulary that overlap, two steps of the depth; a third tile of tokens
    is not wanted."""
    spec = Spec(0.7, 2.0)
    hidden, head, targets, *weights = inputs(tokens=290, vocab=300, dim=100, dtype=jnp.bfloat16)
    hidden = hidden.at[256:].set(jnp.nan)
    wanted = dense(spec, hidden, head, targets)
    got = jitted(pallas_gpu.forward, interpret=True)(spec, hidden, head, targets, jnp.int32(250))
    jax.tree.map(lambda x, y: close(x[:250], y[:250]), got, wanted)
    columns = [x[:140] for x in (wanted[2] + 0.3, wanted[1], *weights)]
    slope = jitted(pallas_gpu.d_logits, interpret=True)(spec, hidden[:140], head, targets[:140], *columns)
    close(slope, dense_slope(spec, hidden[:140], head, targets[:140], *columns), jnp.bfloat16)
    assert not interpret_pallas_call.get_races().races_found


def test_a_kernel_through_the_api(monkeypatch):
    """Values and gradients, with a mask, of several pieces of the backward pass."""
    for name in ("forward", "d_logits"):
        monkeypatch.setattr(pallas_tpu, name, functools.partial(getattr(pallas_tpu, name), **SMALL))
    hidden, head, _, weights, _ = inputs(tokens=390, vocab=70, dim=40)
    hidden, weights = hidden.reshape(3, 130, 40), weights.reshape(3, 130)
    targets = jax.random.randint(jax.random.key(5), (3, 130), 0, 70)
    mask = jnp.ones((3, 130)).at[1, 100:].set(0).at[2].set(0)

    def total(hidden, head, name):
        settings = {"temperature": 1.3, "softcap": 3.0, "with_entropy": False, "implementation": name}
        found, entropy = linear_logprob(hidden, head, targets, mask, **settings)
        assert entropy is None
        return jnp.sum(weights * found), found

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True), static_argnums=2)
    jax.tree.map(close, run(hidden, head, "pallas_tpu"), run(hidden, head, "reference"))


def test_the_parts_of_a_head_together_say_what_the_whole_says():
    """Logits up to 40 apart, so that a part may have next to no mass."""
    hidden, head, targets, *_ = inputs(vocab=300)
    hidden, targets = 3 * hidden, jnp.clip(targets, 0, 299)
    own = targets - jnp.arange(0, 300, 60)[:, None]

    @jax.jit
    @functools.partial(jax.vmap, axis_name="parts")
    def in_parts(head, own):
        found = reference.forward(Spec(), hidden, head, own)
        return reference.merge(found, (own >= 0) & (own < 60), "parts")

    wanted = dense(Spec(), hidden, head, targets)
    for got, one in zip(in_parts(head.reshape(5, 60, -1), own), wanted, strict=True):
        np.testing.assert_allclose(got, jnp.broadcast_to(one, got.shape), rtol=2e-5, atol=1e-5)


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


def test_what_is_chosen_and_why():
    assert choose(64, jnp.float32) == ("chunked", "cpu: plain JAX, there are no kernels for it")
    assert choose(64, jnp.float32, "reference") == ("reference", "asked for")
    with pytest.raises(
        ValueError, match="no implementation 'fast'; known: auto, reference, chunked, pallas_tpu"
    ):
        choose(64, jnp.float32, "fast")
    with pytest.raises(ValueError, match=r"pallas_tpu takes bfloat16 and float32, not float16.*'chunked'"):
        choose(64, jnp.float16, "pallas_tpu")


def test_tiles_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match=r"needs .* MiB of vector memory, v4 has 16; Tiles\(.*\) fits"):
        shapes.check("v4", Tiles(2048, 2048, 512), 2)
    for chip in shapes.VMEM:
        for size in (2, 4):
            assert shapes.tiles(chip, 16384, 151936, 4096, size).depth <= 512


def test_bench_counts_the_work():
    """6 M D V FLOPs a step, 2 of them forward; 8 done."""
    found = measure("auto", 64, 16, 100, "float32", repeat=1)
    assert found["implementation"] == "chunked"
    np.testing.assert_allclose(found["forward_tflops"] * found["forward_s"], 2e-12 * 64 * 16 * 100)
    np.testing.assert_allclose(found["tflops"] * found["step_s"], 6e-12 * 64 * 16 * 100)
    np.testing.assert_allclose(found["tflops_done"] * found["step_s"], 8e-12 * 64 * 16 * 100)
