"""Rollout on a mesh or devices of its own: the same text, and frozen weights sent once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import with_slow
from small_engine import (
    KEY,
    MODEL,
    VERSION,
    RolloutConfig,
    SamplingConfig,
    assert_same,
    base,
    make_tokenizer,
    params,
    requests,
)

from jaxrl_llm import models
from jaxrl_llm.models.lora import add_adapters, join_params, split_params, with_lora
from jaxrl_llm.models.lora_config import LoraConfig
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.sharding.placement import devices_of, make_mesh
from jaxrl_llm.sharding.rules import TRAIN

CASES = {
    "same devices": ((0, 4), MeshConfig(tensor=2), False),
    "disjoint devices": ((4, 8), MeshConfig(tensor=2), True),
    "some of the policy's": ((1, 3), MeshConfig(), False),
    "more than the policy's": ((0, 8), MeshConfig(data=2, tensor=2), False),
}
SLOW = {"same devices", "some of the policy's", "more than the policy's"}


def trainer_mesh():
    return make_mesh(MeshConfig(data=2), jax.devices()[:4])


def new_engine(model, devices, mesh):
    mesh = make_mesh(mesh, jax.devices()[slice(*devices)])
    return NativeEngine(RolloutConfig(slots=4, chunk=8), model, mesh, make_tokenizer())


@pytest.mark.parametrize("case", with_slow(CASES, SLOW))
def test_any_placement_gives_the_text_of_one_device(case):
    devices, mesh, keeps_weights = CASES[case]
    engine, trainer = new_engine(MODEL, devices, mesh), trainer_mesh()
    weights = jax.device_put(params(), models.shardings(MODEL, trainer, TRAIN))
    with jax.set_mesh(trainer):
        metrics = engine.publish(weights, VERSION)
        assert metrics["rollout/publish_bytes"] == 4 * sum(w.size for w in jax.tree.leaves(weights))
        assert devices_of(engine._published[0]) == set(jax.devices()[slice(*devices)])
        assert_same(engine.generate(requests(), SamplingConfig(), KEY), base())
        engine.release_memory()
    assert (engine._published is not None) == keeps_weights  # kept where nothing trains


def test_frozen_weights_are_sent_once_and_adapters_each_time():
    model = with_lora(MODEL, LoraConfig(rank=2, targets=("q_proj",)))
    trainer, engine = trainer_mesh(), new_engine(model, (4, 8), MeshConfig(tensor=2))
    make = jax.jit(add_adapters, static_argnums=1, out_shardings=models.shardings(model, trainer, TRAIN))
    adapters, base_size = 2 * 32 * 2 + 2 * 2 * 4 * 8, sum(w.size for w in jax.tree.leaves(params()))
    sent = lambda weights: engine.publish(weights, 0)["rollout/publish_bytes"] / 4  # float32
    with jax.set_mesh(trainer):
        weights = make(params(), model, jax.random.key(1))
        assert engine.transfer.bytes_of_version() == 4 * (2 * 32 * 2 + 2 * 2 * 4 * 8 / 2)  # B over tensor
        assert sent(weights) == base_size + adapters  # A [2 layers, 32, 2] and B [2 layers, 2, 4 heads, 8]
        embed = engine._published[0].embed
        trained, frozen = split_params(weights)
        newer = join_params(jax.tree.map(lambda w: w + 1.0, trained), frozen)
        engine.release_memory()
        assert sent(newer) == adapters
        copied = engine._published[0]
        assert copied.embed is embed
        b = jax.device_get(copied.layers[0].q_lora_b[...])
        np.testing.assert_array_equal(b, np.ones((2, 4, 8)))  # of zeros before the step
        assert sent(jax.tree.map(jnp.copy, newer)) == base_size + adapters  # another base, as after a restore
