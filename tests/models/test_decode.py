"""Prefill and ring decode compute what the training forward computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.models import decode
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, TRAIN

TINY = models.TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.2,
)  # fmt: skip
VARIANTS = {
    "qwen3": TINY,
    "window, biases, untied": dataclasses.replace(
        TINY,
        sliding_window=3,
        window_layers=(True, False),
        qkv_bias=True,
        qk_norm=False,
        tie_embeddings=False,
    ),
    "deep enough to be scanned": dataclasses.replace(
        TINY,
        num_layers=decode.UNROLLED + 1,
        sliding_window=3,
        window_layers=(True, False) * (decode.UNROLLED // 2) + (True,),
    ),
    "soft caps": dataclasses.replace(TINY, attention_softcap=2.0, logit_softcap=3.0),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_token_through_the_ring_equals_one_forward(config):
    """The ring is shorter than the number of tokens that pass through it."""
    params = models.init(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 64)
    hidden = params(tokens, jnp.broadcast_to(jnp.arange(7), (2, 7)))
    expected = jnp.einsum("btd,vd->btv", hidden, params.head)
    if config.logit_softcap:
        expected = config.logit_softcap * jnp.tanh(expected / config.logit_softcap)
    weights = decode.decode_weights(params, jnp.float32)
    cache = decode.ring_cache(config, 2, 8, jnp.float32)._replace(cursor=jnp.int32(5))
    step = jax.jit(lambda cache, token, position: decode.decode(config, weights, cache, token, position))
    for t in range(7):
        hidden, cache = step(cache, tokens[:, t], jnp.full(2, t))
        logits = decode.logits(config, weights, hidden)
        np.testing.assert_allclose(logits, expected[:, t], atol=2e-5)
    assert int(cache.cursor) == (5 + 7) % 8


@pytest.mark.parametrize("config", list(VARIANTS.values())[:3], ids=list(VARIANTS)[:3])
def test_prefill_writes_what_decode_would_have_written(config):
    params = models.init(config, jax.random.key(0))
    weights = decode.decode_weights(params, jnp.float32)
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 64)
    ks, vs = jax.jit(decode.prefill, static_argnums=0)(config, weights, tokens, jnp.array([6, 2]))
    step = jax.jit(lambda cache, token, position: decode.decode(config, weights, cache, token, position)[1])
    for row, length in ((0, 6), (1, 2)):
        cache = decode.ring_cache(config, 1, length, jnp.float32)
        for t in range(length):
            cache = step(cache, tokens[row, 6 - length + t :][:1], jnp.array([t]))
        for k, v, expected_k, expected_v in zip(ks, vs, cache.k, cache.v, strict=True):
            got_k, got_v = k[..., row, :, :, 6 - length :], v[..., row, :, 6 - length :, :]
            np.testing.assert_allclose(got_k, expected_k[..., 0, :, :, :], atol=2e-5)
            np.testing.assert_allclose(got_v, expected_v[..., 0, :, :, :], atol=2e-5)


def test_weights_are_a_copy_and_norms_keep_their_type():
    params = models.init(TINY, jax.random.key(0))
    weights = jax.jit(lambda p: decode.decode_weights(p, jnp.bfloat16))(params)
    assert weights.embed.dtype == jnp.bfloat16 and weights.layers[1].q[...].dtype == jnp.bfloat16
    assert weights.norm.dtype == weights.layers[0].q_norm[...].dtype == jnp.float32
    same = jax.jit(lambda p: decode.decode_weights(p, jnp.float32))(params)
    jax.tree.map(lambda w: w.delete(), params)
    assert np.isfinite(np.asarray(same.embed)).all() and same.norm.sum() == 32


def test_stacked_weights_travel_layer_by_layer_to_the_same_place(monkeypatch):
    """From the trainer's layout to that of rollout on 2 x 2 x 2 devices, layers in one array."""
    monkeypatch.setattr(decode, "UNROLLED", 1)
    mesh = make_mesh(MeshConfig(2, 2, 2), jax.devices()[:8])
    params = models.init(TINY, jax.random.key(0))
    there = decode.decode_shardings(TINY, mesh, ROLLOUT)
    moved = jax.device_put(params, models.shardings(TINY, mesh, TRAIN))
    publish = jax.jit(lambda p: decode.decode_weights(p, jnp.bfloat16, there), out_shardings=there)
    with jax.set_mesh(mesh):
        found, text = publish(moved), publish.lower(moved).as_text()
    jax.tree.map(np.testing.assert_array_equal, found, decode.decode_weights(params, jnp.bfloat16))
    assert jax.tree.all(jax.tree.map(lambda x, where: x.sharding == where, found, there))
    assert "stablehlo.while" in text


@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_the_program_does_not_grow_with_depth(program):
    """As many operations for 32 layers as for 16."""

    def size(num_layers):
        c = dataclasses.replace(TINY, num_layers=num_layers)
        weights = jax.eval_shape(lambda p: decode.decode_weights(p, jnp.float32), models.abstract(c))
        if program == "prefill":
            lowered = jax.jit(decode.prefill, static_argnums=0).lower(
                c, weights, jnp.zeros((2, 6), jnp.int32), jnp.array([6, 2])
            )
        else:
            cache = jax.eval_shape(lambda: decode.ring_cache(c, 2, 8, jnp.float32))
            ints = jnp.zeros(2, jnp.int32)
            lowered = jax.jit(decode.decode, static_argnums=0).lower(c, weights, cache, ints, ints)
        return len(lowered.as_text().splitlines())

    assert size(16) == size(32) < size(decode.UNROLLED)


def test_the_embedding_is_looked_up_where_it_lies():
    """Eight devices, the vocabulary over tensor: the table is not gathered, the numbers are those of one."""
    params = models.init(TINY, jax.random.key(0))
    weights = decode.decode_weights(params, jnp.float32)
    tokens, positions = jnp.arange(8), jnp.zeros(8, jnp.int32)
    cache = decode.ring_cache(TINY, 8, 8, jnp.float32)
    step = jax.jit(lambda *args: decode.decode(TINY, *args)[0])
    expected = step(weights, cache, tokens, positions)
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    with jax.set_mesh(mesh):
        divided = jax.device_put(weights, decode.decode_shardings(TINY, mesh, ROLLOUT))
        compiled = step.lower(divided, cache, tokens, positions).compile()
        found = compiled(
            divided, *jax.device_put((cache, tokens, positions), compiled.input_shardings[0][1:])
        )
    assert divided.embed.addressable_shards[0].data.shape == (32, 32)
    gathered = [line for line in compiled.as_text().splitlines() if " all-gather" in line]
    assert not [line for line in gathered if "f32[64,32]" in line]
    np.testing.assert_allclose(found, expected, atol=1e-5)
