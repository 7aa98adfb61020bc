"""Dynamic loss scaling of float16: small gradients survive, overflows are skipped and counted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import models
from jaxrl_llm.algos import sft
from jaxrl_llm.builders.describe import turing_warning
from jaxrl_llm.config import ModelConfig, RolloutConfig, TrainConfig
from jaxrl_llm.data.packing import PackItem, pack
from jaxrl_llm.learn.finite import (
    INITIAL_SCALE,
    MAX_SCALE,
    add_gradients,
    initial_loss_scale,
    next_loss_scale,
    scale_loss,
)
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.update import LossArrays, StepConfig, accumulate, apply
from jaxrl_llm.models import TransformerConfig, kernels, lora
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.structs import BatchTotals, TrainState
from jaxrl_llm.tools.models import pick_dtype

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
TOKENS = 1e6
"""Of a mini-batch: the loss gradient of a token is 1e-6 and less."""


def gradients(dtype, scale):
    """The gradient of 24 tokens of a mini-batch of TOKENS."""
    rng = np.random.default_rng(0)
    items = [PackItem(rng.integers(0, 64, 24).astype(np.int32), np.ones(24, np.float32), {})]
    (batch,) = jax.tree.map(jnp.asarray, pack(items, 32, 1))
    trained, frozen = lora.split_params(models.init(MODEL, jax.random.key(0)))
    number = jnp.float32(TOKENS)
    totals = BatchTotals(number, number, jnp.float32(0), loss_scale=scale and jnp.float32(scale))
    config = StepConfig(32, 1, dtype=dtype)
    step = functools.partial(accumulate, algo=sft.Config(), config=config)
    arrays = LossArrays(batch, totals, (), frozen)
    return jax.jit(step)(trained, jax.tree.map(jnp.zeros_like, trained), arrays)[0]


@pytest.mark.slow
def test_small_gradients_are_flushed_to_zero_without_a_scale_and_kept_with_it():
    exact, plain = gradients("float32", None), gradients("float16", None)
    scaled = gradients("float16", INITIAL_SCALE)
    error = lambda grads: float(
        optax.tree.norm(jax.tree.map(jnp.subtract, grads, exact)) / optax.tree.norm(exact)
    )
    zeros = lambda grads: np.mean([float((w == 0).mean()) for w in jax.tree.leaves(grads.layers)])
    assert (zeros(exact), zeros(plain)) == (0, 1) and error(plain) > 0.9  # the head's gradient is float32
    assert zeros(scaled) < 0.05 and error(scaled) < 0.003


@pytest.mark.slow
def test_a_scale_of_a_power_of_two_leaves_float32_gradients_bit_for_bit():
    same = jax.tree.map(np.array_equal, gradients("float32", None), gradients("float32", 2.0**15))
    assert all(jax.tree.leaves(same))


def test_the_scale_by_hand():
    def after(scale, finite, version):
        return float(next_loss_scale(jnp.float32(scale), jnp.bool_(finite), jnp.int32(version)))

    assert (after(1024, True, 199), after(1024, True, 200), after(1024, False, 200)) == (1024, 2048, 512)
    assert (after(1024, True, 400), after(1, False, 0), after(MAX_SCALE, True, 400)) == (2048, 1, MAX_SCALE)
    assert next_loss_scale(None, jnp.bool_(True), jnp.int32(1)) is None
    assert [initial_loss_scale(name) for name in ("float32", "bfloat16", "float16")] == [None, None, 2.0**15]


def test_gradients_are_added_to_unscaled_ones():
    trained, scale = {"w": jnp.array([2.0, 1.0])}, jnp.float32(8)
    loss, backward = jax.vjp(lambda params: scale_loss(jnp.sum(3 * params["w"]), scale), trained)
    sums = add_gradients(backward, loss, trained, {"w": jnp.array([10.0, 20.0])}, loss_scale=scale)
    np.testing.assert_array_equal(sums["w"], [13, 23])


@pytest.mark.parametrize("gradient", [jnp.inf, jnp.nan])
def test_an_overflow_is_skipped_counted_and_halves_the_scale(gradient):
    params, zero = {"w": jnp.ones(2)}, jnp.zeros((), jnp.int32)
    optimizer = optax.sgd(1.0)
    state = TrainState(
        params,
        optimizer.init(params),
        zero + 3,
        zero,
        kl_coef=jnp.float32(0),
        loss_scale=jnp.float32(2.0**15),
    )
    settings = {"algo": sft.Config(), "optimizer": optimizer, "max_grad_norm": 1.0}
    loss = {"loss": jnp.float32(1)}
    state, metrics = apply(state, {"w": jnp.array([gradient, 0.5])}, loss, jnp.float32(1), **settings)
    assert (float(metrics["loss_scale"]), float(metrics["nonfinite"])) == (2.0**15, 1.0)
    assert (float(state.loss_scale), int(state.nonfinite), int(state.version)) == (2.0**14, 1, 3)
    state, _ = apply(state, {"w": jnp.array([0.25, 0.5])}, loss, jnp.float32(1), **settings)
    np.testing.assert_allclose(state.params["w"], [0.75, 0.5])
    assert (float(state.loss_scale), int(state.nonfinite), int(state.version)) == (2.0**14, 0, 4)


@pytest.mark.slow
def test_a_learner_of_float16_has_float32_weights_and_a_scale():
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    build = lambda dtype: Learner(
        sft.Config(), MODEL, optax.sgd(0.1), StepConfig(32, 1, dtype=dtype), mesh=mesh
    )
    item = PackItem(np.arange(24, dtype=np.int32), np.ones(24, np.float32), {})
    learner = build("float16")
    state = learner.init_state(models.init(MODEL, jax.random.key(0)))
    first = float(learner.measure(state, [item])["loss"])
    state, metrics = learner.update(state, [[item]])
    assert (float(metrics["loss_scale"]), float(metrics["nonfinite"]), int(state.version)) == (2.0**15, 0, 1)
    assert all(w.dtype == jnp.float32 for w in jax.tree.leaves(state.params))
    assert float(learner.measure(state, [item])["loss"]) < first
    assert set(learner.update_programs(())) == {"accumulate", "apply"}
    count = lambda learner: len(jax.tree.leaves(learner.abstract_state()))
    assert count(learner) == count(build("bfloat16")) + 1  # whose checkpoints are as before


def test_bfloat16_on_turing_is_warned_of(monkeypatch):
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    config = TrainConfig(
        model=ModelConfig(path="x", dtype="bfloat16"),
        rollout=RolloutConfig(dtype="bfloat16"),
        algo=sft.Config(),
    )
    assert turing_warning(config.dtypes, mesh) == ""
    monkeypatch.setattr(kernels, "device", lambda: ("gpu", "Tesla T4"))
    assert turing_warning(config.dtypes, mesh) == (
        "warning: Tesla T4 has no bfloat16 units, so its products run as float32. Set --model.dtype float16 "
        "--rollout.dtype float16"
    )
    half = dataclasses.replace(config, model=ModelConfig(path="x", dtype="float16"), rollout=RolloutConfig())
    assert turing_warning(half.dtypes, mesh) == ""


@pytest.mark.parametrize(
    ("platform", "kind", "dtype"),
    [("cpu", "cpu", "float32"), ("gpu", "Tesla T4", "float16"), ("gpu", "NVIDIA L4", "bfloat16")],
)
def test_auto_is_the_type_that_the_device_multiplies(platform, kind, dtype, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.tools.models.device", lambda: (platform, kind))
    assert (pick_dtype("auto"), pick_dtype("float32")) == (dtype, "float32")


def test_float16_is_for_the_native_engine():
    problems = dict(RolloutConfig(engine="sglang", launch=1, dtype="float16").problems())
    assert "servers take float32 and bfloat16" in problems["dtype"]
