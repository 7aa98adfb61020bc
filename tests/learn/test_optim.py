"""Optimizers: one step by hand each, ranges of their settings, and updates that must be skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import models
from jaxrl_llm.algos import sft
from jaxrl_llm.learn.optim import OptimConfig, make_optimizer, make_schedule
from jaxrl_llm.learn.update import apply
from jaxrl_llm.ranges import problems
from jaxrl_llm.structs import TrainState

TINY = models.TransformerConfig(
    vocab_size=8,
    hidden_size=8,
    mlp_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    qkv_bias=True,
)
SETTINGS = {"learning_rate": 0.1, "weight_decay": 0.01, "b1": 0.9, "b2": 0.99}


def step(config, weight=2.0, gradient=0.5, steps=1):
    """The updates of a 2 x 2 matrix and of a norm with these equal entries, at the last of `steps`."""
    params = {"matrix": jnp.full((2, 2), weight), "norm": jnp.full(2, weight)}
    gradients = {"matrix": jnp.full((2, 2), gradient), "norm": jnp.full(2, gradient)}
    optimizer = make_optimizer(config, 10)
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(gradients, state, params)
    return float(updates["matrix"][0, 0]), float(updates["norm"][0])


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("adamw", 1.0),  # m / sqrt(v) = 0.5 / 0.5
        ("lion", 1.0),  # the sign
        ("sgd", 0.5),  # the gradient
        ("adafactor", 2.0),  # (0.5 / 0.5, RMS clipped to 1) times the weights' RMS of 2
    ],
)
def test_one_step_by_hand(name, direction):
    """-rate (direction + decay weight), without decay for the norm; decay is 0.01 x 2."""
    matrix, norm = step(OptimConfig(name=name, **SETTINGS))
    assert matrix == pytest.approx(-0.1 * (direction + 0.02), rel=1e-5)
    assert norm == pytest.approx(-0.1 * direction, rel=1e-5)


def test_momentum_of_sgd():
    matrix, _ = step(OptimConfig(name="sgd", **SETTINGS), steps=2)
    assert matrix == pytest.approx(-0.1 * (0.5 + 0.9 * 0.5 + 0.02))
    plain, _ = step(OptimConfig(name="sgd", **SETTINGS | {"b1": 0.0}), steps=2)
    assert plain == pytest.approx(-0.1 * (0.5 + 0.02))


def test_the_first_update_of_a_warm_up_changes_nothing():
    for name in ("adamw", "lion", "sgd", "adafactor"):
        matrix, norm = step(OptimConfig(name=name, **SETTINGS, warmup_steps=5))
        assert (matrix, norm) == (0.0, 0.0), name


@pytest.mark.parametrize(
    "bad",
    [
        {"b1": 1.0},
        {"b2": 1.0},
        {"b1": -0.1},
        {"learning_rate": 1e39},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"eps": float("nan")},
        {"eps": 0.0},
        {"weight_decay": float("inf")},
        {"warmup_steps": -1},
        {"final_fraction": 1.5},
        {"max_grad_norm": float("inf")},
        {"max_nonfinite": 0},
    ],
)
def test_every_field_has_a_range(bad):
    assert [field for field, _ in problems(OptimConfig(**bad))] == list(bad)


def nan_updates():
    return optax.stateless(lambda updates, params: {name: x * jnp.nan for name, x in updates.items()})


@pytest.mark.parametrize(
    ("weight", "gradient", "loss", "optimizer"),
    [
        (1.0, jnp.nan, 1.0, optax.sgd(0.1)),
        (1.0, 1.0, jnp.inf, optax.sgd(0.1)),
        (1.0, 1.0, 1.0, nan_updates()),  # a finite gradient, and an optimizer that makes NaN of it
        (1.0, 1.0, 1.0, optax.sgd(1e39)),
        (3e38, -1.0, 1.0, optax.sgd(3e38)),  # update and weight are finite, their sum is not
        (jnp.nan, 1.0, 1.0, optax.sgd(0.1)),
    ],
)
def test_an_update_that_is_not_finite_is_skipped_and_counted(weight, gradient, loss, optimizer):
    params = {"w": jnp.full(2, weight)}
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(params, optimizer.init(params), zero + 3, zero, jnp.float32(0.1))
    settings = {"algo": sft.Config(), "optimizer": optimizer, "max_grad_norm": 0.0}
    for skipped in (1, 2):
        state, metrics = apply(
            state, {"w": jnp.full(2, gradient)}, {"loss": jnp.float32(loss)}, jnp.float32(1), **settings
        )
        np.testing.assert_array_equal(state.params["w"], params["w"])
        assert (int(state.version), int(state.nonfinite), float(metrics["nonfinite"])) == (3, skipped, 1.0)


def test_a_finite_update_is_applied_and_its_norms_are_reported():
    params = {"w": jnp.array([3.0, 4.0])}
    zero = jnp.zeros((), jnp.int32)
    optimizer = optax.sgd(1.0)
    state = TrainState(params, optimizer.init(params), zero, zero + 1, jnp.float32(0))
    settings = {"algo": sft.Config(), "optimizer": optimizer, "max_grad_norm": 0.5}
    state, metrics = apply(
        state, {"w": jnp.array([0.6, 0.8])}, {"loss": jnp.float32(1)}, jnp.float32(1), **settings
    )
    np.testing.assert_allclose(state.params["w"], [2.7, 3.6], rtol=1e-6)
    assert (int(state.version), int(state.nonfinite)) == (1, 0)
    norms = {name: float(metrics[name]) for name in ("grad_norm", "update_norm", "param_norm")}
    assert norms == pytest.approx({"grad_norm": 1.0, "update_norm": 0.5, "param_norm": 4.5})


def test_schedules():
    rate = make_schedule(OptimConfig(learning_rate=1.0, schedule="cosine", warmup_steps=10), 110)
    assert [float(rate(i)) for i in (0, 5, 10, 60, 110)] == pytest.approx([0, 0.5, 1, 0.55, 0.1], abs=1e-6)
    assert float(make_schedule(OptimConfig(learning_rate=0.5), 9)(7)) == 0.5


def test_decay_spares_norms_and_biases():
    params = models.init(TINY, jax.random.key(0))
    optimizer = make_optimizer(OptimConfig(learning_rate=1.0, weight_decay=0.1), 10)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    moved = {name for name, u in models.named_leaves(updates) if float(jnp.abs(u).max()) > 0}
    assert moved == {"embed", *(f"layers.{w}" for w in ("q", "k", "v", "o", "gate", "up", "down"))}
