"""Gradients of bfloat16 weights that many tokens read are float32 sums, whatever the mesh and the split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels.linear_divergence.chunked import linear_divergence
from jaxrl_llm.models.experts import dispatch as experts
from jaxrl_llm.models.experts.weights import ExpertWeights, add_bias
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN, look_up, put_rows, sharding_for

COUNTS = {1: 1, 2: 64, 3: 512, 4: 4096}
"""Occurrences of each token among 8 x 640."""
MESHES = {
    "one": None,
    "fsdp=8": MeshConfig(fsdp=8),
    "data=2 fsdp=2 tensor=2": MeshConfig(data=2, fsdp=2, tensor=2),
    "sequence=2 tensor=4": MeshConfig(fsdp=1, sequence=2, tensor=4),
    "expert=4 tensor=2": MeshConfig(fsdp=1, expert=4, tensor=2),
}


@functools.cache
def rows():
    """Tokens [8, 640], their bfloat16 gradients, which are no zeros on average, and the right sums."""
    rng = np.random.default_rng(0)
    counted = np.repeat(list(COUNTS), list(COUNTS.values()))
    tokens = np.concatenate([counted, rng.integers(5, 64, 8 * 640 - len(counted))])
    tokens = rng.permutation(tokens).reshape(8, 640).astype(np.int32)
    gradient = np.asarray(jnp.asarray(rng.normal(0.5, 1, (8, 640, 32)), jnp.bfloat16))
    sums = np.zeros((64, 32))
    np.add.at(sums, tokens, gradient.astype(np.float64))
    return tokens, gradient, sums


@jax.jit
def gradient_of_lookup(table, tokens, gradient):
    return jax.vjp(lambda table: look_up(table, tokens, jnp.bfloat16), table)[1](gradient)[0]


@pytest.mark.parametrize("mesh_config", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("parts", [1, 8])
def test_the_gradient_of_the_embedding_is_a_float32_sum(mesh_config, parts):
    tokens, gradient, sums = rows()
    table = np.zeros((64, 32), np.float32)
    mesh = make_mesh(mesh_config or MeshConfig(fsdp=1), None if mesh_config else jax.devices()[:1])
    place = sharding_for(mesh, ("vocab", "table_embed"), table.shape, TRAIN)
    cut = lambda x: x.reshape(parts, 8, -1, *x.shape[2:])
    with jax.set_mesh(mesh):
        table = jax.device_put(table, place)
        batches = [put_rows(mesh, batch) for batch in zip(cut(tokens), cut(gradient), strict=True)]
        found = [gradient_of_lookup(table, *batch) for batch in batches]
    assert {x.dtype for x in found} == {jnp.dtype("float32")}
    assert all(x.sharding.is_equivalent_to(place, 2) for x in found)
    np.testing.assert_allclose(sum(map(np.asarray, found)), sums, rtol=2e-6, atol=2e-4)


def test_rows_are_those_of_the_rounded_table():
    table = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    tokens, *_ = rows()
    found = jax.jit(look_up, static_argnums=2)(table, tokens, jnp.bfloat16)
    assert jnp.array_equal(found, jnp.asarray(table, jnp.bfloat16)[tokens])


def test_the_gradient_of_a_bias_is_a_float32_sum():
    """It is rounded once, when the sum is there: by at most 2^-9."""
    _, gradient, _ = rows()
    zeros = jnp.zeros(gradient.shape, jnp.bfloat16)
    found = jax.jit(lambda bias: jax.vjp(functools.partial(add_bias, zeros), bias)[1](gradient)[0])(
        zeros[0, 0]
    )
    assert found.dtype == jnp.bfloat16
    right = gradient.astype(np.float64).sum(axis=(0, 1))
    np.testing.assert_allclose(found.astype(jnp.float32), right, rtol=2**-8)


@pytest.mark.parametrize("kernel", ["tiled", "ragged_dot"])
def test_gradients_of_experts_biases_are_float32_sums(kernel, monkeypatch):
    """All tokens choose expert 1 of 2: the bias of its output is read 5,120 times."""
    monkeypatch.setattr(experts, "choose", lambda *_: (kernel, ""))
    _, gradient, _ = rows()
    zeros = lambda *shape: jnp.zeros(shape, jnp.bfloat16)
    h, chosen = zeros(8, 640, 32), jnp.ones((8, 640, 1), jnp.int32)
    weights = jnp.ones((8, 640, 1), jnp.float32)

    @jax.jit
    def biases(gate, down):
        matrices = zeros(2, 32, 16), zeros(2, 32, 16), zeros(2, 16, 32) + 1
        weights_of = ExpertWeights(*matrices, gate, zeros(2, 16) + 1, down)
        return experts.grouped_experts(h, chosen, weights, weights_of, gated=lambda gate, up: gate * up)

    found = jax.vjp(biases, zeros(2, 16), zeros(2, 32))[1](jnp.asarray(gradient, jnp.float32))
    sums = gradient.astype(np.float64).sum(axis=(0, 1))
    for of_bias, right, roundings in zip(found, (sums.sum(), sums), (3, 1), strict=True):
        got = np.asarray(of_bias.astype(jnp.float32))
        assert not got[0].any()
        np.testing.assert_allclose(got[1], np.broadcast_to(right, got[1].shape), rtol=roundings * 2**-8)


def test_the_gradient_of_a_divergence_is_summed_over_chunks_in_float32():
    """512 chunks of 8 tokens, and one of all."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(0.5, 1, shape), jnp.bfloat16)
    student, teacher, head, teacher_head = draw(1, 4096, 8), draw(1, 4096, 8), draw(16, 8), draw(16, 8)

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(head, chunk):
        loss = lambda head: jnp.sum(linear_divergence(student, head, teacher, teacher_head, chunk=chunk))
        return jax.grad(loss)(head).astype(jnp.float32)

    whole, parts = np.asarray(gradient(head, 4096)), np.asarray(gradient(head, 8))
    assert np.linalg.norm(parts - whole) < 2**-8 * np.linalg.norm(whole)
