"""Routing in training: load of the experts, balance loss, selection bias, router replay."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import random_params

from jaxrl_llm.algos import sft
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.routing import ROUTING, balance, routing_metrics
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.moe import Routing, RoutingSums, routing_sums
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    initializer_range=0.3, moe=MoEConfig(num_experts=4, experts_per_token=2, expert_size=8),
)  # fmt: skip


def test_load_and_balance_by_hand():
    """Three tokens, the last padding, of scores (1, 2, 4, 1) / 8 and (1, 1, 1, 1) / 4.

    Experts 1 and 2, then 0 and 1, are chosen: shares f = (1, 2, 1, 0) / 4 and P = (3, 4, 6, 3) / 16."""
    scores = np.array([[1, 2, 4, 1], [2, 2, 2, 2], [7, 1, 0, 0]]) / 8
    routing = Routing(jnp.log(jnp.array(scores[None])), jnp.array([[[1, 2], [0, 1], [0, 1]]]))
    sums = routing_sums(MoEConfig(4, 2), routing, jnp.array([[True, True, False]]))
    np.testing.assert_array_equal(sums.load, [1, 2, 1, 0])
    np.testing.assert_allclose(sums.scores, np.array([3, 4, 6, 3]) / 8, rtol=1e-6)
    metrics, _ = routing_metrics({ROUTING: RoutingSums(sums.load[None], sums.scores[None])})
    assert metrics["moe/load_max"] == 2  # expert 1: 2 assignments, 1 in the mean
    assert metrics["moe/balance"] == pytest.approx(4 * (3 + 2 * 4 + 6) / 64, rel=1e-6)


def test_balance_is_1_for_equal_experts_and_their_number_for_one():
    load = jnp.array([[3, 3, 3, 3], [12, 0, 0, 0]])
    np.testing.assert_allclose(balance(load, load.astype(jnp.float32) / 2, 6.0), [1, 4])


def test_sigmoid_scores_of_a_token_sum_to_1():
    logits = jnp.log(jnp.array([[[1.0, 3, 4, 1 / 4]]]))  # sigmoids 1/2, 3/4, 4/5, 1/5
    sums = routing_sums(
        MoEConfig(4, 2, score="sigmoid"), Routing(logits, jnp.array([[[1, 2]]])), jnp.ones((1, 1), bool)
    )
    np.testing.assert_allclose(sums.scores, np.array([0.5, 0.75, 0.8, 0.2]) / 2.25, rtol=1e-6)


def items(count=8, seed=0):
    """Sequences of 4 to 15 tokens, a random part of them trained on."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 16, count)
    return [
        PackItem(rng.integers(0, 64, n).astype(np.int32), (rng.random(n) < 0.7).astype(np.float32))
        for n in lengths
    ]


def learner(rows=8, row_tokens=16, mesh=None, model=MODEL, **settings):
    """SGD of rate 1: the change of the weights is the gradient."""
    mesh = mesh or MeshConfig(fsdp=1)
    mesh = make_mesh(mesh, jax.devices()[: math.prod(mesh.sizes.values())])
    step = StepConfig(row_tokens=row_tokens, rows=rows, max_grad_norm=0.0, **settings)
    return Learner(sft.Config(), model, optax.sgd(1.0), step, mesh)


def one_update(built, sequences=None):
    """(metrics, gradient) of one update from the same weights."""
    before = random_params(built.model)
    with jax.set_mesh(built.mesh):
        state = built.init_state(jax.device_put(before, built.param_shardings))
        state, metrics = built.update(state, [sequences or items()])
    return jax.device_get(metrics), jax.tree.map(lambda a, b: a - np.array(b), before, state.params)


@functools.cache
def reference_update():
    return one_update(learner())


def test_metrics_of_the_load_do_not_depend_on_micro_batches():
    """Rows twice as long hold as much padding as tokens."""
    metrics, _ = reference_update()
    again, _ = one_update(learner(rows=1, row_tokens=32))
    for name in ("moe/load_max", "moe/balance"):
        assert 1.02 < metrics[name] < 4
        assert again[name] == pytest.approx(metrics[name], rel=1e-6)
    measured = learner(rows=4).measure(
        learner().init_state(jax.tree.map(jnp.asarray, random_params(MODEL))), items()
    )
    assert measured["moe/balance"] == pytest.approx(metrics["moe/balance"], rel=1e-6)
