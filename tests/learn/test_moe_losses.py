"""Routing in training: load of the experts, balance loss, selection bias, router replay."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradients import SUM, assert_same_gradients, gradients_of
from tiny_models import random_params

from jaxrl_llm.algos import sft
from jaxrl_llm.config import DataConfig, ModelConfig, TrainConfig
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.learn.config import OptimConfig, RoutingConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.moe_losses import (
    ROUTES,
    ROUTING,
    Replay,
    balance,
    balance_weights,
    routing_metrics,
    with_bias_gradient,
)
from jaxrl_llm.learn.optim import make_optimizer
from jaxrl_llm.learn.optim_states import master_weights, stored_weights
from jaxrl_llm.learn.update import StepConfig, apply
from jaxrl_llm.models import TransformerConfig, abstract
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.experts.router import (
    Routing,
    RoutingSums,
    route_spec,
    routing_sums,
    sparse_mlp,
)
from jaxrl_llm.models.lora_config import LoraConfig
from jaxrl_llm.models.mixer_config import ConvConfig
from jaxrl_llm.recipe.checks import check_config, check_models
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.sharding.config import POLICY
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.structs import TrainState

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    initializer_range=0.3, moe=MoEConfig(num_experts=4, experts_per_token=2, expert_size=8),
)  # fmt: skip


def test_load_and_balance_by_hand():
    """Three tokens, the last padding, of scores (1, 2, 4, 1) / 8 and (1, 1, 1, 1) / 4.

    Experts 1 and 2, then 0 and 1, are chosen: shares f = (1, 2, 1, 0) / 4 and P = (3, 4, 6, 3) / 16."""
    scores = np.array([[1, 2, 4, 1], [2, 2, 2, 2], [7, 1, 0, 0]]) / 8
    routing = Routing(jnp.log(jnp.array(scores[None])), jnp.array([[[1, 2], [0, 1], [0, 1]]]))
    sums = routing_sums(MoEConfig(4, 2), routing, jnp.array([[1, 1, 0]]))
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
        MoEConfig(4, 2, score="sigmoid"), Routing(logits, jnp.array([[[1, 2]]])), jnp.ones((1, 1), int)
    )
    np.testing.assert_allclose(sums.scores, np.array([0.5, 0.75, 0.8, 0.2]) / 2.25, rtol=1e-6)


def test_the_gradient_of_the_balance_loss_by_hand():
    """That of token t is X / N p_tx (f_x - sum_y f_y p_ty), here in two micro-batches of 3 and 2 tokens."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 4))
    chosen = np.argsort(-logits, axis=-1)[:, :2]
    moe, cuts = MoEConfig(4, 2), (slice(0, 3), slice(3, 5))
    sums_of = lambda x, cut: routing_sums(
        moe, Routing(x[None, cut], jnp.asarray(chosen[None, cut])), jnp.ones((1, cut.stop - cut.start), int)
    )
    score = lambda x, cut, names: {ROUTING: jax.tree.map(lambda a: a[None], sums_of(x, cut))}
    weights = balance_weights(score, jnp.asarray(logits), cuts)
    loss = lambda x: sum(jnp.sum(weights[0] * sums_of(x, cut).scores) for cut in cuts)
    value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    f = np.bincount(chosen.ravel(), minlength=4) / 10
    assert value == pytest.approx(4 * (f * p.mean(axis=0)).sum(), rel=1e-5)
    np.testing.assert_allclose(gradient, 4 / 5 * p * (f - p @ f[:, None]), atol=1e-6)


def items(count=8, seed=0):
    """Sequences of 9 to 15 tokens, none of them trained on: the balance loss is the loss.

    The first half of them begin alike, and the second.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(9, 16, count)
    tokens = [rng.integers(0, 64, n).astype(np.int32) for n in lengths]
    for i, sequence in enumerate(tokens):
        sequence[:7] = tokens[i // (count // 2) * (count // 2)][:7]
    return [PackItem(sequence, np.zeros(len(sequence), np.float32)) for sequence in tokens]


def learner(rows=8, row_tokens=16, mesh=None, model=MODEL, **settings):
    mesh = mesh or MeshConfig(fsdp=1)
    mesh = make_mesh(mesh, jax.devices()[: math.prod(mesh.sizes.values())])
    step = StepConfig(row_tokens=row_tokens, rows=rows, max_grad_norm=0.0, **settings)
    return Learner(sft.Config(), model, SUM, step, mesh=mesh)


def one_update(built, sequences=None):
    """(metrics, gradients by name) of one update from the same weights."""
    with jax.set_mesh(built.mesh):
        state = built.init_state(jax.device_put(random_params(built.model), built.param_shardings))
        state, metrics = built.update(state, [sequences or items()])
    return jax.device_get(metrics), gradients_of(state)


@functools.cache
def reference_update():
    """All 8 rows as one micro-batch."""
    return one_update(learner(balance_coef=1.0))


def test_the_loss_is_that_of_the_whole_mini_batch():
    """Two layers: the sum of their balance, whose mean is a metric."""
    metrics, gradient = reference_update()
    assert 1.01 < metrics["moe/balance"] < 4 and 1.02 < metrics["moe/load_max"] < 4
    assert metrics["loss"] == pytest.approx(2 * metrics["moe/balance"], rel=1e-6)
    assert np.linalg.norm(gradient["layers.router"]) > 0.01


@pytest.mark.parametrize(
    ("rows", "row_tokens", "mesh", "share"),
    [
        (1, 32, None, True),
        pytest.param(1, 16, None, False, marks=pytest.mark.slow),
        pytest.param(4, 16, None, False, marks=pytest.mark.slow),
        pytest.param(2, 32, MeshConfig(fsdp=2, expert=2), True, marks=pytest.mark.slow),
        pytest.param(
            4, 16, MeshConfig(fsdp=1, expert=2, tensor=2, sequence=2), False, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_no_split_changes_the_balance_loss(rows, row_tokens, mesh, share):
    """Micro-batches, packed rows, shared prefixes and meshes: metrics and gradient of one micro-batch."""
    expected, expected_gradient = reference_update()
    built = learner(rows, row_tokens, mesh, balance_coef=1.0, share_prefixes=share)
    metrics, gradient = one_update(built)
    assert share == (metrics.get("packing/shared_fraction", 0) > 0.2)
    for name in ("loss", "moe/load_max", "moe/balance"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-6)
    assert_same_gradients(gradient, expected_gradient, zeros=("norm",))


def test_a_model_without_experts_is_refused_by_name():
    dense = dataclasses.replace(MODEL, moe=None)
    with pytest.raises(ConfigError, match=r"--routing\.balance_coef: the model has no experts"):
        check_models(TrainConfig(routing=RoutingConfig(balance_coef=0.1)), {POLICY: dense})


BIASED = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, score="sigmoid", selection_bias=True))


TWO_STACKS = TransformerConfig(
    vocab_size=8, hidden_size=4, mlp_size=4, num_layers=3, num_heads=1, num_kv_heads=1, head_dim=2,
    layer_kinds=("conv", "attention", "conv"), conv=ConvConfig(),
    moe=MoEConfig(4, 2, 4, score="sigmoid", selection_bias=True, dense_layers=1),
)  # fmt: skip


def test_the_gradient_of_the_selection_bias_is_the_sign_of_the_excess_load():
    """Mean 2 in both layers; layer 1 is layers[0], layer 2 is conv_layers[0]."""
    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape), abstract(TWO_STACKS))
    sums = RoutingSums(jnp.array([[5, 1, 2, 0], [2, 2, 1, 3]]), jnp.ones((2, 4)))
    grads = with_bias_gradient(zeros, sums)
    np.testing.assert_array_equal(grads.layers.router_bias[...], [[1, -1, 0, -1]])
    np.testing.assert_array_equal(grads.conv_layers.router_bias[...], [[0, 0, -1, 1]])


@pytest.mark.slow
def test_the_selection_bias_moves_towards_the_mean_load():
    """Loads 3, 1, 2, 2 of layer 1 and 2, 2, 3, 1 of layer 2, mean 2, then all 2; the gradient itself is 0.
    Layer 1, attention, is layers[0]; layer 2 is conv_layers[0]."""
    optim = OptimConfig(weight_decay=0.1, store_param_remainders=True, ema=0.5)
    half = lambda w: jnp.full(w.shape, 0.5)
    params = jax.tree.map(half, abstract(TWO_STACKS))
    biases = lambda tree: [np.asarray(stack.router_bias[...]) for stack in (tree.layers, tree.conv_layers)]
    optimizer, zero = make_optimizer(optim, 10, bias_rate=0.25), jnp.zeros((), jnp.int32)
    opt_state = jax.jit(optimizer.init)(params)
    stored = jax.jit(stored_weights)(params, opt_state)
    state = TrainState(stored, opt_state, zero, zero, kl_coef=jnp.float32(0))
    grads = jax.tree.map(lambda w: jnp.zeros(w.shape), params)
    # Operation by operation all of it compiles for twice as long.
    update = jax.jit(functools.partial(apply, algo=sft.Config(), optimizer=optimizer, max_grad_norm=1.0))
    for load in ([[3, 1, 2, 2], [2, 2, 3, 1]], [[2, 2, 2, 2]] * 2):
        metrics = {"loss": jnp.float32(1), ROUTING: RoutingSums(jnp.array(load), jnp.ones((2, 4)))}
        state, metrics = update(state, grads, metrics, jnp.float32(1))
        moved = biases(jax.jit(master_weights)(state.params, state.opt_state))
        np.testing.assert_array_equal(moved, [[[0.25, 0.75, 0.5, 0.5]], [[0.5, 0.5, 0.25, 0.75]]])
        assert metrics["moe/load_max"] == max(load[0]) / 2 and metrics["grad_norm"] == 0
    fixed = make_optimizer(optim, 10)
    moved, _ = fixed.update(jax.tree.map(jnp.ones_like, grads), fixed.init(params), params)
    assert not np.any(biases(moved))


@pytest.mark.parametrize(
    ("model", "lora", "message"),
    [(MODEL, 0, "the model's routers have none"), (BIASED, 2, "with --lora.rank it is frozen")],
    ids=["no bias", "lora"],
)
def test_a_selection_bias_that_cannot_move_is_refused(model, lora, message):
    targets = ("q_proj",)
    config = TrainConfig(routing=RoutingConfig(bias_rate=0.1), lora=LoraConfig(rank=lora, targets=targets))
    with pytest.raises(ConfigError, match=message):
        check_models(config, {POLICY: model})


@pytest.mark.parametrize("strict", [False, True])
def test_replayed_experts_are_weighted_by_the_present_logits(strict):
    """Three tokens: experts 0 and 3 are replayed, none, then those that the router chooses."""
    w = jax.tree.map(lambda x: x[0], random_params(MODEL).layers)
    h = np.random.default_rng(0).normal(size=(1, 3, 16)).astype(np.float32)
    logits = h[0] @ w.router.get_value()
    own = np.sort(np.argsort(-logits, axis=-1)[:, :2], axis=-1)
    assert (own[0] != [0, 3]).any()
    routes = np.array([[[0, 3], [255, 255], own[2]]], np.uint8)
    is_passed = np.array([[x in experts for x in range(4)] for experts in ([0, 3], own[1], own[2])])

    def replayed(w):
        args = jnp.asarray(h), jax.nn.silu, None, TRAIN, strict, jnp.asarray(routes)
        y, routing = sparse_mlp(MODEL, w, *args)
        return jnp.sum(y * jnp.arange(16.0)), routing_sums(MODEL.moe, routing, jnp.ones((1, 3), int))

    def by_hand(w):
        p = jnp.where(is_passed, jax.nn.softmax(h[0] @ w.router[...], axis=-1), 0)
        hidden = jax.nn.silu(jnp.einsum("td,xdf->txf", h[0], w.expert_gate[...]))
        hidden *= jnp.einsum("td,xdf->txf", h[0], w.expert_up[...])
        outs = jnp.einsum("txf,xfd->txd", hidden, w.expert_down[...])
        return jnp.sum((p / p.sum(axis=-1, keepdims=True))[..., None] * outs * jnp.arange(16.0))

    (value, sums), grads = jax.jit(jax.value_and_grad(replayed, has_aux=True))(w)
    expected, expected_grads = jax.jit(jax.value_and_grad(by_hand))(w)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    common = len({0, 3} & {*own[0].tolist()})
    assert (sums.replayed, sums.agreed, sums.load.sum()) == (4, 2 + common, 6)
    metrics, _ = routing_metrics({ROUTING: jax.tree.map(lambda x: x[None], sums)})
    assert metrics["moe/route_agreement"] == (2 + common) / 4


@pytest.mark.slow
def test_routes_that_are_replayed_into_the_model_that_chose_them_change_nothing():
    """Routes of packed rows, over a mesh that divides the tokens of a row; and other routes do."""
    mesh = MeshConfig(fsdp=2, sequence=2)
    built = learner(4, 16, mesh, balance_coef=1.0, replay=Replay("rollout", route_spec(MODEL)))
    sequences, (metrics, gradient) = items(), reference_update()
    with jax.set_mesh(built.mesh):
        params = jax.device_put(random_params(MODEL), built.param_shardings)
        for item, outputs in zip(sequences, built.scorer.start(params, sequences, (ROUTES,))(), strict=True):
            item.routes = outputs[ROUTES]
    again, same = one_update(built, sequences)
    assert again["moe/route_agreement"] == 1 and again["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
    assert_same_gradients(same, gradient, zeros=("norm",))
    for item in sequences:
        item.routes = np.tile(np.array([0, 1], np.uint8), (len(item.tokens), 2, 1))
    other, _ = one_update(built, sequences)
    assert other["moe/route_agreement"] < 0.8 and other["moe/load_max"] == 2


def test_a_replay_without_a_rollout_is_refused():
    config = TrainConfig(algo=sft.Config(), routing=RoutingConfig(replay="rollout"))
    model, data = ModelConfig(architecture=MODEL, tokenizer="tiny"), DataConfig(path="a.jsonl")
    config = dataclasses.replace(config, model=model, data=data)
    with pytest.raises(ConfigError, match=r"--routing.replay is for runs with a rollout: sft has none"):
        check_config(config, writes=False)


def test_routes_that_servers_cannot_report_are_refused():
    rollout = RolloutConfig(engine="sglang", servers=("http://x",))
    config = TrainConfig(routing=RoutingConfig(replay="rollout"), rollout=rollout)
    model = dataclasses.replace(MODEL, family="mixtral", tie_embeddings=False)
    with pytest.raises(ConfigError, match=r"--routing.replay rollout: SGLang servers of mixtral end with"):
        check_models(config, {POLICY: model})
    check_models(config, {POLICY: dataclasses.replace(model, family="qwen3_moe")})
