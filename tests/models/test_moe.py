"""Experts: routing by hand, dispatch over every mesh, padding, strict mode, decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora_models import merged, with_random_adapters

from jaxrl_llm import models
from jaxrl_llm.models import LoraConfig, TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.decode import decode_ring, decode_shardings, decode_weights, init_ring_cache
from jaxrl_llm.models.moe import choose_experts, expert_weights
from jaxrl_llm.sharding.experts import AdaptedMatrices, grouped_experts
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, TRAIN, put_rows

CONFIG = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, moe=MoEConfig(num_experts=8, experts_per_token=3, expert_size=16),
)  # fmt: skip
MESHES = [
    MeshConfig(fsdp=2, expert=2, tensor=2),
    MeshConfig(fsdp=1, expert=8),
    MeshConfig(fsdp=2, expert=2, sequence=2),
    MeshConfig(data=2, fsdp=4),
]


def test_routing_by_hand():
    """Logits 0, log 2, log 4, log 4: of the largest two equal ones both; probabilities 4/11 each."""
    logits = jnp.log(jnp.array([[[1.0, 2, 4, 4], [4, 4, 4, 1]]]))
    moe = MoEConfig(4, 2, 8)
    chosen = choose_experts(moe, logits)
    np.testing.assert_array_equal(chosen, [[[2, 3], [0, 1]]])  # of equal ones the lower numbers
    np.testing.assert_allclose(expert_weights(moe, logits, chosen), np.full((1, 2, 2), 0.5), rtol=1e-6)
    plain = MoEConfig(4, 2, 8, normalize=False)
    np.testing.assert_allclose(
        expert_weights(plain, logits, chosen), [[[4 / 11] * 2, [4 / 13] * 2]], rtol=1e-6
    )


def test_grouped_products_equal_a_loop_over_experts():
    """Assignments to no expert, and to experts of other devices, add nothing."""
    rng = np.random.default_rng(0)
    h = rng.normal(size=(2, 5, 4)).astype(np.float32)
    gate, up = (rng.normal(size=(3, 4, 6)).astype(np.float32) for _ in range(2))
    down = rng.normal(size=(3, 6, 4)).astype(np.float32)
    chosen = rng.integers(-1, 5, (2, 5, 2))
    weights = rng.uniform(size=(2, 5, 2)).astype(np.float32)
    h_, chosen_, weights_, *matrices = map(jnp.asarray, (h, chosen, weights, gate, up, down))
    out = grouped_experts(h_, chosen_, weights_, tuple(matrices), jnp.tanh)
    expected = np.zeros((2, 5, 4))
    for b, t, k in np.ndindex(2, 5, 2):
        if 0 <= (x := chosen[b, t, k]) < 3:
            hidden = np.tanh(h[b, t] @ gate[x]) * (h[b, t] @ up[x])
            expected[b, t] += weights[b, t, k] * (hidden @ down[x])
    np.testing.assert_allclose(out, expected, atol=1e-5)


@functools.cache
def params():
    return models.init(CONFIG, jax.random.key(0))


def rows(garbage=0):
    """8 rows of 16 tokens: trajectories of 7 and 5 tokens, then padding."""
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16), np.int32)
    tokens[:, 12:] = garbage
    positions = np.concatenate([np.arange(7), np.arange(5), np.zeros(4)]).astype(np.int32)
    segments = np.repeat([1, 2, 0], [7, 5, 4]).astype(np.int32)
    return tokens, np.tile(positions, (8, 1)), np.tile(segments, (8, 1))


@functools.partial(jax.jit, static_argnames="strict")
def loss_and_gradient(params, *row, strict=False):
    def loss(params):
        hidden = params(*row, strict=strict)
        return jnp.sum(jnp.where(row[2][..., None] > 0, jnp.sin(hidden @ params.head.T), 0)) / 100

    return jax.value_and_grad(loss)(params)


@functools.cache
def adapted():
    """With adapters: rank 6 of attention, 6 / 3 of experts."""
    return with_random_adapters(params(), LoraConfig(rank=6, alpha=4.0))


@functools.cache
def on_one_device(of=params):
    return jax.device_get(loss_and_gradient(of(), *rows()))


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + 1e-8, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "mesh_config"),
    [*((params, mesh) for mesh in MESHES), (adapted, MESHES[0]), (adapted, MESHES[3])],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_every_mesh_gives_the_gradient_of_one_device(of, mesh_config):
    mesh = make_mesh(mesh_config)
    sharded = jax.device_put(of(), models.shardings(of().config, mesh, TRAIN))
    with jax.set_mesh(mesh):
        got = loss_and_gradient(sharded, *put_rows(mesh, rows()))
    assert_close(got, on_one_device(of))


def test_padding_passes_no_expert():
    assert_close(loss_and_gradient(params(), *rows(garbage=63)), on_one_device())


def test_adapters_of_experts_by_hand():
    """(x W + 0.5 x A B) of the expert, with A = [1, 2]^T and B = [10, 20]: x A = 5 of x = [1, 2]."""
    weight, a, b = jnp.zeros((2, 2, 2)), jnp.array([[[1.0], [2]]] * 2), jnp.array([[[10.0, 20]], [[0, 0]]])
    up = AdaptedMatrices(weight.at[0].set(jnp.eye(2)), a, b, 0.5)
    ones = jnp.ones((2, 2, 2))
    chosen, weights = jnp.array([[[0], [1]]]), jnp.ones((1, 2, 1))
    out = grouped_experts(jnp.array([[[1.0, 2], [1, 2]]]), chosen, weights, (ones, up, ones), jnp.ones_like)
    np.testing.assert_allclose(out, [[[1 + 25 + 2 + 50] * 2, [0, 0]]])


@pytest.mark.slow
def test_adapters_equal_merged_weights_and_the_strict_pass():
    expected = np.asarray(params_forward(merged(adapted()), *rows()))[:, :12]
    assert np.abs(expected - params_forward(params(), *rows())[:, :12]).max() > 0.1
    for strict in (False, True):
        got = params_forward(adapted(), *rows(), strict=strict)
        np.testing.assert_allclose(got[:, :12], expected, atol=2e-5)
    assert_close(loss_and_gradient(adapted(), *rows(), strict=True), on_one_device(adapted))


@functools.partial(jax.jit, static_argnames="strict")
def params_forward(params, *row, strict=False):
    return params(*row, strict=strict)


def test_strict_has_the_plain_gradient_and_the_bits_of_any_batch():
    assert_close(loss_and_gradient(params(), *rows(), strict=True), on_one_device())
    forward = jax.jit(lambda *row: params()(*row, strict=True))
    whole, alone = forward(*rows()), forward(*(x[:1] for x in rows()))
    np.testing.assert_array_equal(whole[:1, :12], alone[:, :12])


@pytest.mark.parametrize("mesh_config", [None, MeshConfig(fsdp=2, expert=2, tensor=2)], ids=str)
def test_decoding_gives_the_hidden_states_of_the_forward_pass(mesh_config):
    """The rollout's copy divides the experts over fsdp and expert."""
    tokens = rows()[0][:, :6]
    positions = np.tile(np.arange(6), (8, 1))
    expected = params()(jnp.asarray(tokens), jnp.asarray(positions))
    mesh = make_mesh(mesh_config or MeshConfig(fsdp=1), jax.devices()[: 8 if mesh_config else 1])
    trained = jax.device_put(params(), models.shardings(CONFIG, mesh, TRAIN))
    with jax.set_mesh(mesh):
        shardings = decode_shardings(CONFIG, mesh, ROLLOUT)
        weights = jax.jit(lambda p: decode_weights(p, jnp.float32), out_shardings=shardings)(trained)
        if mesh_config:
            assert weights.layers[0].expert_gate[...].sharding.shard_shape((8, 32, 16)) == (2, 32, 8)
        cache, step = (
            init_ring_cache(CONFIG, 8, 6, jnp.float32),
            jax.jit(functools.partial(decode_ring, CONFIG)),
        )
        for t in range(6):
            hidden, cache = step(weights, cache, tokens[:, t], positions[:, t])
            np.testing.assert_allclose(hidden, expected[:, t], atol=2e-5)
